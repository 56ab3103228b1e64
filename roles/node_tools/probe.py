"""Runs on the host: packages, users, files and the environment of the tools. Reads only."""

from __future__ import annotations

import grp
import os
import pwd
from typing import Any

from kit import on_host


def probe(
    packages: list[str], paths: list[str], users: list[str], groups: list[str], programs: str, receipt: str
) -> dict[str, Any]:
    """{"packages": {name: version | None}, "unfinished": [package], "files": ..., "users": {name: ... | None},
    "groups": those that exist, "programs": names of the .py files in that folder, "receipt": text | None}

    A package is unfinished when dpkg was interrupted in it; "(journal)" stands for dpkg's own unfinished journal.
    """
    versions, unfinished = package_states(packages)
    return {
        "packages": versions,
        "unfinished": unfinished,
        "files": on_host.files(paths),
        "users": {name: user(name) for name in users},
        "groups": [name for name in groups if _group_exists(name)],
        "programs": sorted(name for name in _names(programs) if name.endswith(".py")),
        "receipt": on_host.text(receipt),
    }


def package_states(names: list[str], updates: str = "/var/lib/dpkg/updates") -> tuple[dict[str, str | None], list[str]]:
    """Installed versions by name, and what dpkg left half done: all by one dpkg-query over everything installed."""
    shown = on_host.run(["dpkg-query", "--show", "--showformat=${Package}\t${db:Status-Abbrev}\t${Version}\n"])
    if shown["code"] != 0:
        raise on_host.Problem(
            f"dpkg-query failed: {shown['err'].strip()[-300:]}; wanted a list. Fix: dpkg --audit, on that host"
        )
    return parse_packages(shown["out"], names, [name for name in _names(updates) if name.isdigit()])


def parse_packages(text: str, names: list[str], journal: list[str]) -> tuple[dict[str, str | None], list[str]]:
    """From lines `name<TAB>status<TAB>version`; status: wanted, state and error flag, a letter each (dpkg-query(1))."""
    versions: dict[str, str | None] = dict.fromkeys(names)
    unfinished = ["(journal)"] if journal else []
    for line in text.splitlines():
        name, status, version = line.split("\t")
        if status[1:2] not in "inc" or status[2:3].strip():
            unfinished.append(name)
        elif status[1:2] == "i" and name in versions:
            versions[name] = version
    return versions, unfinished


def user(name: str) -> dict[str, Any] | None:
    """{"uid": int, "shell": str, "groups": [names of its further groups]}; None where there is no such user."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        return None
    groups = [entry.gr_name for entry in grp.getgrall() if name in entry.gr_mem]
    return {"uid": found.pw_uid, "shell": found.pw_shell, "groups": sorted(groups)}


def _group_exists(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
