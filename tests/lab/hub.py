"""A stand-in for the Hugging Face hub, spoken to by the real clients: huggingface_hub, aria2, curl.

<root>/<owner>/<name>/<files> is a model repository of one revision: a sha1 over its listing. Safetensors and files of
1 MiB or more are LFS files with a sha256, others git blobs with git's sha1, as on the hub. LFS files are handed out by
a second host under a signed address that expires. Not spoken: Xet, upload, datasets, branches other than main.

What goes wrong is decided by a control file, read again whenever it changes:

    {"token": null, "signed_s": 60, "rate": 0,
     "faults": [{"kind": "corrupt", "file": "model-00001-of-00002.safetensors", "offset": 1000, "count": 1}]}

kinds: corrupt (flip the byte at offset), cut (close the connection there), stall (hang there), 503 (answer 503).
rate: bytes per second of one connection, 0 for no limit.   signed_s: seconds that a signed address lasts.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, quote, unquote, urlsplit

FRONT, CDN = "huggingface.co", "cdn-lfs.huggingface.co"
LFS_BYTES = 1 << 20
LFS_SUFFIXES = {".safetensors"}
KINDS = ("corrupt", "cut", "stall", "503")
DEFAULTS: dict[str, Any] = {"token": None, "signed_s": 60, "rate": 0, "faults": []}


class Headers(Protocol):
    def get(self, name: str, /) -> str | None: ...


@dataclass
class Answer:
    """What to send: a body or a file, with the faults that apply to it."""

    code: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: Path | None = None
    faults: Faults | None = None


class Faults:
    """What the control file says. Counts are kept here and start again when the file changes."""

    def __init__(self, control: Path) -> None:
        self.control, self.lock, self.stamp = control, threading.Lock(), -1
        self.values: dict[str, Any] = dict(DEFAULTS)
        self.faults: list[dict[str, Any]] = []

    def refresh(self) -> None:
        with self.lock:
            stamp = self.control.stat().st_mtime_ns if self.control.exists() else 0
            if stamp != self.stamp:
                self.stamp = stamp
                self.values = {**DEFAULTS, **(json.loads(self.control.read_text()) if stamp else {})}
                self.faults = [dict(fault) for fault in self.values["faults"]]

    @property
    def token(self) -> str | None:
        token: str | None = self.values["token"]
        return token

    @property
    def rate(self) -> float:
        return float(self.values["rate"])

    @property
    def signed_s(self) -> float:
        return float(self.values["signed_s"])

    def due(self, kind: str, name: str, first: int = 0, after: int = 1 << 62) -> int | None:
        """The offset of a fault of this kind in this range, which is then used up by one; else None."""
        with self.lock:
            for fault in self.faults:
                offset, count = int(fault.get("offset", 0)), int(fault.get("count", 1))
                if fault["kind"] == kind and fault["file"] == name and count > 0 and first <= offset < after:
                    fault["count"] = count - 1
                    return offset
        return None


class Hub:
    """roots: folders of <owner>/<name>; the first that has a repository is the one that counts."""

    def __init__(self, roots: list[Path], control: Path) -> None:
        self.roots, self.faults = roots, Faults(control)
        self.lock = threading.Lock()
        self.digests: dict[tuple[str, int, int], str] = {}
        self.secret = os.urandom(32)

    def folder(self, repository: str) -> Path | None:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repository):
            return None
        return next((root / repository for root in self.roots if (root / repository).is_dir()), None)

    def listing(self, folder: Path) -> tuple[str, list[dict[str, object]]]:
        """(revision, entries as the hub's tree has them). Digests are computed once a file state."""
        entries: list[dict[str, object]] = []
        with self.lock:
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                stat = file.stat()
                known = (str(file), stat.st_size, stat.st_mtime_ns)
                lfs = stat.st_size >= LFS_BYTES or file.suffix in LFS_SUFFIXES
                if known not in self.digests:
                    digest = hashlib.sha256() if lfs else hashlib.sha1(b"blob %d\0" % stat.st_size)
                    with file.open("rb") as source:
                        while block := source.read(1 << 20):
                            digest.update(block)
                    self.digests[known] = digest.hexdigest()
                value = self.digests[known]
                entry: dict[str, object] = {
                    "type": "file", "path": file.relative_to(folder).as_posix(), "size": stat.st_size,
                    "oid": hashlib.sha1(value.encode()).hexdigest() if lfs else value,
                }  # fmt: skip
                if lfs:
                    entry["lfs"] = {"oid": value, "size": stat.st_size, "pointerSize": 135}
                entries.append(entry)
        return hashlib.sha1(json.dumps(entries, sort_keys=True).encode()).hexdigest(), entries

    def answer(self, host: str, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        self.faults.refresh()
        address = urlsplit(target)
        path, query = unquote(address.path), parse_qs(address.query)
        if host == CDN:
            return self.signed_file(method, path, query)
        token = self.faults.token
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/paths-info/([^/]+)", path):
            return self.paths_info(found[1], body) if method == "POST" else error(405, "MethodNotAllowed")
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+).*)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or file
        folder = self.folder(found[1]) if found else None
        if found is None or folder is None:
            return error(404, "RepoNotFound", f"no {path} here")
        if token and headers.get("Authorization") != f"Bearer {token}":
            return error(401, "GatedRepo", "Access to this model is restricted")
        revision, entries = self.listing(folder)
        wanted = (found[3] if api else found[2]) or "main"
        if wanted not in ("main", revision):
            return error(404, "RevisionNotFound", f"Invalid rev id: {wanted}")
        if api:
            return self.describe(found[1], api[2], revision, entries, bool(token))
        return self.resolve(folder, found[1], revision, found[3], entries)

    def describe(
        self, repository: str, part: str | None, revision: str, entries: list[dict[str, object]], gated: bool
    ) -> Answer:
        if part == "tree":
            return as_json(entries)
        return as_json(
            {
                "id": repository, "modelId": repository, "sha": revision, "private": False,
                "gated": "manual" if gated else False, "tags": [], "downloads": 0,
                "siblings": [{"rfilename": entry["path"]} for entry in entries],
            }
        )  # fmt: skip

    def paths_info(self, repository: str, body: bytes) -> Answer:
        folder = self.folder(repository)
        if folder is None:
            return error(404, "RepoNotFound")
        text = body.decode()
        wanted = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text).get("paths", [])
        return as_json([entry for entry in self.listing(folder)[1] if entry["path"] in wanted])

    def resolve(
        self, folder: Path, repository: str, revision: str, name: str, entries: list[dict[str, object]]
    ) -> Answer:
        entry = next((entry for entry in entries if entry["path"] == name), None)
        headers = {"X-Repo-Commit": revision}
        if entry is None:
            missing = error(404, "EntryNotFound", f"{name} is not in {repository}")
            missing.headers.update(headers)
            return missing
        if self.faults.due("503", Path(name).name) is not None:
            return error(503, "Unavailable", "on purpose")
        lfs = entry.get("lfs")
        if not isinstance(lfs, dict):
            return Answer(200, {**headers, "ETag": f'"{entry["oid"]}"'}, file=folder / name, faults=self.faults)
        headers |= {"X-Linked-Etag": f'"{lfs["oid"]}"', "X-Linked-Size": str(lfs["size"])}
        place = f"/{repository}/{lfs['oid']}/{name}"
        expires = f"{time.time() + self.faults.signed_s:.3f}"
        signature = self.signature(place, expires)
        headers["Location"] = f"https://{CDN}{quote(place)}?expires={expires}&signature={signature}"
        return Answer(302, headers)

    def signature(self, place: str, expires: str) -> str:
        return hmac.new(self.secret, f"{place} {expires}".encode(), "sha256").hexdigest()[:32]

    def signed_file(self, method: str, path: str, query: Mapping[str, list[str]]) -> Answer:
        found = re.fullmatch(r"/([^/]+/[^/]+)/([0-9a-f]{64})/(.+)", path)
        folder = self.folder(found[1]) if found else None
        expires, signature = query.get("expires", ["0"])[0], query.get("signature", [""])[0]
        if not hmac.compare_digest(signature, self.signature(path, expires)) or float(expires) < time.time():
            return error(403, "AccessDenied", "the signed address is wrong or has expired")
        if found is None or folder is None or not (folder / found[3]).is_file():
            return error(404, "EntryNotFound")
        return Answer(200, {"ETag": f'"{found[2]}"'}, file=folder / found[3], faults=self.faults)


def as_json(value: object) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def error(code: int, name: str, message: str = "") -> Answer:
    """An error in the hub's own form: the client reads the header."""
    headers = {"X-Error-Code": name, "Content-Type": "application/json"}
    if message:
        headers["X-Error-Message"] = message
    return Answer(code, headers, json.dumps({"error": message or name}).encode())
