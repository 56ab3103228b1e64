"""The environment of the programs that run on the node (uv, huggingface_hub, libtorrent), apart from every release."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from node.layout import TOOLS

LOCK = "files/locks/tools.txt"
ENVIRONMENTS = f"{TOOLS}/environments"


@dataclass(frozen=True)
class Tools:
    """lock: the lock file as it is. python: minor version of the system's own, "3.12"."""

    lock: bytes
    python: str

    @property
    def digest(self) -> str:
        """16 hex digits that change with the lock and the Python."""
        return hashlib.sha256(self.python.encode() + b"\n" + self.lock).hexdigest()[:16]

    @property
    def environment(self) -> str:
        """Where it is built; `node.layout.TOOLS_ENVIRONMENT` is a link to it."""
        return f"{ENVIRONMENTS}/{self.digest}"

    @property
    def site_packages(self) -> str:
        return f"{self.environment}/lib/python{self.python}/site-packages"

    @property
    def uv(self) -> str:
        """The installer of releases."""
        return f"{self.environment}/bin/uv"

    @property
    def receipt(self) -> str:
        """Written last: without it the environment is half built and never used."""
        return f"{self.environment}/complete.json"
