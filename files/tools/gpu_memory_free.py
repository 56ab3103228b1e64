"""Is the memory of the GPUs free? Wait for what a predecessor still holds, and say who holds it.

    gpu_memory_free.py WANTED           in ExecStartPre= of the server's unit, as root

Exit 0: every GPU of WANTED has as much free as it says. Exit 1: time is up, or a living process of somebody else holds
the memory; the last line says which. WANTED is JSON:

    {"gpus": {index: MiB, ...}, "user": name, "seconds": int}

A stopped server is gone before its memory is: SGLang ends itself by SIGKILL, and the driver returns the memory of a
killed process when it has torn it down. A server that starts meanwhile takes its share of what is free, and serves with
a smaller KV cache, or dies minutes later in the middle of its weights.

nvidia-smi is asked, not CUDA: a context of our own would take memory itself. Of other processes only the name of the
program is told: arguments may hold secrets.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BETWEEN_LOOKS = 2.0  # seconds
BETWEEN_LINES = 6.0  # seconds between two lines that say who holds what
NVIDIA_SMI_SECONDS = 60.0  # it takes long where the driver is busy, and hangs where a GPU is lost
EXITING = 0x4  # PF_EXITING, field 9 of /proc/PID/stat: killed, and the driver is at returning what it held


class NotFree(Exception):
    """Why not, ending with `Fix: ...`."""


@dataclass(frozen=True)
class Gpu:
    """One GPU now, in MiB."""

    index: int
    uuid: str
    free: int
    total: int


@dataclass(frozen=True)
class Holder:
    """A process that nvidia-smi names. mib: what it holds of one GPU, None where the driver does not tell.

    user: None where no process of that number is there any more. alive: it is there and does not exit.
    """

    uuid: str
    pid: int
    program: str
    mib: int | None
    user: str | None
    alive: bool

    def __str__(self) -> str:
        state = f"user {self.user}" if self.alive else "which has ended"
        return f"{self.pid} {self.program} ({state}) {'?' if self.mib is None else self.mib} MiB"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    wanted = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        gpus = {int(index): int(mib) for index, mib in wanted["gpus"].items()}
        wait(gpus, str(wanted["user"]), float(wanted["seconds"]))
    except NotFree as error:
        print(f"GPU memory: {error}", file=sys.stderr)
        return 1
    return 0


def wait(wanted: dict[int, int], user: str, seconds: float) -> None:
    """Return when every GPU has its MiB free. Raises NotFree."""
    began = time.monotonic()
    said = -BETWEEN_LINES
    strangers_before: set[int] = set()
    while True:
        gpus = [gpu for gpu in ask_gpus() if gpu.index in wanted]
        missing = sorted(set(wanted) - {gpu.index for gpu in gpus})
        if missing:
            raise NotFree(
                f"found no GPU {', '.join(map(str, missing))}, wanted all {len(wanted)} of this profile. "
                "Fix: nvidia-smi -L and dmesg tell what became of it"
            )
        short = [gpu for gpu in gpus if gpu.free < wanted[gpu.index]]
        passed = time.monotonic() - began
        if not short:
            print(f"GPU memory: free on {len(wanted)} GPUs after {passed:.0f} s", flush=True)
            return
        holders = ask_holders({gpu.uuid for gpu in short})
        text = "; ".join(described(gpu, wanted[gpu.index], holders) for gpu in short)
        strangers = {pid for gpu in short for pid in in_the_way(gpu, wanted[gpu.index], holders, user)}
        stay = strangers & strangers_before  # seen twice: not a process that only asked the driver something
        if stay:
            raise NotFree(f"{text}. Fix: stop {named(stay, holders)}, which is not this service's, and start again")
        if passed > seconds:
            raise NotFree(f"{text}, after {passed:.0f} s. Fix: {advice(holders, user)}")
        if passed - said >= BETWEEN_LINES:
            tell(f"waiting for GPU memory: {text}", passed)
            said = passed
        strangers_before = strangers
        time.sleep(BETWEEN_LOOKS)


def in_the_way(gpu: Gpu, wanted: int, holders: Sequence[Holder], user: str) -> set[int]:
    """Living processes of others, where they alone keep a GPU from ever having what is wanted."""
    others = [holder for holder in holders if holder.uuid == gpu.uuid and holder.alive and holder.user != user]
    spare = gpu.total - wanted
    enough = any(holder.mib is None for holder in others) or sum(holder.mib or 0 for holder in others) > spare
    return {holder.pid for holder in others} if enough else set()


def described(gpu: Gpu, wanted: int, holders: Sequence[Holder]) -> str:
    """One GPU that is short: found, wanted, and by whom."""
    of_it = [str(holder) for holder in holders if holder.uuid == gpu.uuid]
    by = ", ".join(of_it) or "no process that nvidia-smi names"
    return f"GPU {gpu.index}: found {gpu.free} of {gpu.total} MiB free, wanted {wanted}; held by {by}"


def named(pids: set[int], holders: Sequence[Holder]) -> str:
    programs = {holder.pid: holder.program for holder in holders}
    return ", ".join(f"process {pid} ({programs[pid]})" for pid in sorted(pids))


def advice(holders: Sequence[Holder], user: str) -> str:
    alive = {holder.pid for holder in holders if holder.alive and holder.user == user}
    if alive:
        return f"stop {named(alive, holders)}: kill -9 {' '.join(map(str, sorted(alive)))}, and start again"
    return (
        "the driver has not returned what no living process holds: dmesg has its reasons; nvidia-smi --gpu-reset, or a "
        "reboot, gives it back"
    )


def ask_gpus() -> list[Gpu]:
    """Every GPU that the driver shows. Raises NotFree."""
    found = []
    for row in nvidia_smi("--query-gpu=index,uuid,memory.free,memory.total"):
        try:
            found.append(Gpu(int(row[0]), row[1], int(row[2]), int(row[3])))
        except (ValueError, IndexError):
            raise NotFree(
                f"nvidia-smi said {', '.join(row)!r}, wanted index, uuid and MiB of a GPU. "
                "Fix: a GPU that is lost, or in MIG mode, cannot serve; nvidia-smi -q tells"
            ) from None
    return found


def ask_holders(uuids: set[str]) -> list[Holder]:
    """Processes that hold memory of these GPUs. Raises NotFree."""
    found = []
    for row in nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory,process_name"):
        uuid, pid, mib, name = [*row, "", "", ""][:4]
        if uuid in uuids and pid.isdigit():
            program = (name.split() or [""])[0].rpartition("/")[2]
            found.append(holder(uuid, int(pid), program, int(mib) if mib.isdigit() else None))
    return found


def holder(uuid: str, pid: int, name: str, mib: int | None) -> Holder:
    """With what /proc says of the process. name: the driver's, for one that is gone."""
    folder = Path("/proc", str(pid))
    try:
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        program = (folder / "comm").read_text(errors="replace").strip()
        owner = user_name(os.stat(folder).st_uid)
    except OSError:
        return Holder(uuid, pid, name, mib, None, alive=False)
    alive = fields[0] not in ("Z", "X") and not int(fields[6]) & EXITING
    return Holder(uuid, pid, program or name, mib, owner, alive)


def user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def nvidia_smi(query: str) -> list[list[str]]:
    """Rows of a CSV query. Raises NotFree."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotFree(f"{command[0]}: {error}, wanted it to answer. Fix: see dmesg for the driver's state") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-300:]
        raise NotFree(f"{command[0]} exited {done.returncode} ({said}), wanted GPUs. Fix: see dmesg for its reasons")
    return [[part.strip() for part in line.split(",", 3)] for line in done.stdout.splitlines() if "," in line]


def tell(phase: str, passed: float) -> None:
    """To the journal, and to status.json in the unit's runtime directory for whoever waits."""
    print(f"GPU memory: {phase} ({passed:.0f} s)", flush=True)
    folder = os.environ.get("RUNTIME_DIRECTORY")
    if folder:
        content: dict[str, Any] = {"phase": phase, "seconds": round(passed, 1)}
        beside = Path(folder, ".status.json.new")
        beside.unlink(missing_ok=True)
        # Root writes where the service's user may: never through a link that it has laid there.
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
        beside.rename(Path(folder, "status.json"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
