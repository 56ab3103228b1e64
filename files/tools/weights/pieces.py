"""The pieces of a file: by their digests nodes take a file from many others at once, and any wrong piece is seen.

A table is the SHA-1 of every piece, 20 bytes each, one after the other. It is made from bytes whose sha256 was right,
and it is a help, not a proof: who receives a file by it hashes the whole of it against the manifest all the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from .errors import Stopped

MIB = 1 << 20
SIZES = (4 * MIB, 8 * MIB, 16 * MIB)
MOST = 1024  # pieces of a file, as long as a larger size is left
DIGEST = 20  # bytes of a SHA-1
THREADS = min(8, os.cpu_count() or 1)  # others wait for the table: pieces are hashed side by side


def size(file_bytes: int) -> int:
    """Bytes of a piece, the same on every node: what a file is cut into decides its torrent's name."""
    return next((size for size in SIZES if file_bytes <= size * MOST), SIZES[-1])


def count(file_bytes: int) -> int:
    return -(-file_bytes // size(file_bytes))


def table(path: str, file_bytes: int, stopping: Event) -> bytes:
    """The table of a file. Raises OSError, ValueError where it is not as long as said, and Stopped."""
    step = size(file_bytes)
    with open(path, "rb", buffering=0) as source, ThreadPoolExecutor(THREADS, thread_name_prefix="pieces") as pool:
        if (length := os.fstat(source.fileno()).st_size) != file_bytes:
            raise ValueError(f"{path}: found {length} bytes, wanted {file_bytes}")

        def one(start: int) -> bytes:
            state, end = hashlib.sha1(usedforsecurity=False), min(file_bytes, start + step)
            block = memoryview(bytearray(MIB))
            while start < end:
                read = os.preadv(source.fileno(), [block[: min(MIB, end - start)]], start)
                if not read:
                    raise ValueError(f"{path}: found {start} bytes, wanted {file_bytes}")
                state.update(block[:read])
                start += read
                if stopping.is_set():
                    raise Stopped("stopped while hashing pieces")
            return state.digest()

        return b"".join(pool.map(one, range(0, file_bytes, step)))


def name(found: bytes) -> str:
    """What tables are told apart by: 32 hex digits."""
    return hashlib.sha256(found).hexdigest()[:32]


def torrent(digest: str, file_bytes: int, found: bytes, encode: Callable[[object], bytes]) -> bytes:
    """The torrent of one file: no tracker, no other source, private; named by the file's digest.

    encode: bencoding, of libtorrent. Raises ValueError for a table of another length.
    """
    if len(found) != DIGEST * count(file_bytes):
        raise ValueError(f"found a table of {len(found)} bytes, wanted {DIGEST * count(file_bytes)}")
    information = {
        b"length": file_bytes,
        b"name": digest.replace(":", "-").encode(),
        b"piece length": size(file_bytes),
        b"pieces": found,
        b"private": 1,
    }
    return encode({b"info": information})
