"""Runs on the host: which release is current, and which releases there are. Reads only."""

from __future__ import annotations

import os
import re
from typing import Any

from kit import on_host


def probe(link: str, releases: str) -> dict[str, Any]:
    """{"files": state of the link, "releases": digests below the folder of releases}"""
    names = os.listdir(releases) if os.path.isdir(releases) else []
    return {
        "files": on_host.files([link]),
        "releases": sorted(name for name in names if re.fullmatch(r"[0-9a-f]{16}", name)),
    }
