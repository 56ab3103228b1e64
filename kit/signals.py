"""Restart a unit only when something it depends on changed, judged by the host's own clocks.

A flag kept during the run would be lost by a kill between writing a file and restarting; this is not: a file changed
after the unit's main process started means that the process has not seen it, whichever run wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reasons_to_restart(unit: Mapping[str, Any], files: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """Why a running unit must be restarted, [] if it need not or is not running.

    `unit`: one entry of `on_host.units`. `files`: entries of `on_host.files` of what the process read at its start
    (configuration, the unit file, the `current` link); judged by ctime, which a rename or a chmod also moves.
    """
    if unit["ActiveState"] not in ("active", "activating", "reloading") or unit["started"] is None:
        return []
    reasons = [
        f"{path} changed after the start"
        for path, found in files.items()
        if found is not None and found["changed"] > unit["started"]
    ]
    if unit["NeedDaemonReload"] == "yes":
        reasons.append("its unit file changed")
    return reasons
