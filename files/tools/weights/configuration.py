"""What the agent is told, by the role that lays the file: /etc/kimi-nodes/weights-*.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from .errors import Misconfigured


@dataclass(frozen=True)
class Configuration:
    """One repository's weights on this node.

    repository, revision: as in the manifest. hub: see hub.source. directory: the owner's weights
    directory; snapshot, staging: below it. manifest, status: paths. user: who owns the weights. token_file: the hub
    token as root keeps it, or "" (the unit gets it as a credential). client: the python that has
    huggingface_hub, or "". sharing: path of the file that names the peers (see sharing.py), or "" for a node by
    itself. files_at_once, connections_per_file: of aria2.
    """

    repository: str
    revision: str
    hub: str
    directory: str
    snapshot: str
    staging: str
    manifest: str
    status: str
    user: str
    token_file: str
    client: str
    sharing: str
    files_at_once: int
    connections_per_file: int
    stall_seconds: int


def load(path: str) -> Configuration:
    """Raises Misconfigured."""
    try:
        with open(path, encoding="utf-8") as source:
            data = json.load(source)
        wanted = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(Configuration)}
        if not isinstance(data, dict) or set(data) != set(wanted):
            raise ValueError(f"wanted exactly the keys {', '.join(sorted(wanted))}")
        for name, kind in wanted.items():
            if not isinstance(data[name], kind):
                raise ValueError(f"{name} is {data[name]!r}, wanted {kind.__name__}")
    except OSError as error:
        raise Misconfigured(f"configuration {path}: {error.strerror}. Fix: run deploy.py again") from None
    except ValueError as error:
        raise Misconfigured(f"configuration {path}: {error}. Fix: run deploy.py again") from None
    return Configuration(**data)
