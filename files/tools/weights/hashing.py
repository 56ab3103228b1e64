"""Digests of files, in threads: hashlib works without the interpreter's lock, and the disk or the cores decide."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

from . import receipt
from .errors import Stopped
from .manifest import File

BLOCK = 1 << 20


@dataclass(frozen=True)
class Hashed:
    """found: "sha256:..." or "git-sha1:..." as the manifest has it, or "N bytes" where the size alone is wrong.

    right: whether it is the manifest's. stamps: of the file as it was hashed.
    """

    file: File
    found: str
    right: bool
    stamps: dict[str, int]


def digest(path: str, file: File, moved: Callable[[int], None], stopping: Event, seal: bool = False) -> Hashed:
    """Hash one file. seal: make it read-only first and durable afterwards, as a file about to be published.

    Raises OSError, and Stopped when `stopping` is set. A file that changes meanwhile is not right.
    """
    with open(path, "rb", buffering=0) as source:
        descriptor = source.fileno()
        if seal:
            with contextlib.suppress(PermissionError):  # adopted files may belong to another user
                os.fchmod(descriptor, 0o444)
        before = receipt.stamps(os.fstat(descriptor))
        if before["bytes"] != file.bytes:
            return Hashed(file, f"{before['bytes']} bytes", False, before)
        state = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.bytes, usedforsecurity=False)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        block = bytearray(BLOCK)
        view = memoryview(block)
        while count := source.readinto(block):
            state.update(view[:count])
            moved(count)
            if stopping.is_set():
                raise Stopped("stopped while hashing")
        if seal:
            os.fsync(descriptor)
        after = receipt.stamps(os.fstat(descriptor))
    kind = "sha256" if file.sha256 else "git-sha1"
    found = f"{kind}:{state.hexdigest()}"
    if after != before:
        return Hashed(file, "a file that changed while it was read", False, after)
    return Hashed(file, found, found == file.digest, after)
