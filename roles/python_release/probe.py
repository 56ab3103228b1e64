"""Runs on the host: whether the release is whole, and whether there is room to build it. Reads only."""

from __future__ import annotations

import os
from typing import Any

from kit import on_host


def probe(environment: str, site_packages: str, receipt: str, paths: list[str], unit: str) -> dict[str, Any]:
    """{"receipt": object | None, "installed": names of the distributions' own folders, "there": whether its folder
    exists, "free": bytes free where it is or would be, "files": ..., "unit": state of the build's unit}"""
    return {
        "receipt": on_host.json_object(receipt, 16 << 20),
        "installed": installed(site_packages),
        "there": os.path.isdir(environment),
        "free": free(environment),
        "files": on_host.files(paths),
        "unit": on_host.units([unit])[unit],
    }


def installed(site_packages: str) -> list[str]:
    """`NAME-VERSION.dist-info` of what lies there: a listing, for reading 200 files takes half a second."""
    try:
        return sorted(name for name in os.listdir(site_packages) if name.endswith(".dist-info"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def free(path: str) -> int:
    """Bytes that may be written on the file system of a path, which need not exist yet."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
