"""What of a staging folder has been hashed and found right, kept beside it so that a restart hashes nothing twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from . import disk, receipt
from .hashing import Hashed
from .manifest import File


class Journal:
    """One JSON object a line: {"path", "digest", stamps...}. A torn last line is one file to hash again."""

    def __init__(self, staging: str):
        self._staging, self._path = staging, f"{staging}.journal"
        self._records: dict[str, dict[str, Any]] = {}
        try:
            with open(self._path, encoding="utf-8", errors="replace") as source:
                lines = source.read().splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            try:
                record = json.loads(line)
                self._records[record["path"]] = record
            except (ValueError, TypeError, KeyError):
                continue

    def holds(self, file: File) -> bool:
        """Whether this file was found right, and is still the one that was."""
        record = self._records.get(file.path)
        if record is None or record.get("digest") != file.digest:
            return False
        return not receipt.unlike(os.path.join(self._staging, file.path), record)

    def add(self, hashed: Hashed) -> None:
        """The file itself is durable already (`hashing.digest` with seal)."""
        record = {"path": hashed.file.path, "digest": hashed.file.digest, **hashed.stamps}
        self._records[hashed.file.path] = record
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        try:
            os.write(descriptor, b"\n" + json.dumps(record).encode() + b"\n")  # the first ends a torn line
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def all(self) -> dict[str, dict[str, Any]]:
        """Every file that was found right: path -> record. Whether it is still so, `receipt.unlike` tells."""
        return dict(self._records)

    def records(self, files: Iterable[File]) -> dict[str, dict[str, Any]]:
        """For a receipt: path -> {"digest", stamps...}."""
        return {
            file.path: {name: value for name, value in self._records[file.path].items() if name != "path"}
            for file in files
        }

    def remove(self) -> None:
        disk.forget(self._path)
