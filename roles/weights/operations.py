"""What the weights role does to a host."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from kit import files, signals, units
from kit.command import QuoteString, StringCommand, host
from kit.refusal import Refusal
from kit.role import operation
from node import layout
from node.plan import Weights
from node.sharing import Sharing
from roles.weights import lay
from roles.weights.facts import WeightsFacts

TROUBLE_SECONDS = 90.0  # of an error that the agent tries to outlive, until the operator is told; the agent goes on


def _found(weights: Sequence[Weights], paths: Sequence[str]) -> Any:
    asked = [
        {"unit": each.paths.unit, "snapshot": each.paths.snapshot, "manifest_sha256": each.manifest.sha256}
        for each in weights
    ]
    return WeightsFacts.read(
        paths=list(paths),
        weights=asked,
        receipts=f"{layout.WEIGHTS_AGENT_PARTS}/receipt.py",
        units_folder=layout.UNITS,
        prefix=lay.UNIT_PREFIX,
        sharer=layout.SHARING_UNIT,
        table=layout.SHARING_TABLE,
    )


@operation("Start fetching weights")
def begin(
    weights: Sequence[Weights], wanted: Sequence[files.Item], sharing: Sharing | None = None
) -> Generator[Any, Any, Any]:
    """Lay the agent's files, and start it for weights that are not whole by their receipt; nothing is waited for.

    + weights: of the plan.
    + wanted: their files, as `lay.items` has them.
    + sharing: with whom this node shares; its sharer runs before its agents. None: it is stopped.

    Units of weights that the plan no longer has are stopped and removed; their snapshots stay.
    """
    found = _found(weights, [item.path for item in wanted])
    forgotten: list[files.Item] = []
    sharer = found["units"][layout.SHARING_UNIT]
    if sharing is None and (sharer["UnitFileState"] or sharer["ActiveState"] not in ("inactive", "failed")):
        yield StringCommand("systemctl disable --now --", QuoteString(layout.SHARING_UNIT))
    for unit in found["others"]:
        slug = unit.removeprefix(lay.UNIT_PREFIX).removesuffix(".service")
        yield StringCommand("systemctl disable --now --", QuoteString(unit))
        forgotten += [
            files.Absent(f"{layout.UNITS}/{unit}"),
            files.Absent(f"{layout.CONFIGURATION}/weights-{slug}.json"),
            files.Absent(f"{layout.MANIFESTS}/{slug}.json"),
        ]
    state = {**found["files"], **{item.path: {"kind": "file"} for item in forgotten}}
    yield from files.apply([*wanted, *forgotten], state)
    changed = files.compare(state, [*wanted, *forgotten])
    unit_files = [path for path in changed if path.startswith(layout.UNITS + "/")]
    steps = sharer_steps(sharing, found, changed)
    for each in weights:
        steps += steps_for(each, found, changed)
    if (
        unit_files
        or sharer["NeedDaemonReload"] == "yes"
        or any(found["units"][each.paths.unit]["NeedDaemonReload"] == "yes" for each in weights)
    ):
        steps.insert(0, StringCommand("systemctl daemon-reload"))
    if not steps:
        host().noop(f"{', '.join(each.paths.unit for each in weights)}: as wanted")
        return
    joined: list[Any] = []
    for step in steps:
        joined += ["&&", *step.bits] if joined else [*step.bits]
    yield StringCommand(*joined)


def sharer_steps(sharing: Sharing | None, found: Mapping[str, Any], changed: Mapping[str, str]) -> list[StringCommand]:
    """Commands that bring the sharer to what it is told, behind its firewall."""
    if sharing is None:
        return []
    name, state = layout.SHARING_UNIT, found["units"][layout.SHARING_UNIT]
    own = {path: entry for path, entry in found["files"].items() if path in lay.SHARING_FILES or path.endswith(".py")}
    reasons = signals.reasons_to_restart(state, own) + [path for path in changed if path in own]
    if not is_limited(found["table"], sharing):
        reasons.append(f"table {layout.SHARING_TABLE} is not loaded as it is laid down")
    steps = []
    if state["UnitFileState"] != "enabled":
        steps.append(StringCommand("systemctl enable --quiet --", QuoteString(name)))
    if reasons or state["ActiveState"] != "active":
        # What a start says goes to the journal only.
        words = f"{{ journalctl --no-pager -o cat -n 5 -u {name} >&2; exit 1; }}"
        steps.append(StringCommand("{ systemctl restart --", QuoteString(name), f"|| {words}; }}"))
    return steps


def is_limited(table: str | None, sharing: Sharing) -> bool:
    """Whether a table, as nft lists it, drops what comes for the ports from anybody but the peers."""
    rule = re.search(r"tcp dport \{ ([\d, ]+) \} ip saddr != (\{ [\d., ]+ \}|[\d.]+) counter .*drop", table or "")
    if rule is None:
        return False
    ports, addresses = set(re.findall(r"\d+", rule[1])), set(re.findall(r"[\d.]+", rule[2]))
    return ports == set(map(str, sharing.ports)) and addresses == {peer.address for peer in sharing.peers}


def steps_for(weights: Weights, found: Mapping[str, Any], changed: Mapping[str, str]) -> list[StringCommand]:
    """Commands that bring one unit to what its snapshot needs."""
    name, state = weights.paths.unit, found["units"][weights.paths.unit]
    quoted, steps = QuoteString(name), []
    if state["UnitFileState"] != "enabled":
        steps.append(StringCommand("systemctl enable --quiet --", quoted))
    snapshot = found["snapshots"][name]["state"]
    own = {item.path for item in lay.described(weights)} | {layout.HUB_TOKEN, layout.SHARING}
    if snapshot == "whole" and weights.paths.manifest not in changed:
        if state["ActiveState"] == "failed":
            steps.append(StringCommand("systemctl reset-failed --", quoted))
        return steps
    at_work = state["ActiveState"] in ("active", "activating", "reloading")
    seen = {path: entry for path, entry in found["files"].items() if path in own or path.endswith(".py")}
    reasons = signals.reasons_to_restart(state, seen) + [path for path in changed if path in seen]
    if at_work and not reasons:
        host().log(f"{name} is at work already")
        return steps
    # The last run's status would be shown as this one's until the agent has written its first.
    steps.append(StringCommand("rm -f --", QuoteString(weights.paths.status)))
    # A restart keeps all that has arrived; it also takes a unit out of its pause before the next try.
    steps.append(StringCommand("systemctl restart --no-block --", quoted))
    return steps


@operation("Wait for weights")
def wait(weights: Sequence[Weights]) -> Generator[Any, Any, Any]:
    """Wait until every snapshot is whole, with a line of progress every ten seconds.

    + weights: of the plan.

    Fails the host with the agent's own words where it gives up, or has been in trouble for long.
    """
    found = _found(weights, [])
    waiting = [each for each in weights if found["snapshots"][each.paths.unit]["state"] != "whole"]
    if not waiting:
        host().noop("all weights are whole by their receipts")
        return
    for each in waiting:
        yield Join(each.paths.unit, f"Weights {each.manifest.repository}", each.paths.status, 7 * 24 * 3600)
    yield StringCommand(
        "/usr/bin/python3 -sE",
        layout.WEIGHTS_AGENT,
        "verify",
        *(QuoteString(each.paths.configuration) for each in waiting),
        ">&2",
    )


class Join(units.Join):
    """Waits as `kit.units.Join` does, and also tells what the agent is trying to outlive."""

    def _judge(self, found: Mapping[str, Any]) -> None:
        super()._judge(found)
        status = found["status"] or {}
        trouble = status.get("trouble_seconds") or 0.0
        if found["working"] and status.get("error") and trouble > TROUBLE_SECONDS:
            raise Refusal(
                f"{self.title}: {status['error']} ({self.unit} has been trying for {trouble:.0f} s and goes on)"
            )
