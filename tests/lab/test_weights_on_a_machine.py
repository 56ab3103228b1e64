"""The weights role on a machine with systemd: connection, power or hub may go, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from node import layout
from tests.lab import hub, settings, shards
from tests.lab.shards import Shards, carried

pytestmark = pytest.mark.lab
ENVIRONMENT = {
    **os.environ,
    "KIMI_NODES_LAB": "wtest",
    "KIMI_NODES_LAB_NETWORK": "10.213.10",
    "PYINFRA_PROGRESS": "off",
    "PYTHONPATH": str(settings.CHECKOUT),
}
LAB = settings.read(ENVIRONMENT)
MIB = 1 << 20
SHARDS, SHARD = 4, 16 * MIB
DIRECTORY = "/srv/weights"


def lab(*arguments: str, ok: bool = True) -> str:
    command = [str(settings.CHECKOUT / "bin/lab"), *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    assert not ok or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ssh(command: str, ok: bool = True) -> str:
    return lab("ssh", "h1", command, ok=ok).strip()


class Weights(Shards):
    """As the machine sees it."""

    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(ssh(f"cat {self.paths.status}", ok=False))
            return found
        except ValueError:
            return {"phase": "none", "done": 0}

    def wait(self, phase: str, done: int = 0, limit: float = 120) -> None:
        end = time.monotonic() + limit
        while (status := self.status())["phase"] != phase or status["done"] < done:
            assert time.monotonic() < end, status
            time.sleep(0.3)

    def assert_whole(self) -> None:
        said = json.loads(ssh(f"python3 {layout.WEIGHTS_AGENT} verify --deep --json"))
        assert [answer["state"] for answer in said["weights"]] == ["whole"]
        assert ssh(f"ls -A {DIRECTORY}/.staging | grep -v '[.]lock$'", ok=False) == ""

    def show(self, what: str) -> str:
        return ssh(f"systemctl show --value --property={what} {self.paths.unit}")


@pytest.fixture(scope="module")
def machine() -> Iterator[Weights]:
    lab("down")
    try:
        lab("up", "1")
        manifest, path = shards.publish(LAB, SHARDS, SHARD, seed=5)
        yield Weights(manifest, path, ENVIRONMENT, DIRECTORY)
    finally:
        lab("down")


@pytest.fixture
def weights(machine: Weights) -> Iterator[Weights]:
    """Nothing fetched, the hub well, no log of before."""
    lab("hub", "clear")
    ssh(f"systemctl stop 'kimi-weights-*'; rm -rf {DIRECTORY} {layout.WEIGHTS_STATE}/*")
    log = LAB.state / "requests.jsonl"
    if log.exists():
        os.truncate(log, 0)
    yield machine
    lab("heal", "h1", ok=False)


def sent() -> int:
    return sum(json.loads(line)["sent"] for line in (LAB.state / "requests.jsonl").read_text().splitlines())


def test_fetched_once_and_then_nothing_changes(weights: Weights) -> None:
    code, output = weights.deploy()
    assert code == 0, output
    weights.assert_whole()
    lab("hub", "token", "on")  # the hub would let nobody in: a node that has its copy does not ask
    code, output = weights.deploy()
    assert code == 0, output
    rows = [line.split() for line in output.splitlines() if "Weights: " in line and "Starting" not in line]
    assert rows and all(row[-4:] == ["1", "-", "-", "1"] for row in rows), output


def test_ctrl_c_of_the_operator_loses_nothing(weights: Weights) -> None:
    lab("hub", "rate", str(MIB))
    process = weights.start()
    weights.wait("fetching", MIB)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert weights.show("ActiveState") == "active"
    lab("hub", "clear")
    code, output = weights.deploy()
    assert code == 0, output
    weights.assert_whole()


def test_a_dead_link_is_outlived_by_node_and_operator(weights: Weights) -> None:
    lab("hub", "rate", str(MIB // 2))
    before, process = carried(LAB), weights.start()
    try:
        weights.wait("fetching", MIB)
        lab("cut", "h1")
        time.sleep(20)
        lab("heal", "h1")
        lab("hub", "clear")
        output, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, output
    weights.assert_whole()
    assert carried(LAB) - before <= 1.05 * weights.manifest.bytes + SHARD


@pytest.mark.parametrize("how", ["systemctl reboot", "systemctl reboot -ff"])
def test_a_reboot_loses_nothing_and_needs_nobody(weights: Weights, how: str) -> None:
    lab("hub", "rate", str(2 * MIB))
    before, process = carried(LAB), weights.start()
    try:
        weights.wait("fetching", weights.manifest.bytes // 3)
    finally:
        process.kill()
        process.communicate()
    boot = ssh("cat /proc/sys/kernel/random/boot_id; systemctl show --value -p UserspaceTimestampMonotonic")
    ssh(how, ok=False)
    end = time.monotonic() + 60
    again = "cat /proc/sys/kernel/random/boot_id; systemctl show --value -p UserspaceTimestampMonotonic"
    while (now := ssh(again, ok=False)) == boot or len(now) < 30:
        assert time.monotonic() < end, now
        time.sleep(0.3)
    weights.wait("complete")
    weights.assert_whole()
    assert carried(LAB) - before <= 1.05 * weights.manifest.bytes + SHARD


def test_a_transfer_that_stalls_is_restarted_by_the_watchdog(weights: Weights) -> None:
    """The times are shortened here; the unit's own are checked by tests/roles."""
    lab("hub", "rate", str(4 * MIB))
    name = weights.manifest.files[1].path
    lab("hub", "fault", "stall", name, str(SHARD // 2), "2")
    drop_in = f"/run/systemd/system/{weights.paths.unit}.d"
    short = "[Service]\\nWatchdogSec=4\\nRestartSec=1\\n"
    ssh(f"mkdir -p {drop_in}; printf '{short}' > {drop_in}/short.conf; systemctl daemon-reload")
    try:
        code, output = weights.deploy()
        assert code == 0, output
        weights.assert_whole()
        journal = ssh(f"journalctl --no-pager -o cat -u {weights.paths.unit}")
        assert "Watchdog timeout" in journal
    finally:
        ssh(f"rm -r {drop_in}; systemctl daemon-reload")
    assert sent() <= weights.manifest.bytes + SHARD


def test_a_gated_repository_fails_the_host_at_once_and_opens_with_a_token(weights: Weights) -> None:
    lab("hub", "token", "on")
    code, output = weights.deploy()
    assert code == 1
    assert "hub_token_file" in output and "Fix:" in output and "401" in output
    assert weights.show("Result") == "exit-code" and weights.show("ActiveState") == "failed"
    token = (LAB.state / "hub-token").read_text().strip()
    lab("hub", "rate", str(4 * MIB))
    process = weights.start(f"hub_token_file={LAB.state / 'hub-token'}")
    seen = ""
    while process.poll() is None:
        seen += ssh("cat /proc/*/cmdline | tr '\\0' ' '", ok=False)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    weights.assert_whole()
    assert "aria2c" in seen
    readable = ssh(
        f"find /etc /var/lib /opt/kimi-nodes/tools {DIRECTORY} -type f -perm -004 -exec grep -l {token} {{}} +",
        ok=False,
    )
    journal = ssh("journalctl --no-pager")
    assert token not in seen + output + journal and readable == ""
    log = [json.loads(line) for line in (LAB.state / "requests.jsonl").read_text().splitlines()]
    told = {(request["host"], request["authorization"]) for request in log if request["code"] < 400}
    assert told == {(hub.FRONT, True), (hub.CDN, False)}


def test_two_deploys_at_once_fetch_once(weights: Weights) -> None:
    lab("hub", "rate", str(4 * MIB))
    first, second = weights.start(), weights.start()
    for process in (first, second):
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
    weights.assert_whole()
    assert sent() <= weights.manifest.bytes + SHARD


def test_wrong_bytes_fail_the_host_and_name_the_shard(weights: Weights) -> None:
    name = weights.manifest.files[2].path
    lab("hub", "fault", "corrupt", name, "12345", "100")
    code, output = weights.deploy()
    assert code == 1
    assert name in output and f"wanted sha256:{weights.manifest.files[2].sha256}" in output and "Fix:" in output
    assert ssh(f"ls {weights.paths.snapshot}", ok=False) == ""
    lab("hub", "clear")
    code, output = weights.deploy()
    assert code == 0, output
    weights.assert_whole()
