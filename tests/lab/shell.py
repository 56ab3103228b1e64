"""Running programs, and the one error that this package raises on purpose."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

YOUNG_SECONDS = 3600


class LabError(Exception):
    """What was found, what was wanted; `fix` is the command or the deed that helps."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(f"{message}\nFix: {fix}")


def run(
    *command: str | Path, input: str | None = None, env: dict[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Run a program, return its standard output. A failure carries what the program said."""
    done = subprocess.run(
        [str(part) for part in command], input=input, env=env, cwd=cwd, text=True, capture_output=True
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        shown = " ".join(str(part) for part in command)
        raise LabError(
            f"{shown[:300]}: exit {done.returncode}\n{said}", fix="see what it said; `bin/lab down` clears up"
        )
    return done.stdout


def succeeds(*command: str | Path) -> bool:
    return (
        subprocess.run([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
        == 0
    )


def die_with_parent() -> None:
    """For preexec_fn: the child gets SIGKILL when the program that started it dies, however it dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run_confined(*command: str | Path, log: Path, input: str | None = None) -> None:
    """Run a builder in mount and process namespaces of its own: killed half way, nothing of it stays but files."""
    with log.open("w") as out:
        done = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *[str(part) for part in command]],
            input=input,
            text=True,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise LabError(
            f"{command[0]}: exit {done.returncode}; the end of {log}:\n{tail}",
            fix="see what it said, then run it again",
        )


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """One at a time among all processes; the kernel drops it with the process, so a crash leaves no lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def key_of(*parts: str | bytes) -> str:
    """A short digest of what something is made from: the name under which the made thing is cached."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()[:16]


def made(folder: Path, make: Callable[[Path], None], lock_file: Path) -> Path:
    """`folder`, made by `make` unless it is there already. It appears by one rename, whole or not at all."""
    if folder.is_dir():
        return folder
    with lock(lock_file):
        if not folder.is_dir():
            partial = folder.with_name(folder.name + ".partial")
            remove_tree(partial)
            partial.mkdir(parents=True)
            make(partial)
            os.rename(partial, folder)
    return folder


def remove_outdated(wanted: Path, all_keys: Iterable[Path]) -> None:
    """Drop what was made under other keys, unless a machine is mounted on it or a process was started with it.

    Not what is younger than an hour: another checkout may be about to use it."""
    in_use = Path("/proc/self/mountinfo").read_text()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            in_use += command.read_bytes().decode(errors="replace")
    for other in all_keys:
        with contextlib.suppress(FileNotFoundError):  # another run was faster
            if other != wanted and str(other) not in in_use and time.time() - other.stat().st_mtime > YOUNG_SECONDS:
                remove_tree(other)


def remove_tree(folder: Path) -> None:
    """rm -r that never leaves the file system: a forgotten mount below costs an error, not the mounted files."""
    if folder.exists():
        run("rm", "-rf", "--one-file-system", folder)
