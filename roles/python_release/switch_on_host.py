"""Runs on the host: make a release current, then remove those that are neither kept nor in use."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path

from kit.on_host import Problem

RELEASE = re.compile(r"[0-9a-f]{16}")
LOCK_FILE = "/run/lock/kimi-nodes-release.lock"


def act(
    link: str,
    releases: str,
    digest: str,
    receipts: list[str],
    keep: int,
    belongings: list[str],
    processes: str = "/proc",
    lock_file: str = LOCK_FILE,
) -> None:
    """Point `link` to the release `digest`, whose `receipts` must be there; then remove what is not kept (see `prune`).

    Raises Problem where a receipt is missing: the release is not built, or not patched.
    """
    for receipt in receipts:
        if not os.path.isfile(receipt):
            raise Problem(
                f"{link}: found no {receipt}, wanted it before {releases}/{digest} becomes current: only what "
                "is built and patched may. Fix: run deploy.py again"
            )
    switch(link, f"{releases}/{digest}")
    prune(releases, digest, keep, belongings, processes, lock_file)


def switch(link: str, target: str) -> None:
    """By rename: the link points to the old release or to the new one, never nowhere. Not done where it is right."""
    if os.path.islink(link) and os.readlink(link) == target:
        return
    if os.path.isdir(link) and not os.path.islink(link):
        raise Problem(f"{link}: found a folder, wanted a link to {target}. Fix: look into it, then remove it by hand")
    folder, name = os.path.split(link)
    beside = f"{folder}/.{name}.new"
    Path(beside).unlink(missing_ok=True)
    os.symlink(target, beside)
    os.rename(beside, link)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def prune(releases: str, current: str, keep: int, belongings: list[str], processes: str, lock_file: str) -> None:
    """Keep `current` (a digest), every release that a process runs from, and the newest others up to `keep` in all.

    belongings: path patterns with {digest} in them, of what goes with a release; its receipt comes first. A folder
    whose receipt is missing is half built or half removed, and goes. Nothing is done while a release is being built.
    """
    with open(lock_file, "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("a release is being built: nothing is removed")
            return
        names = [name for name in os.listdir(releases) if RELEASE.fullmatch(name)]
        others = [name for name in names if name != current]
        used = in_use(releases, others, processes)
        others.sort(key=lambda name: built(belongings[0].format(digest=name)), reverse=True)
        kept = [name for name in others if built(belongings[0].format(digest=name))][: keep - 1]
        for name in others:
            if name in kept or name in used:
                continue
            print(f"removing release {name}")
            for pattern in belongings:  # the receipt first: what is half removed must not look whole
                _remove(pattern.format(digest=name))
            _remove(f"{releases}/{name}")


def built(receipt: str) -> float:
    """When the release was completed, seconds; 0 where it was not."""
    try:
        return os.stat(receipt).st_mtime
    except FileNotFoundError:
        return 0.0


def in_use(releases: str, names: list[str], processes: str) -> set[str]:
    """Releases that a running process was started from, or has a library of."""
    used: set[str] = set()
    for process in Path(processes).iterdir():
        if not process.name.isdigit():
            continue
        for source in ("cmdline", "maps"):
            with contextlib.suppress(OSError):  # it has ended
                text = (process / source).read_bytes().decode("utf-8", "replace")
                used |= {name for name in names if f"{releases}/{name}/" in text}
    return used


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)
