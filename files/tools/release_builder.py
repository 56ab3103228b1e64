#!/usr/bin/env python3
"""Build a release's virtual environment in place: release_builder.py REQUEST

Run by the unit kimi-release@DIGEST.service, as root, with the system's own Python. REQUEST is a JSON object:

    digest, release     what is built
    environment         the folder to build; site_packages: below it
    python              the interpreter of the system, "/usr/bin/python3.12"
    lock                text of the requirement file with hashes; distributions: {name: version} that it comes to here
    uv                  path of uv
    cache               folder for what uv fetches, unless the machine's own uv.toml names one
    bytes               that must be free
    receipts            [path]: the receipt, written last, and those of later steps, which a new building makes void
    status              where progress is told, for `kit.units.join`

The environment is either whole, with a receipt, or it is removed and built anew. Nothing is compiled from source: every
distribution is a wheel whose hash is in the lock. Exit code 1 with a line that ends in "Fix: ...".
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LOCK_FILE = "/run/lock/kimi-nodes-release.lock"
PACKAGE = "packages"  # the unit of progress


class Failed(Exception):
    """The release cannot be built: found, wanted, Fix."""


def main(arguments: list[str]) -> int:
    """The program. Returns its exit code."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    os.umask(0o022)
    with open(LOCK_FILE, "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at once would share uv's cache, which the first to end removes
        try:
            build(request)
        except Failed as failure:
            print(failure, file=sys.stderr)
            return 1
    return 0


def build(request: Mapping[str, Any]) -> None:
    """Build it, unless it is whole. Raises Failed."""
    environment = Path(request["environment"])
    if is_whole(request):
        return
    began = time.monotonic()
    tell(request, "removing what a former building left")
    for receipt in request["receipts"]:
        Path(receipt).unlink(missing_ok=True)  # before the first byte goes: a folder without a receipt is never used
    if environment.exists():
        shutil.rmtree(environment)
    cache, own = uv_cache(request)
    require_room(request, {environment.parent, cache})
    tell(request, "making the virtual environment")
    run_uv(request, ["venv", "--no-project", "--no-python-downloads", "--python", request["python"], str(environment)])
    lock_file = environment / "release.lock.txt"
    lock_file.write_text(request["lock"], encoding="utf-8")
    install(request, lock_file, cache, own)
    found = versions(Path(request["site_packages"]))
    if wrong := differences(found, request["distributions"]):
        raise Failed(f"{environment}: {wrong}. Fix: run deploy.py again, which builds it anew")
    compile_bytecode(request)
    tell(request, "writing everything to disk")
    close_to_others(environment)
    subprocess.run(["sync", "--file-system", str(environment)], check=True)
    write_receipt(request, found, time.monotonic() - began)
    if own:
        shutil.rmtree(
            cache, ignore_errors=True
        )  # it is one with the environment by hard links: nothing is fetched twice


def is_whole(request: Mapping[str, Any]) -> bool:
    """Whether the receipt is there and all distributions are those of the request."""
    try:
        json.loads(Path(request["receipts"][0]).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return not differences(versions(Path(request["site_packages"])), request["distributions"])


def environment_of_uv(request: Mapping[str, Any]) -> dict[str, str]:
    """uv trusts the system's authorities, and caches where we say only if the machine is not configured otherwise."""
    return {**os.environ, "UV_SYSTEM_CERTS": "1", "XDG_CACHE_HOME": request["cache"], "NO_COLOR": "1"}


def uv_cache(request: Mapping[str, Any]) -> tuple[Path, bool]:
    """Where uv keeps what it fetches, and whether that is ours to remove: not if uv.toml or UV_CACHE_DIR names it."""
    done = subprocess.run(
        [request["uv"], "cache", "dir"], env=environment_of_uv(request), capture_output=True, text=True, cwd="/"
    )
    if done.returncode:
        raise Failed(
            f"uv does not run: {done.stderr.strip()}; wanted {request['uv']} of the tools' environment. "
            "Fix: see /etc/uv/uv.toml, then run deploy.py again"
        )
    cache = Path(done.stdout.strip())
    return cache, cache == Path(request["cache"]) / "uv"


def require_room(request: Mapping[str, Any], folders: set[Path]) -> None:
    """Before the first byte is fetched. Raises Failed."""
    for folder in sorted(folders):
        there = next(place for place in (folder, *folder.parents) if place.exists())
        free = shutil.disk_usage(there).free
        if free < request["bytes"]:
            raise Failed(
                f"disk space for release {request['release']} at {folder}: found {free / 1e9:.1f} GB free, wanted "
                f"{request['bytes'] / 1e9:.1f} GB. Fix: free space there (df -h {there}), then run deploy.py again"
            )


def run_uv(request: Mapping[str, Any], arguments: list[str], watch: Iterator[None] | None = None) -> None:
    """uv's own lines go to the journal as they come. Raises Failed with the last of them."""
    process = subprocess.Popen(
        [request["uv"], *arguments],
        env=environment_of_uv(request),
        cwd="/",  # away from any project's settings
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    said = ""
    while True:
        ended = process.poll() is not None  # asked before reading: nothing is said after it
        with contextlib.suppress(TypeError):  # a text file that may not block and has nothing to say
            said_now = process.stdout.read()
            sys.stdout.write(said_now)
            sys.stdout.flush()
            said = (said + said_now)[-4000:]
        if ended:
            break
        if watch is not None:
            next(watch, None)
        time.sleep(0.2)
    if process.returncode:
        raise Failed(
            f"uv {arguments[0]} exited {process.returncode}: {' '.join(said.split())[-1200:]}; wanted to build "
            f"{request['environment']}. Fix: {fix(said)}"
        )


def fix(said: str) -> str:
    """What to do about uv's words."""
    for sign, remedy in (
        ("No space left", "free space on that file system (df -h), then run deploy.py again"),
        (
            "ash mismatch",
            "the index gave other bytes than the lock names: ask who runs it; never edit the lock by hand",
        ),
        (
            "invalid peer certificate",
            "put its certificate into /usr/local/share/ca-certificates and run update-ca-certificates",
        ),
        (
            "dns error",
            "see that the host resolves and reaches its package index (/etc/uv/uv.toml names it, if it is a mirror)",
        ),
        ("was not found in the package registry", "see that the mirror in /etc/uv/uv.toml has what the lock names"),
    ):
        if sign in said:
            return remedy
    return (
        "see that the host reaches its package index (a mirror is named in /etc/uv/uv.toml), then run deploy.py again"
    )


def install(request: Mapping[str, Any], lock_file: Path, cache: Path, own: bool) -> None:
    """Exactly the lock: no dependency is resolved, no source is built."""
    run_uv(
        request,
        [
            "pip", "install", "--python", f"{request['environment']}/bin/python", "--require-hashes", "--no-deps",
            "--no-build", "--strict", "--link-mode", "hardlink" if own else "copy", "--requirement", str(lock_file),
        ],
        watch=progress(request, cache),
    )  # fmt: skip


def progress(request: Mapping[str, Any], cache: Path) -> Iterator[None]:
    """Tell how many packages have been unpacked into uv's cache, then how many lie in the environment."""
    unpacked, total = cache / "archive-v0", len(request["distributions"])
    site_packages = Path(request["site_packages"])
    before = count(unpacked, "")
    while True:
        if installed := count(site_packages, ".dist-info"):
            tell(request, "installing", min(installed, total), total)
        else:
            tell(request, "fetching", min(count(unpacked, "") - before, total), total)
        for _ in range(5):
            yield


def count(folder: Path, ending: str) -> int:
    """Names in a folder, hidden ones aside."""
    try:
        return sum(1 for name in os.listdir(folder) if name.endswith(ending) and not name.startswith("."))
    except FileNotFoundError:
        return 0


def versions(site_packages: Path) -> dict[str, str]:
    """Distribution -> version of what lies in a site-packages folder."""
    return {
        re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower(): found.version
        for found in importlib.metadata.distributions(path=[str(site_packages)])
    }


def differences(found: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """What is not as the lock says, "" if all is."""
    return ", ".join(
        f"{name} found {found.get(name, 'nothing')}, wanted {wanted.get(name, 'nothing')}"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    )


def compile_bytecode(request: Mapping[str, Any]) -> None:
    """All modules but tests, once: who serves may not write here, and each process would compile for 12 s."""
    tell(request, "compiling modules")
    done = subprocess.run(
        [f"{request['environment']}/bin/python", "-I", "-m", "compileall", "-q", "-j", "0", "-x", "/tests?/",
         request["site_packages"]],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    # Exit code 1: some wheels carry templates and test data that are no Python; they are no modules of this release.
    if done.returncode not in (0, 1):
        raise Failed(
            f"compileall exited {done.returncode}, wanted 0 or 1. Fix: free memory and disk space, then deploy again"
        )


def close_to_others(environment: Path) -> None:
    """Nobody but root may change a release; wheels say themselves what mode their files have."""
    for folder, directories, files in os.walk(environment):
        for name in (*directories, *files):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if not stat.S_ISLNK(mode) and mode & 0o022:
                os.chmod(path, stat.S_IMODE(mode) & ~0o022)


def write_receipt(request: Mapping[str, Any], found: Mapping[str, str], seconds: float) -> None:
    """Last of all, by rename."""
    replace(
        Path(request["receipts"][0]),
        {
            "built": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "digest": request["digest"],
            "distributions": dict(sorted(found.items())),
            "lock_sha256": hashlib.sha256(request["lock"].encode()).hexdigest(),
            "python": request["python"],
            "release": request["release"],
            "seconds": round(seconds, 1),
        },
    )


def tell(request: Mapping[str, Any], phase: str, done: int | None = None, total: int | None = None) -> None:
    """Progress, for whoever waits for the unit."""
    status: dict[str, Any] = {"phase": phase}
    if done is not None:
        status |= {"done": done, "total": total, "unit": PACKAGE}
    replace(Path(request["status"]), status, durable=False)


def replace(path: Path, content: Mapping[str, Any], durable: bool = True) -> None:
    """Write a JSON object, whole or not at all."""
    beside = path.with_name(f".{path.name}.new")
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(beside, path)
    if durable:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(descriptor)
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
