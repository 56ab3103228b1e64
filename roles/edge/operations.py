"""What edge does to a host. Each operation reads one fact, and changes nothing where nothing needs it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit import files, signals
from kit.command import StringCommand, host
from kit.program import act_command
from kit.role import operation
from node import layout
from roles.edge.facts import EdgeFacts

_HERE = Path(__file__).parent
Commands = Generator[Any, Any, Any]


@operation("Open the edge: Caddy, its keys, its answer")
def open_edge(wanted: Sequence[files.Item], edge: Mapping[str, Any], unit_file: str) -> Commands:
    """Bring Caddy and its files to what is wanted, and let it run with them. A reload cuts no answer.

    + wanted: its files and folders, the owner's certificate and client keys among them.
    + edge: what edge_on_host.py is told.
    + unit_file: the one of `wanted` that asks for a restart.
    """
    found = EdgeFacts.read(paths=[item.path for item in wanted], units=[edge["unit"]], edge=dict(edge))
    unit = found["units"][edge["unit"]]
    changed = files.compare(found["files"], wanted)
    reasons = signals.reasons_to_restart(unit, {unit_file: found["files"][unit_file]})
    replaced = [why for why in found["running"] or [] if "replaced" in why]
    restart = unit["ActiveState"] != "active" or bool(reasons or replaced) or unit_file in changed
    why = [
        *(f"{path}: {reason}" for path, reason in changed.items()),
        *found["keys"],
        *reasons,
        *(found["running"] or []),
    ]
    if not why and not restart and unit["UnitFileState"] == "enabled":
        host().noop(f"{edge['unit']} answers, with the files, keys and certificate of now")
        return
    for line in why if unit["ActiveState"] == "active" else []:
        host().log(f"{edge['unit']}: {line}")
    if found["package"] is None or not found["user"]:
        install = {"package": edge["package"], "user": edge["user"]}
        yield act_command(_HERE / "install_on_host.py", install, shown=(edge["package"], edge["user"]))
    if changed:
        yield from files.apply(wanted, found["files"])
    yield act_command(_HERE / "edge_on_host.py", {"edge": dict(edge), "restart": restart}, shown=(edge["unit"],))


@operation("Close the edge, where there was one")
def close_edge(unit: str, unit_file: str) -> Commands:
    """Stop Caddy and remove what it was told. Its authority and the keys made on the node stay, for another day."""
    gone = [files.Absent(unit_file), files.Absent(layout.EDGE, tree=True)]
    found = EdgeFacts.read(paths=[item.path for item in gone], units=[unit])
    if not files.compare(found["files"], gone):
        host().noop("there is no edge")
        return
    if found["files"][unit_file] is not None:
        yield StringCommand("systemctl disable --now --", unit)
    yield from files.apply(gone, found["files"])
    yield StringCommand("systemctl daemon-reload")
