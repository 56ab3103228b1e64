"""Files and file systems: what is written stays written, and only where it may be."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from typing import Any

from .errors import NoRoom, Stopped

# Renames and locks on these have lost weights before (facts of many bug reports against download clients).
NETWORK = ("nfs", "cifs", "smb", "lustre", "fuse.", "9p", "ceph", "gpfs", "beegfs", "afs", "virtiofs")
CAN_ALLOCATE = ("ext4", "xfs", "btrfs", "tmpfs")  # fallocate(2) works: room is taken before bytes arrive


def file_system(path: str) -> str:
    """The kind of the file system that a path is on, or would be made on: "ext4", "nfs4", ..."""
    real = os.path.realpath(path)
    best, kind = "", ""
    with open("/proc/self/mountinfo", encoding="utf-8") as source:
        for line in source:
            left, _, right = line.partition(" - ")
            mount = left.split()[4].replace("\\040", " ")
            if (real + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
                best, kind = mount, right.split()[0]
    return kind


def room(path: str) -> int:
    """Bytes that an unprivileged user may still write on the file system of an existing folder."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def make_folder(path: str) -> None:
    """Raises NoRoom where it cannot be made or written."""
    try:
        os.makedirs(path, mode=0o755, exist_ok=True)
    except OSError as error:
        raise NoRoom(f"{path}: cannot be made ({error.strerror}). Fix: run deploy.py again, it makes folders") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise NoRoom(f"{path}: found no right of user {os.geteuid()} to write. Fix: run deploy.py again, it mends that")


def sync_folder(path: str) -> None:
    """Make names in a folder survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: str, text: str, mode: int = 0o644, durable: bool = True) -> None:
    """Replace a file by one rename. Raises OSError."""
    write_bytes(path, text.encode(), mode, durable)


def write_bytes(path: str, content: bytes, mode: int = 0o644, durable: bool = True) -> None:
    """As `write_whole`."""
    beside = f"{path}.new"
    forget(beside)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as target:
        target.write(content)
        target.flush()
        os.fchmod(target.fileno(), mode)
        if durable:
            os.fsync(target.fileno())
    os.rename(beside, path)
    if durable:
        sync_folder(os.path.dirname(path))


def write_json(path: str, data: Any, mode: int = 0o644, durable: bool = True) -> None:
    write_whole(path, json.dumps(data) + "\n", mode, durable)


def forget(path: str) -> None:
    """Remove a file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def allocated(path: str) -> int:
    """Bytes that a file already takes on disk, 0 where there is none."""
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0


def full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def lock(path: str, wait_seconds: float, stopping: Any) -> Iterator[int]:
    """Hold a lock, so that two agents never write one staging folder; yields its descriptor, for children to hold too.

    Waits for a predecessor that is just dying, its aria2 included. Raises NoRoom after `wait_seconds`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        until = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:
                    raise NoRoom(
                        f"{path}: held by another agent for {wait_seconds:.0f} s, wanted one at a time. "
                        "Fix: weights_agent.py status tells what it does; wait for it to end"
                    ) from None
                if stopping.wait(0.1):
                    raise Stopped("stopped while waiting for another agent") from None
        yield descriptor
    finally:
        os.close(descriptor)
