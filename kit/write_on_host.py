"""Runs on the host for `kit.files`: bring paths to a wanted state, each by one rename. What to do comes on stdin.

Nothing is visible before every new content is complete on disk, so a full disk or a kill leaves the old files.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import grp
import json
import os
import pwd
import shutil
import stat
import sys
import zlib
from typing import Any

from kit.on_host import Problem

Item = dict[str, Any]


def _owner(item: Item) -> tuple[int, int]:
    try:
        return pwd.getpwnam(item["user"]).pw_uid, grp.getgrnam(item["group"]).gr_gid
    except KeyError as error:
        raise Problem(
            f"{item['path']}: {error.args[0]}, wanted owner {item['user']}:{item['group']}. "
            f"Fix: make that user and group before this step"
        ) from None


def _make_parents(directory: str) -> None:
    """The directory and those above it, mode 755 whatever the umask."""
    if os.path.isdir(directory):
        return
    _make_parents(os.path.dirname(directory))
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory)
        os.chmod(directory, 0o755)
        _sync(os.path.dirname(directory))


def _sync(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: str) -> str:
    directory, name = os.path.split(path)
    # 255 bytes is the longest name; the fixed name lets the next run take over what a killed one left.
    return os.path.join(directory, "." + os.fsdecode(os.fsencode(name)[:200]) + ".kimi-nodes-new")


def _forget(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _stage(item: Item) -> None:
    """Complete the new file or link under its temporary name."""
    path, beside = item["path"], _beside(item["path"])
    if os.path.isdir(path) and not os.path.islink(path):
        raise Problem(f"{path}: is a directory, wanted a {item['kind']}. Fix: look into it, then remove it by hand")
    _forget(beside)
    if item["kind"] == "link":
        os.symlink(item["target"], beside)
        return
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(base64.b64decode(item["content"]))
        file.flush()
        os.fchown(file.fileno(), *_owner(item))
        os.fchmod(file.fileno(), int(item["mode"], 8))
        os.fsync(file.fileno())


def _directory(item: Item) -> None:
    path = item["path"]
    if os.path.lexists(path) and not stat.S_ISDIR(os.lstat(path).st_mode):
        raise Problem(f"{path}: is not a directory, wanted one. Fix: look at it, then remove it by hand")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    os.chown(path, *_owner(item))
    os.chmod(path, int(item["mode"], 8))


def _remove(item: Item) -> None:
    path = item["path"]
    if os.path.islink(path) or not os.path.isdir(path):
        _forget(path)
        return
    if not item["tree"]:
        raise Problem(f"{path}: is a directory, wanted a file or nothing. Fix: look into it, then remove it by hand")
    # Renamed first, so that a half-removed tree is never seen under its own name.
    aside = _beside(path)
    if os.path.lexists(aside):
        shutil.rmtree(aside)
    os.rename(path, aside)
    shutil.rmtree(aside)


def act() -> None:
    """Do what stdin says: one line of base64 of compressed JSON, a list of items (see `kit.files`)."""
    items: list[Item] = json.loads(zlib.decompress(base64.b64decode(sys.stdin.readline())))
    os.umask(0o077)
    try:
        _apply(items)
    except OSError as error:
        raise Problem(
            f"{error.filename or items[0]['path']}: {error.strerror}; wanted to write "
            f"{', '.join(item['path'] for item in items)}; no file was changed halfway. "
            f"Fix: {'free space on that file system (df -h)' if error.errno == 28 else 'see the cause above'}"
        ) from None


def _apply(items: list[Item]) -> None:
    staged = [item for item in items if item["kind"] in ("file", "link")]
    with contextlib.ExitStack() as held:
        for item in items:
            if item["kind"] != "absent":
                _make_parents(os.path.dirname(item["path"]))
            if item["kind"] == "directory":
                _directory(item)
        directories = sorted({os.path.dirname(item["path"]) for item in items})
        for directory in directories:
            if os.path.isdir(directory):  # a directory of something absent may be absent too
                descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # two runs at once would share the temporary names
        try:
            for item in staged:
                _stage(item)
        except BaseException:
            for item in staged:
                _forget(_beside(item["path"]))
            raise
        for item in staged:
            os.rename(_beside(item["path"]), item["path"])
        for item in items:
            if item["kind"] == "absent":
                _remove(item)
        for directory in directories:
            if os.path.isdir(directory):
                _sync(directory)
