"""The manifest: the only thing trusted about weights. One repository at one revision, every file with bytes and digest.

A manifest is JSON, sorted by path, one file a line, so that two of them diff well:

    {"repository": "moonshotai/Kimi-K2.6", "revision": "<40 hex>", "files": [
     {"path": "config.json", "bytes": 1234, "sha256": "<64 hex>"},
     ...
    ]}

`git_sha1` stands in place of `sha256` for a small file when only the hub's git object id was known at pinning.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from node.problems import Malformed

REVISION = re.compile(r"[0-9a-f]{40}")
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class File:
    """One file: its path below the snapshot, its bytes, and the sha256 (64 hex) or git object id (40 hex) of its
    content."""

    path: str
    bytes: int
    sha256: str | None
    git_sha1: str | None = None


@dataclass(frozen=True)
class Manifest:
    repository: str
    revision: str
    files: tuple[File, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def sha256(self) -> str:
        """Of the text of `dumps`: a receipt on a node names the manifest that it was checked against by this."""
        return hashlib.sha256(self.dumps().encode()).hexdigest()

    def dumps(self) -> str:
        lines = [
            json.dumps(
                {"path": file.path, "bytes": file.bytes}
                | ({"sha256": file.sha256} if file.sha256 else {"git_sha1": file.git_sha1})
            )
            for file in sorted(self.files, key=lambda file: file.path)
        ]
        head = json.dumps({"repository": self.repository, "revision": self.revision})[:-1]
        return head + ', "files": [\n ' + ",\n ".join(lines) + "\n]}\n"


def loads(text: str | bytes) -> Manifest:
    """Parse and check a manifest. Raises Malformed, naming the entry, for anything that could not be trusted."""
    try:
        data = json.loads(text)
    except (ValueError, UnicodeDecodeError) as error:
        raise Malformed(f"manifest: not JSON ({error})") from None
    if not isinstance(data, dict) or set(data) != {"repository", "revision", "files"}:
        raise Malformed("manifest: wants exactly the keys repository, revision and files")
    repository, revision, entries = data["repository"], data["revision"], data["files"]
    if not isinstance(repository, str) or not REPOSITORY.fullmatch(repository):
        raise Malformed(f"manifest: repository {repository!r} is not owner/name")
    if not isinstance(revision, str) or not REVISION.fullmatch(revision):
        raise Malformed(f"manifest: revision {revision!r} is not 40 hex digits; a branch name can move")
    if not isinstance(entries, list) or not entries:
        raise Malformed("manifest: no files")
    files = tuple(_file(entry) for entry in entries)
    paths = [file.path for file in files]
    if len(set(paths)) != len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise Malformed(f"manifest: {twice} stands twice")
    for path in paths:
        above = next((str(parent) for parent in PurePosixPath(path).parents if str(parent) in set(paths)), None)
        if above:
            raise Malformed(f"manifest: {above} is a file and a folder of {path}")
    return Manifest(repository, revision, files)


def _file(entry: Any) -> File:
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        raise Malformed(f"manifest: {entry!r} is no file entry")
    path, size = entry["path"], entry.get("bytes")
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or str(PurePosixPath(path)) != path or "\0" in path:
        raise Malformed(f"manifest: path {path!r} would leave the snapshot")
    if parts[0].startswith(".kimi-nodes"):
        raise Malformed(f"manifest: path {path!r} is reserved")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise Malformed(f"manifest: {path}: bytes {size!r} is not a count")
    sha256, git_sha1 = entry.get("sha256"), entry.get("git_sha1")
    if set(entry) - {"path", "bytes", "sha256", "git_sha1"} or (sha256 is None) == (git_sha1 is None):
        raise Malformed(f"manifest: {path}: wants path, bytes and one of sha256 and git_sha1")
    if not re.fullmatch(r"[0-9a-f]{64}", str(sha256)) and not re.fullmatch(r"[0-9a-f]{40}", str(git_sha1)):
        raise Malformed(f"manifest: {path}: digest {sha256 or git_sha1!r} is not lower-case hex of its length")
    return File(path, size, sha256, git_sha1)


def compare(old: Manifest, new: Manifest) -> list[str]:
    """What changed from one manifest to another, a line a file, sorted by path: '+ path', '- path', '~ path ...'."""
    before, after = _by_path(old.files), _by_path(new.files)
    lines = []
    for path in sorted(before.keys() | after.keys()):
        if path not in before:
            lines.append(f"+ {path} ({after[path].bytes} bytes)")
        elif path not in after:
            lines.append(f"- {path} ({before[path].bytes} bytes)")
        elif before[path] != after[path]:
            lines.append(f"~ {path} ({before[path].bytes} -> {after[path].bytes} bytes)")
    return lines


def _by_path(files: Iterable[File]) -> dict[str, File]:
    return {file.path: file for file in files}
