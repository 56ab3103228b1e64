"""The pieces of a file: by their digests nodes take a file from many others at once, and any wrong piece is seen.

A table is the SHA-1 of every piece, 20 bytes each, one after the other. It is made from bytes whose sha256 was right,
and it is a help, not a proof: who receives a file by it hashes the whole of it against the manifest all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from threading import Event

from .errors import Stopped

MIB = 1 << 20
SIZES = (4 * MIB, 8 * MIB, 16 * MIB)
MOST = 1024  # pieces of a file, as long as a larger size is left
DIGEST = 20  # bytes of a SHA-1


def size(file_bytes: int) -> int:
    """Bytes of a piece, the same on every node: what a file is cut into decides its torrent's name."""
    return next((size for size in SIZES if file_bytes <= size * MOST), SIZES[-1])


def count(file_bytes: int) -> int:
    return -(-file_bytes // size(file_bytes))


def table(path: str, file_bytes: int, stopping: Event) -> bytes:
    """The table of a file. Raises OSError, ValueError where it is not as long as said, and Stopped."""
    made, length, view = [], 0, memoryview(bytearray(size(file_bytes)))
    with open(path, "rb", buffering=0) as source:
        while True:
            filled = 0
            while filled < len(view) and (read := source.readinto(view[filled:])):
                filled += read
            if not filled:
                break
            made.append(hashlib.sha1(view[:filled], usedforsecurity=False).digest())
            length += filled
            if stopping.is_set():
                raise Stopped("stopped while hashing pieces")
    if length != file_bytes:
        raise ValueError(f"{path}: found {length} bytes, wanted {file_bytes}")
    return b"".join(made)


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
