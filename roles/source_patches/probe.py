"""Runs on the host: digests of the files that patches touch, and what tells whether one is needed. Reads only."""

from __future__ import annotations

import importlib.metadata
import os
import re
from typing import Any

from kit import on_host


def probe(
    site_packages: str, packages: list[str], files: list[str], nvcc: str, built: str, receipt: str
) -> dict[str, Any]:
    """{"built": whether the release's receipt is there, "versions": {package: version | None}, "digests": {file:
    sha256 | None}, "nvcc": "13.0" | None, "receipt": object | None}. files: below site_packages; nvcc: a path."""
    return {
        "built": os.path.isfile(built),
        "versions": {name: version(site_packages, name) for name in packages},
        "digests": {name: digest(f"{site_packages}/{name}") for name in files},
        "nvcc": nvcc_release(nvcc),
        "receipt": on_host.json_object(receipt),
    }


def version(site_packages: str, package: str) -> str | None:
    """Of an installed distribution; None where it is not installed."""
    found = next(iter(importlib.metadata.distributions(name=package, path=[site_packages])), None)
    return None if found is None else found.version


def digest(path: str) -> str | None:
    """sha256 of a file; None where there is none."""
    try:
        return on_host.sha256(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def nvcc_release(path: str) -> str | None:
    """ "13.0" of the line `Cuda compilation tools, release 13.0, V13.0.88`; None where the compiler does not run."""
    said = on_host.run([path, "--version"])
    match = re.search(r"release (\d+\.\d+)", said["out"])
    return match.group(1) if said["code"] == 0 and match else None
