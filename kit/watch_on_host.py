"""Runs on the host for `kit.units`: wait a little for a unit to end, then tell how it is."""

from __future__ import annotations

import time
from typing import Any

from kit import on_host

WORKING = ("activating", "reloading", "deactivating", "refreshing", "maintenance")


def working(state: dict[str, Any]) -> bool:
    """Whether the unit's work still goes on. A service that ended and stays (`active (exited)`) does not."""
    return state["ActiveState"] in WORKING or (state["ActiveState"] == "active" and state["SubState"] != "exited")


def probe(unit: str, status_file: str | None, seconds: float) -> dict[str, Any]:
    """{"working": bool, "state": unit's state, "status": JSON of the status file | None, "journal": last lines}.

    Returns as soon as the unit ends, and after `seconds` in any case. The journal is read of a failed unit only.
    """
    until = time.monotonic() + seconds
    while working(state := on_host.units([unit])[unit]) and time.monotonic() < until:
        time.sleep(min(0.25, max(0.0, until - time.monotonic())))
    # None too where it is caught in the middle of a write that is not by rename.
    status = on_host.json_object(status_file) if status_file is not None else None
    journal: list[str] = []
    if state["ActiveState"] == "failed" or state["Result"] not in ("", "success"):
        match = ["_SYSTEMD_INVOCATION_ID=" + state["InvocationID"]] if state["InvocationID"] else ["--unit=" + unit]
        shown = on_host.run(["journalctl", "--no-pager", "--output=cat", "--lines=20", *match])
        journal = shown["out"].strip().splitlines()
    return {
        "working": working(state),
        "state": state,
        "status": status,
        "journal": journal,
    }
