"""Helpers for programs that run on a host: standard library only, Python 3.10 or newer.

A role's `probe.py` imports this as `from kit import on_host`, on the controller (tests, mypy) and on the host alike:
`kit.program` sends this file along with the probe.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import stat
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

UNIT_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "UnitFileState",
    "NeedDaemonReload",
    "ExecMainStatus",
    "ExecMainStartTimestampMonotonic",
    "InvocationID",
)


# For apt-get and dpkg: nothing is asked, and needrestart does not restart the owner's services behind their back.
PACKAGING = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}


class Problem(Exception):
    """What this host cannot do as asked: the text names what was found and wanted, and ends with `Fix: ...`."""


def sha256(path: str) -> str:
    """SHA-256 of a file's content, 64 hex digits. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def user_name(uid: int) -> str:
    """The user's name, or the number as text where the host has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """The group's name, or the number as text where the host has no name for it."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def file_state(path: str, digest_up_to: int = 64 << 20) -> dict[str, Any] | None:
    """The state of one path, links not followed; None where there is nothing.

    {"kind": "file" | "directory" | "link" | "other", "mode": "644", "user": str, "group": str, "bytes": int,
    "modified": seconds, "changed": seconds (ctime), "sha256": str | None, "target": str | None}
    `sha256` is None for what is not a file and for files above `digest_up_to` bytes.
    """
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    kind = "other"
    digest = target = None
    if stat.S_ISLNK(found.st_mode):
        kind, target = "link", os.readlink(path)
    elif stat.S_ISDIR(found.st_mode):
        kind = "directory"
    elif stat.S_ISREG(found.st_mode):
        kind = "file"
        if found.st_size <= digest_up_to:
            digest = sha256(path)
    return {
        "kind": kind,
        "mode": format(stat.S_IMODE(found.st_mode), "o"),
        "user": user_name(found.st_uid),
        "group": group_name(found.st_gid),
        "bytes": found.st_size,
        "modified": found.st_mtime,
        "changed": found.st_ctime,
        "sha256": digest,
        "target": target,
    }


def files(paths: Iterable[str], digest_up_to: int = 64 << 20) -> dict[str, dict[str, Any] | None]:
    """`file_state` of each path, by path."""
    return {path: file_state(path, digest_up_to) for path in paths}


def text(path: str, up_to: int = 1 << 20) -> str | None:
    """The first `up_to` bytes of a file as text (undecodable bytes replaced); None where there is no such file."""
    try:
        with open(path, "rb") as file:
            return file.read(up_to).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def variables(path: str) -> dict[str, str]:
    """The variables of a file such as /etc/environment, quotes around a value dropped; {} where there is none."""
    found = {}
    for line in (text(path) or "").splitlines():
        name, separator, value = line.strip().removeprefix("export ").partition("=")
        if separator and not name.startswith("#") and name.strip().isidentifier():
            value = value.strip()
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            found[name.strip()] = value[1:-1] if quoted else value
    return found


def json_object(path: str, up_to: int = 1 << 20) -> dict[str, Any] | None:
    """A JSON object in a file of at most `up_to` bytes; None where there is no file, or something else in it."""
    try:
        found = json.loads(text(path, up_to) or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def replace(path: str, content: bytes, mode: int, user: str | None = None) -> None:
    """Write a file by one rename: complete on disk, with its mode and owner, before it appears, and never readable by
    more than them. `user`: the owner, with the group of that user; the process's own if None.

    Raises OSError, and KeyError for a user that there is not.
    """
    owner = pwd.getpwnam(user) if user is not None else None
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name}.kimi-nodes-new")  # a fixed name: the next run takes what a killed one left
    if os.path.lexists(beside):
        os.unlink(beside)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        if owner is not None:
            os.fchown(descriptor, owner.pw_uid, owner.pw_gid)
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    os.rename(beside, path)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def run(
    argv: Sequence[str],
    timeout: float = 30,
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
) -> dict[str, Any]:
    """Run a program without a shell: {"code": int | None, "out": str, "err": str}.

    `code` is None where the program is missing or ran out of time; `err` then says so. `environment` is added to the
    host's own; the language is C, so that output can be parsed.
    """
    whole = {**os.environ, "LC_ALL": "C", **(environment or {})}
    try:
        done = subprocess.run(
            list(argv), input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout, env=whole
        )
    except FileNotFoundError:
        return {"code": None, "out": "", "err": f"no program {argv[0]}"}
    except PermissionError:
        return {"code": None, "out": "", "err": f"{argv[0]} may not be executed"}
    except subprocess.TimeoutExpired:
        return {"code": None, "out": "", "err": f"{argv[0]} did not end within {timeout:g} s"}
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


def output(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a program without a shell for as long as it takes: (exit code, all that it printed, in its order).

    Its output goes into a pipe of this process, which lives on when the connection is lost: a package manager would
    die of a closed pipe in the middle of an installation. The code is 127 where the program cannot be started.
    `environment` as in `run`.
    """
    whole = {**os.environ, "LC_ALL": "C", **(environment or {})}
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=whole,
        )
    except OSError as error:
        return 127, f"{argv[0]}: {error.strerror}"
    return done.returncode, done.stdout


def packages(names: Iterable[str]) -> dict[str, str | None]:
    """Installed versions of Debian packages by name, None where not installed, by one dpkg-query."""
    wanted = list(names)
    versions: dict[str, str | None] = dict.fromkeys(wanted)
    if not wanted:
        return versions
    # dpkg-query exits 1 when it knows one of the names not at all, and still prints the others.
    shown = run(["dpkg-query", "--show", "--showformat=${Package}\t${db:Status-Abbrev}\t${Version}\n", *wanted])
    for line in shown["out"].splitlines():
        name, status, version = line.split("\t")
        if status.startswith("ii") and name in versions:
            versions[name] = version
    return versions


def units(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """State of systemd units by name, by one `systemctl show`.

    The properties in UNIT_PROPERTIES as text, and "started": wall clock in seconds of the start of the main process,
    None where it has not been started since boot. Raises Problem where systemd does not answer.
    """
    wanted = list(names)
    if not wanted:
        return {}
    shown = run(["systemctl", "show", "--property=" + ",".join(UNIT_PROPERTIES), "--", *wanted])
    blocks = [block for block in shown["out"].strip().split("\n\n") if block]
    if shown["code"] != 0 or len(blocks) != len(wanted):
        raise Problem(
            f"systemd does not answer for {', '.join(wanted)}: {(shown['err'] or shown['out']).strip()[-300:]}; "
            "wanted a host booted with systemd. Fix: systemctl is-system-running"
        )
    # Times since boot, because systemd prints wall-clock times in the host's own time zone only before version 251.
    booted = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    states: dict[str, dict[str, Any]] = {}
    for name, block in zip(wanted, blocks, strict=True):
        state: dict[str, Any] = dict.fromkeys(UNIT_PROPERTIES, "")
        state.update(line.split("=", 1) for line in block.splitlines() if "=" in line)
        since_boot = int(state.pop("ExecMainStartTimestampMonotonic") or 0)
        state["started"] = booted + since_boot / 1e6 if since_boot else None
        states[name] = state
    return states
