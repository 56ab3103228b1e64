"""Four machines behind one shaped uplink: one copy crosses it, whoever dies, and nobody else is let in."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from node import layout
from node.inventory import KEYS
from tests.lab import network, settings, shards
from tests.lab.shards import Shards, carried
from tests.lab.shell import run

pytestmark = pytest.mark.lab
ENVIRONMENT = {
    **os.environ,
    "KIMI_NODES_LAB": "fantest",
    "KIMI_NODES_LAB_NETWORK": "10.213.20",
    "PYINFRA_PROGRESS": "off",
    "PYTHONPATH": str(settings.CHECKOUT),
}
LAB = settings.read(ENVIRONMENT)
NAMES = ("h1", "h2", "h3", "h4")
STRANGER = "h9"
MIB = 1 << 20
SHARDS, SHARD = 4, 64 * MIB
UPLINK = "200mbit"
DIRECTORY = "/srv/weights"
PORTS = (KEYS["weights_port"].default, KEYS["weights_port"].default + 1)


def lab(*arguments: str, ok: bool = True) -> str:
    command = [str(settings.CHECKOUT / "bin/lab"), *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    assert not ok or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ssh(machine: str, command: str, ok: bool = True) -> str:
    return lab("ssh", machine, command, ok=ok).strip()


def everywhere(command: str, machines: tuple[str, ...] = NAMES) -> None:
    """The same on several machines at once."""
    started = [
        subprocess.Popen(
            ["ssh", "-F", str(LAB.ssh_config), machine, command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for machine in machines
    ]
    for process in started:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output


def wait_until(true: Callable[[], Any], limit: float = 90) -> None:
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.3)


class Fleet(Shards):
    def forget(self, *machines: str) -> None:
        """Weights that a machine has are gone."""
        unit = shlex.quote(self.paths.unit)
        everywhere(
            f"systemctl stop {unit}; rm -rf {DIRECTORY}/*/*/* {DIRECTORY}/.staging/* {self.paths.status}", machines
        )

    def fetch(self, *machines: str) -> None:
        everywhere(f"systemctl start --no-block {shlex.quote(self.paths.unit)}", machines)

    def status(self, machine: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(ssh(machine, f"cat {self.paths.status}", ok=False))
            return found
        except ValueError:
            return {"phase": "none", "done": 0}

    def complete(self, *machines: str) -> None:
        for machine in machines:
            wait_until(lambda machine=machine: self.status(machine)["phase"] in ("complete", "failed"))  # type: ignore[misc]
            assert self.status(machine)["phase"] == "complete", ssh(machine, f"journalctl -n 20 -u {self.paths.unit}")
        everywhere(f"python3 {layout.WEIGHTS_AGENT} verify --deep", machines)

    def origins(self) -> list[str]:
        """Machines that have fetched from the hub since they were told to forget."""
        said = "this node fetches from the hub for all"
        return [
            machine
            for machine in NAMES
            if said in ssh(machine, f"journalctl --no-pager -o cat --since=@{self.began:.0f} -u {self.paths.unit}")
        ]

    began = 0.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Machines on which the weights role has run once, from bare: the first test looks at what that took."""
    lab("down")
    try:
        lab("up", str(len(NAMES)))
        manifest, path = shards.publish(LAB, SHARDS, SHARD, seed=6)
        run(
            *("ip", "netns", "exec", LAB.namespace("services"), "tc", "qdisc", "add", "dev", "host0", "root"),
            *("tbf", "rate", UPLINK, "burst", "1mb", "latency", "50ms"),
        )
        made = Fleet(manifest, path, ENVIRONMENT, DIRECTORY)
        code, output = made.deploy()
        assert code == 0, output
        yield made
    finally:
        lab("down")


def test_one_copy_crosses_the_uplink_and_then_nothing_changes(fleet: Fleet) -> None:
    fleet.complete(*NAMES)
    fleet.forget(*NAMES)
    before, began = carried(LAB), time.monotonic()
    fleet.fetch(*NAMES)
    fleet.complete(*NAMES)
    took = time.monotonic() - began
    size = fleet.manifest.bytes
    crossed = carried(LAB) - before
    print(f"{size} bytes to {len(NAMES)} nodes: {took:.1f} s, {crossed / size:.3f} x the size over the uplink")
    assert crossed <= 1.05 * size
    code, output = fleet.deploy()
    assert code == 0, output
    rows = [line.split() for line in output.splitlines() if "Weights: " in line and "Starting" not in line]
    assert rows and all(row[-4:] == ["4", "-", "-", "4"] for row in rows), output


def test_a_dead_origin_is_replaced_and_finds_all_when_it_comes_back(fleet: Fleet) -> None:
    fleet.forget(*NAMES)
    fleet.began, before = time.time(), carried(LAB)
    fleet.fetch("h1")
    wait_until(lambda: fleet.status("h1")["phase"] == "fetching")
    fleet.fetch(*NAMES[1:])
    wait_until(lambda: fleet.status("h1").get("files_done", 0) >= SHARDS // 2)
    lab("cut", "h1")
    try:
        fleet.complete(*NAMES[1:])
    finally:
        lab("heal", "h1")
    fleet.complete("h1")
    assert len(fleet.origins()) == 2
    again = carried(LAB) - before - fleet.manifest.bytes
    print(f"{again} bytes more than the size over the uplink, frames and all")
    assert again <= 0.05 * fleet.manifest.bytes + SHARD  # the second had copied what the first had, but its last second


def forge(fleet: Fleet, name: str) -> str:
    """A program that flips a byte of a shard, and makes the receipt say that it is right."""
    return f"""
import json, os, shutil, sys
sys.path.insert(0, "{layout.TOOLS}")
from weights import receipt
snapshot, name = "{fleet.paths.snapshot}", "{name}"
path, proof = os.path.join(snapshot, name), os.path.join(snapshot, receipt.NAME)
os.chmod(path, 0o644)
with open(path, "r+b") as shard:
    shard.seek(54321)
    byte = shard.read(1)
    shard.seek(54321)
    shard.write(bytes([byte[0] ^ 1]))
proved = json.load(open(proof))
proved["files"][name].update(receipt.stamps(os.stat(path)))
os.chmod(proof, 0o644)
json.dump(proved, open(proof, "w"))
shutil.rmtree("{layout.SHARING_TABLES}")
"""


def test_a_wrong_shard_that_a_peer_gives_is_not_published(fleet: Fleet) -> None:
    fleet.complete(*NAMES)
    name = fleet.manifest.files[3].path
    unit = layout.SHARING_UNIT
    everywhere(f"systemctl stop {unit}", ("h3", "h4"))
    ssh("h1", f"systemctl stop {unit}; python3 -c {shlex.quote(forge(fleet, name))}; systemctl start {unit}")
    try:
        fleet.forget("h2")
        before = carried(LAB)
        fleet.fetch("h2")
        fleet.complete("h2")
        said = ssh("h2", f"journalctl --no-pager -o cat -n 40 -u {fleet.paths.unit}")
        assert f"{name}: found sha256:" in said and "from other nodes" in said
        assert carried(LAB) - before <= 1.05 * SHARD + MIB  # that one, from the hub
    finally:
        everywhere(f"systemctl start {unit}", ("h3", "h4"))


def connects(namespace: str, address: str, port: int) -> bool:
    program = f"import socket; socket.create_connection(('{address}', {port}), 3)"
    command = ["ip", "netns", "exec", namespace, "/usr/bin/python3", "-c", program]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_stranger_cannot_connect(fleet: Fleet) -> None:
    network.plug(LAB, STRANGER, LAB.address(STRANGER))
    try:
        for port in PORTS:
            assert connects(LAB.namespace("h2"), LAB.address("h1"), port)
            assert not connects(LAB.namespace(STRANGER), LAB.address("h1"), port)
        assert connects(LAB.namespace(STRANGER), LAB.address("h1"), 22)  # it is these ports that are closed to it
    finally:
        network.unplug(LAB, STRANGER)
