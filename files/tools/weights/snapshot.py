"""A snapshot: absent or whole, never in between. It appears by one rename, and is mended by renames of whole files."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from . import disk, hashing, receipt
from .configuration import Configuration
from .errors import NoRoom, Stopped
from .gather import Gather, say, threads
from .hashing import Hashed
from .hub import Folder, Hub
from .journal import Journal
from .manifest import File, Manifest
from .sharing import Alone
from .status import Status

LOCK_SECONDS = 60.0


def bring(
    configuration: Configuration,
    manifest: Manifest,
    hub: Hub | Folder,
    status: Status,
    stopping: Event,
    company: Alone | None = None,
) -> str:
    """Bring the snapshot to whole: fetch it, mend it, or find it so. Returns what was done. Raises AgentError kinds.

    company: the other nodes. Nothing is asked of the hub or of them where every file is here.
    """
    done = "was whole"
    company = company or Alone()
    if receipt.check(configuration.snapshot, manifest.sha256)["state"] != "whole":
        disk.make_folder(os.path.dirname(configuration.staging))
        with disk.lock(f"{configuration.staging}.lock", LOCK_SECONDS, stopping) as held:
            _remove_orphans(configuration)
            state = receipt.check(configuration.snapshot, manifest.sha256)["state"]
            if state == "absent":
                _fetch(configuration, manifest, hub, status, stopping, company, held)
                done = "fetched"
            elif state != "whole":
                done = _mend(configuration, manifest, hub, status, stopping, company, held)
    count = len(manifest.files)
    status.set(done=manifest.bytes, total=manifest.bytes, files_done=count, files_total=count)
    return done


def _remove_orphans(configuration: Configuration) -> None:
    """Staging folders of this repository's other revisions: nobody will go on with them."""
    folder, ours = os.path.split(configuration.staging)
    prefix = ours[: -len(configuration.revision)]
    for name in os.listdir(folder):
        rest = name[len(prefix) :]
        if name.startswith(prefix) and re.match(r"[0-9a-f]{40}(\.|$)", rest) and not name.startswith(ours):
            path = os.path.join(folder, name)
            say(f"{path}: left by another revision, removed")
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                disk.forget(path)


def _receipt(manifest: Manifest, records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "repository": manifest.repository,
        "revision": manifest.revision,
        "manifest_sha256": manifest.sha256,
        "bytes": manifest.bytes,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": records,
    }


def _fetch(
    configuration: Configuration,
    manifest: Manifest,
    hub: Hub | Folder,
    status: Status,
    stopping: Event,
    company: Alone,
    held: int,
) -> None:
    staging = configuration.staging
    gather = Gather(configuration, manifest.revision, staging, hub, status, stopping, (held,), company)
    _reuse(configuration, manifest, gather.journal)
    records = gather.run(manifest.files)
    status.set(phase="publishing", done=manifest.bytes)
    for folder, folders, _ in os.walk(staging, topdown=False):
        for name in folders:
            path = os.path.join(folder, name)
            if not os.path.islink(path) and not os.listdir(path):
                os.rmdir(path)
        disk.sync_folder(folder)
    os.chmod(staging, 0o755)
    disk.write_json(os.path.join(staging, receipt.NAME), _receipt(manifest, records), 0o444)
    parent = os.path.dirname(configuration.snapshot)
    disk.make_folder(parent)
    os.rename(staging, configuration.snapshot)  # replaces nothing: a rename only ever falls on an empty folder
    disk.sync_folder(parent)
    disk.sync_folder(os.path.dirname(staging))
    gather.journal.remove()


def _reuse(configuration: Configuration, manifest: Manifest, journal: Journal) -> None:
    """Take what another revision of this repository has already, by hard links: a new tokenizer is no 595 GB.

    Only files that their own receipt proves now. A link moves ctime_ns of the file, so that receipt is written anew.
    """
    parent = os.path.dirname(configuration.snapshot)
    missing = [file for file in manifest.files if file.bytes and not journal.holds(file)]
    for name in _names(parent):
        other = os.path.join(parent, name)
        proved = receipt.read(other) if re.fullmatch(r"[0-9a-f]{40}", name) else None
        if proved is None:
            continue
        had = {record["digest"]: path for path, record in proved["files"].items() if "digest" in record}
        taken = 0
        for file in missing:
            path = had.get(file.digest)
            target = os.path.join(configuration.staging, file.path)
            if path is None or os.path.lexists(target):
                continue
            record = proved["files"][path]
            if receipt.unlike(os.path.join(other, path), record):
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            try:
                os.link(os.path.join(other, path), target, follow_symlinks=False)
            except OSError:  # somebody else's file (protected_hardlinks), or a file system without links
                continue
            record.update(receipt.stamps(os.lstat(target)))
            journal.add(Hashed(file, file.digest, True, receipt.stamps(os.lstat(target))))
            taken += file.bytes
        if taken:
            disk.write_json(os.path.join(other, receipt.NAME), proved, 0o444)
            say(f"{other}: {taken} bytes are the same there, linked")


def _trusted(configuration: Configuration, manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Files that a receipt proves: the same digest as the manifest wants, and the stamps of then."""
    proved = receipt.read(configuration.snapshot) or {"files": {}}
    device = os.lstat(configuration.snapshot).st_dev
    trusted = {}
    for file in manifest.files:
        record = proved["files"].get(file.path)
        if not isinstance(record, dict) or record.get("digest") != file.digest:
            continue
        if not receipt.unlike(os.path.join(configuration.snapshot, file.path), record, device):
            trusted[file.path] = record
    return trusted


def _mend(
    configuration: Configuration,
    manifest: Manifest,
    hub: Hub | Folder,
    status: Status,
    stopping: Event,
    company: Alone,
    held: int,
) -> str:
    """Hash what the receipt does not prove, fetch what is wrong, put each new file in place by one rename."""
    snapshot, staging = configuration.snapshot, f"{configuration.staging}.repair"
    records = _trusted(configuration, manifest)
    doubtful = [file for file in manifest.files if file.path not in records]
    status.set(phase="repairing", done=0, total=sum(file.bytes for file in doubtful))
    wrong = []
    for hashed in hash_all(snapshot, doubtful, status.worked, stopping, seal=True, each=_count(status)):
        if hashed.right:
            records[hashed.file.path] = {"digest": hashed.file.digest, **hashed.stamps}
        else:
            path = os.path.join(snapshot, hashed.file.path)
            say(f"{path}: found {hashed.found}, wanted {hashed.file.digest}; fetched again")
            wrong.append(hashed.file)
    if wrong:
        gather = Gather(configuration, manifest.revision, staging, hub, status, stopping, (held,), company)
        gather.has_already = manifest.bytes - sum(file.bytes for file in wrong)
        records.update(gather.run(wrong, {file.path: os.path.join(snapshot, file.path) for file in wrong}))
        status.set(phase="publishing")
        for file in wrong:
            records[file.path].update(_put(os.path.join(staging, file.path), snapshot, file.path))
        shutil.rmtree(staging)
        gather.journal.remove()
    known = {file.path: file for file in manifest.files}
    strangers = receipt.strangers(snapshot, known)
    for path in strangers:
        say(f"{os.path.join(snapshot, path)}: is not in the manifest, removed")
        os.unlink(os.path.join(snapshot, path))
    disk.write_json(os.path.join(snapshot, receipt.NAME), _receipt(manifest, records), 0o444)
    return f"repaired: {len(doubtful)} files hashed, {len(wrong)} fetched again, {len(strangers)} removed"


def _count(status: Status) -> Callable[[Hashed], None]:
    done = 0

    def each(hashed: Hashed) -> None:
        nonlocal done
        done += hashed.file.bytes
        status.set(done=done)

    return each


def _put(new: str, snapshot: str, path: str) -> dict[str, int]:
    """Put a file in its place by one rename; its stamps, because a rename of the file itself moves its ctime_ns.

    What stands in its way or on the way to it is not the manifest's, and goes.
    """
    folder = snapshot
    for part in path.split("/")[:-1]:
        folder = os.path.join(folder, part)
        if os.path.islink(folder) or (os.path.lexists(folder) and not os.path.isdir(folder)):
            os.unlink(folder)
    os.makedirs(folder, exist_ok=True)
    target = os.path.join(snapshot, path)
    if os.path.isdir(target) and not os.path.islink(target):
        shutil.rmtree(target)
    with open(new, "rb") as moved:
        os.rename(new, target)
        disk.sync_folder(folder)
        return receipt.stamps(os.fstat(moved.fileno()))


def hash_all(
    folder: str,
    files: Iterable[File],
    moved: Callable[[int], None],
    stopping: Event,
    seal: bool = False,
    each: Callable[[Hashed], None] = lambda hashed: None,
) -> list[Hashed]:
    """Digests of files below a folder, in parallel, the largest first so that the last thread does not end late.

    A file that is missing, or is reached over a link, is not right. Raises Stopped.
    """

    def one(file: File) -> Hashed:
        path = os.path.join(folder, file.path)
        if os.path.realpath(path) != os.path.join(os.path.realpath(folder), file.path):
            return Hashed(file, "a link", False, {})
        try:
            return hashing.digest(path, file, moved, stopping, seal)
        except FileNotFoundError:
            return Hashed(file, "nothing", False, {})
        except OSError as error:  # EIO of a bad sector is damage too
            if disk.full(error):
                raise NoRoom(f"{path}: {error.strerror}. Fix: free space there") from None
            return Hashed(file, f"an unreadable file ({error.strerror})", False, {})

    found = []
    ordered: Sequence[File] = sorted(files, key=lambda file: -file.bytes)
    with ThreadPoolExecutor(threads(), thread_name_prefix="hash") as pool:
        for hashed in pool.map(one, ordered):
            if stopping.is_set():
                raise Stopped("asked to stop while hashing")
            each(hashed)
            found.append(hashed)
    return sorted(found, key=lambda hashed: hashed.file.path)


def old(configurations: Sequence[Configuration]) -> list[tuple[str, int]]:
    """Snapshots and staging folders that no configuration wants: [(path, bytes)]. Only folders of our own naming."""
    wanted = {configuration.snapshot for configuration in configurations}
    staged = {configuration.staging for configuration in configurations}
    found = set()
    for configuration in configurations:
        parent = os.path.dirname(configuration.snapshot)
        for name in _names(parent):
            path = os.path.join(parent, name)
            if re.fullmatch(r"[0-9a-f]{40}", name) and path not in wanted and os.path.isdir(path):
                found.add(path)
        folder = os.path.dirname(configuration.staging)
        for name in _names(folder):
            path = os.path.join(folder, name)
            of = re.fullmatch(r"(.+-[0-9a-f]{40})(\.repair)?", name)
            if of and os.path.join(folder, of[1]) not in staged and os.path.isdir(path):
                found.add(path)
    return [(path, size(path)) for path in sorted(found) if not os.path.islink(path)]


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def size(path: str) -> int:
    """Bytes that deleting a folder frees: files with another name elsewhere count nothing."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            found = os.lstat(os.path.join(folder, name))
            if found.st_nlink == 1:
                total += found.st_blocks * 512
    return total


def users(path: str) -> list[int]:
    """Processes that have a file below the folder open or mapped, as far as we may see."""
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/maps", encoding="utf-8", errors="replace") as maps:
                if any(f" {path}/" in line for line in maps):
                    found.add(int(entry))
            for descriptor in os.listdir(f"/proc/{entry}/fd"):
                if os.readlink(f"/proc/{entry}/fd/{descriptor}").startswith(path + "/"):
                    found.add(int(entry))
        except OSError:
            continue
    return sorted(found)


def delete(path: str, staging_folder: str) -> None:
    """Remove a snapshot: renamed first, so that a half-removed one is never seen under its name.

    Files that other revisions share with it get another ctime_ns by that; their receipts are written anew, for what
    they proved before. A kill in between costs a hash of those files, nothing else.
    """
    proved: dict[str, dict[str, Any]] = {}
    parent = os.path.dirname(path)
    for name in _names(parent):
        other = os.path.join(parent, name)
        found = receipt.read(other) if other != path else None
        if found is not None:
            found["files"] = {
                file: record
                for file, record in found["files"].items()
                if not receipt.unlike(os.path.join(other, file), record)
            }
            proved[other] = found
    aside = os.path.join(staging_folder, f"removed-{os.getpid()}-{os.path.basename(path)}")
    os.rename(path, aside)
    shutil.rmtree(aside)
    for other, found in proved.items():
        changed = False
        for file, record in found["files"].items():
            now = receipt.stamps(os.lstat(os.path.join(other, file)))
            same = all(now[stamp] == record[stamp] for stamp in ("bytes", "mtime_ns", "inode"))
            if same and now["ctime_ns"] != record["ctime_ns"]:
                record.update(now)
                changed = True
        if changed:
            whole = receipt.read(other)
            if whole is not None:
                whole["files"].update(found["files"])
                disk.write_json(os.path.join(other, receipt.NAME), whole, 0o444)
