"""`down` leaves nothing behind, however the lab was started and wherever its starter died.

A lab of another name and network is used, so that one that is up is not disturbed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import cgroup, machine, network, settings

pytestmark = pytest.mark.lab
ENVIRONMENT = {**os.environ, "KIMI_NODES_LAB": "leaves", "KIMI_NODES_LAB_NETWORK": "10.213.7"}
LAB = settings.read(ENVIRONMENT)


def lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(settings.CHECKOUT / "bin/lab"), *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


def text_of(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def traces() -> dict[str, list[str]]:
    """Everything on this machine that bears the lab's name, its network or its folder."""

    def ours(lines: list[str]) -> list[str]:
        words = (
            f"{LAB.network}.",
            f"kimi-lab-{LAB.name}",
            f"kimi-nodes-lab-{LAB.name}",
            f" {LAB.name}-",
            str(LAB.state),
        )
        return [line for line in lines if any(word in line for word in words)]

    processes = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = command.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        processes.append(f"{command.parent.name} {line}")
    found = {
        "processes": ours(processes) + [str(process) for process in cgroup.processes(LAB)],
        "mounts": ours(Path("/proc/self/mountinfo").read_text().splitlines()),
        "namespaces": [path.name for path in Path("/run/netns").glob(LAB.namespace("*"))],
        "links and addresses": ours(text_of("ip", "-o", "address")),
        "routes": ours(text_of("ip", "route", "show", "table", "all")),
        "rules": ours(text_of("iptables-save")),
        "cgroups": [str(folder) for folder in cgroup.folders(LAB) if folder.exists()],
        "folders": [str(folder) for folder in (LAB.state, LAB.runtime) if folder.exists()],
    }
    return {kind: lines for kind, lines in found.items() if lines}


@pytest.fixture(autouse=True)
def nothing_before_and_after() -> Iterator[None]:
    lab("down")
    assert traces() == {}
    yield
    lab("down")


def kernel_settings() -> dict[str, str]:
    return {name: Path("/proc/sys", name).read_text() for name in network.KERNEL_SETTINGS}


def test_down_removes_everything_that_up_made() -> None:
    alone, before = not settings.RUNTIME.exists(), kernel_settings()
    started = lab("up", "2")
    assert started.returncode == 0, started.stderr
    subprocess.run(["ssh", "-F", LAB.ssh_config, "h1", "true"], check=True)  # leaves a master connection
    kinds = set(traces())
    assert kinds >= {
        "processes",
        "mounts",
        "namespaces",
        "links and addresses",
        "routes",
        "rules",
        "cgroups",
        "folders",
    }
    ended = lab("down")
    assert ended.returncode == 0, ended.stderr
    assert traces() == {}
    if alone:  # another lab would still need them
        assert kernel_settings() == before and not settings.RUNTIME.exists()


@pytest.mark.parametrize("wait_s", [0.15, 0.3, 0.5, 0.8, 1.2])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_down_removes_what_a_dead_starter_left(how: signal.Signals, wait_s: float) -> None:
    """Killed at several moments of `up`: before, while and after its machines are made."""
    starter = subprocess.Popen(
        [str(settings.CHECKOUT / "bin/lab"), "up", "2"],
        env=ENVIRONMENT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(wait_s)
    os.killpg(starter.pid, how)
    starter.wait(timeout=30)
    ended = lab("down")
    assert ended.returncode == 0, ended.stderr
    assert traces() == {}
    assert lab("up", "1").returncode == 0  # and nothing is in the way of the next one


def test_down_removes_a_lab_whose_machine_crashed() -> None:
    """The supervisor of a machine dies, its guest lives on; another machine's folder loses its record."""
    assert lab("up", "2").returncode == 0
    nspawn = [
        int(process.split()[0])
        for process in traces()["processes"]
        if " systemd-nspawn" in process and "--machine=h1" in process and not process.split()[1].endswith("sh")
    ]
    os.kill(nspawn[0], signal.SIGKILL)
    (machine.folder(LAB, "h2") / "machine.json").unlink()
    assert lab("down").returncode == 0
    assert traces() == {}


def test_another_lab_is_left_alone() -> None:
    """Two labs at once: each has its own, and the end of one is not the end of the other."""
    assert lab("up", "1").returncode == 0
    other = {**ENVIRONMENT, "KIMI_NODES_LAB": "leaves2", "KIMI_NODES_LAB_NETWORK": "10.213.8"}
    command = [str(settings.CHECKOUT / "bin/lab")]
    try:
        subprocess.run([*command, "up", "1"], env=other, check=True, capture_output=True)
        assert network.members(settings.read(other)) and network.members(LAB)
    finally:
        subprocess.run([*command, "down"], env=other, check=True, capture_output=True)
    assert lab("ssh", "h1", "hostname").stdout == "h1\n"


def test_a_network_in_use_is_refused_and_named() -> None:
    assert lab("up", "1").returncode == 0
    other = {**ENVIRONMENT, "KIMI_NODES_LAB": "leaves2"}
    command = [str(settings.CHECKOUT / "bin/lab")]
    try:
        refused = subprocess.run([*command, "up", "1"], env=other, capture_output=True, text=True)
    finally:
        subprocess.run([*command, "down"], env=other, check=True, capture_output=True)
    assert refused.returncode == 1
    assert f"{LAB.network}.0/24 is in use on leaves-br" in refused.stderr and "Fix: " in refused.stderr
