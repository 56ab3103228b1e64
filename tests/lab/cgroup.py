"""Every process of a lab is born in a cgroup of its own: that is how all of them are found again, and killed by id."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.lab.settings import Lab
from tests.lab.shell import LabError

ROOT = "kimi-nodes-lab"
HIERARCHIES = {"name=systemd", "memory", "pids"}
"""On cgroup v1 and the hybrid of both: enough for systemd in the guest, for counting memory, for finding processes."""


def hierarchies() -> Iterator[Path]:
    """Where cgroup v2, or the needed ones of v1, are mounted."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and HIERARCHIES & set(options.split(","))):
            yield Path(left.split()[4])


def folders(lab: Lab, member: str = "") -> list[Path]:
    """The cgroups of one member of the lab, or of the lab as a whole."""
    return [mount / ROOT / lab.name / member for mount in hierarchies()]


def create(lab: Lab, member: str) -> list[Path]:
    made = folders(lab, member)
    for folder in made:
        folder.mkdir(parents=True, exist_ok=True)
    return made


def enter(groups: list[Path]) -> None:
    """For preexec_fn: move the calling process, before it becomes the program, and leave the caller's session."""
    os.setsid()
    for group in groups:
        (group / "cgroup.procs").write_text(str(os.getpid()))


def processes(lab: Lab, member: str = "") -> set[int]:
    found: set[int] = set()
    for folder in folders(lab, member):
        for file in folder.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):  # a cgroup that went away meanwhile has no processes
                found.update(int(line) for line in file.read_text().split())
    return found


def memory_mib(lab: Lab, member: str) -> dict[str, int]:
    """Resident and cached memory, where the kernel counts it by cgroup; empty elsewhere."""
    for folder in folders(lab, member):
        stat = folder / "memory.stat"
        if stat.exists():
            values = dict(line.split() for line in stat.read_text().splitlines())
            return {name: int(values.get(f"total_{name}", 0)) >> 20 for name in ("rss", "cache", "shmem")}
    return {}


def kill(lab: Lab, member: str, limit_s: float = 20) -> None:
    """SIGKILL every process until none is left, then remove the cgroups."""
    end = time.monotonic() + limit_s
    while left := processes(lab, member):
        if time.monotonic() > end:
            raise LabError(f"{lab.name} {member}: processes {sorted(left)} outlive SIGKILL", fix="see /proc/PID/stack")
        for process in sorted(left):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    for folder in folders(lab, member):
        remove(folder)


def remove(folder: Path) -> None:
    for inner, _, _ in os.walk(folder, topdown=False):
        for _attempt in range(50):  # the kernel frees a killed process a moment after it has left the list
            try:
                os.rmdir(inner)
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.02)


def remove_lab(lab: Lab) -> None:
    for folder in folders(lab):
        remove(folder)
        with contextlib.suppress(OSError):  # another lab's are in there, or it is gone
            os.rmdir(folder.parent)
