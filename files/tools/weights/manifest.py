"""The manifest as the node reads it. `node.manifest` on the controller has its form; both refuse the same things.

It is checked again here because it decides which paths are written: nothing in it may lead out of the snapshot.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from .errors import Misconfigured

RESERVED = ".kimi-nodes"  # names of ours inside a snapshot start so


@dataclass(frozen=True)
class File:
    """path below the snapshot, bytes, and exactly one digest of the content: sha256 or the git object id."""

    path: str
    bytes: int
    sha256: str | None
    git_sha1: str | None

    @property
    def digest(self) -> str:
        return f"sha256:{self.sha256}" if self.sha256 else f"git-sha1:{self.git_sha1}"


@dataclass(frozen=True)
class Manifest:
    """sha256: of the manifest's own text, by which a receipt says what it was checked against."""

    repository: str
    revision: str
    files: tuple[File, ...]
    sha256: str

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def load(path: str) -> Manifest:
    """Read and check a manifest. Raises Misconfigured."""
    try:
        with open(path, "rb") as source:
            text = source.read()
    except OSError as error:
        raise Misconfigured(f"manifest {path}: {error.strerror}. Fix: run deploy.py again") from None
    try:
        return parse(text)
    except ValueError as error:
        raise Misconfigured(f"manifest {path}: {error}. Fix: make it anew with bin/pin, then run deploy.py") from None


def parse(text: bytes) -> Manifest:
    """Raises ValueError that names what cannot be trusted."""
    data = json.loads(text)
    if not isinstance(data, dict) or set(data) != {"repository", "revision", "files"}:
        raise ValueError("found other keys, wanted repository, revision and files")
    repository, revision = str(data["repository"]), str(data["revision"])
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*", repository):
        raise ValueError(f"found repository {repository!r}, wanted owner/name")
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise ValueError(f"found revision {revision!r}, wanted 40 hex digits")
    if not isinstance(data["files"], list) or not data["files"]:
        raise ValueError("found no files")
    files = tuple(_file(entry) for entry in data["files"])
    paths = {file.path for file in files}
    if len(paths) != len(files):
        raise ValueError("found a path twice")
    for path in paths:
        for parent in PurePosixPath(path).parents:
            if str(parent) in paths:
                raise ValueError(f"found {parent} as a file and as a folder of {path}")
    return Manifest(repository, revision, files, hashlib.sha256(text).hexdigest())


def _file(entry: Any) -> File:
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        raise ValueError(f"found {entry!r}, wanted a file entry")
    path, size, sha256, git_sha1 = entry["path"], entry.get("bytes"), entry.get("sha256"), entry.get("git_sha1")
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or str(PurePosixPath(path)) != path or "\0" in path:
        raise ValueError(f"found path {path!r}, wanted one inside the snapshot")
    if parts[0].startswith(RESERVED):
        raise ValueError(f"found path {path!r}, which is reserved")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"{path}: found bytes {size!r}, wanted a count")
    if set(entry) - {"path", "bytes", "sha256", "git_sha1"} or (sha256 is None) == (git_sha1 is None):
        raise ValueError(f"{path}: wanted path, bytes and one of sha256 and git_sha1")
    if not re.fullmatch(r"[0-9a-f]{64}", str(sha256)) and not re.fullmatch(r"[0-9a-f]{40}", str(git_sha1)):
        raise ValueError(f"{path}: found digest {sha256 or git_sha1!r}, wanted lower-case hex of its length")
    return File(path, size, sha256, git_sha1)
