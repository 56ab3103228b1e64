"""Start a service that takes long to be ready, and wait for it without one remote command that lasts as long.

`kit.units.ensure` waits inside `systemctl start`; a server that loads for an hour outlives many a connection. Here the
start is only asked for; then short questions follow, as in `kit.units.join`, until the service is active or its start
has failed.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pyinfra.api.command import PyinfraCommand, QuoteString, StringCommand

from kit.refusal import Refusal
from kit.units import PROGRESS_SECONDS, Join

if TYPE_CHECKING:
    from pyinfra.api.host import Host

Commands = Generator[PyinfraCommand, None, None]

LOOK_SECONDS = 1.0  # between two looks at the unit
QUEUED_SECONDS = 300.0  # that a start may wait for other units to stop, before it counts as forgotten


def start(unit: str, stop_first: Iterable[str] = (), disable: Iterable[str] = ()) -> Commands:
    """Enable a unit and ask systemd to start it, without waiting for it; `join` does. One command.

    `stop_first`: units to stop before, the unit itself for a restart; `disable`: units not to come back after a boot.
    An earlier start limit is forgotten.
    """
    bits: list[Any] = ["systemctl daemon-reload"]
    for verb, names in (("disable", list(disable)), ("stop", list(stop_first))):
        if names:
            bits += [f"&& systemctl {verb} --", *map(QuoteString, names)]
    name = QuoteString(unit)
    bits += ["&& { systemctl reset-failed --", name, "2>/dev/null || true; }"]  # it fails for a unit not loaded yet
    bits += ["&& systemctl enable --", name, "&& systemctl start --no-block --", name]
    yield StringCommand(*bits)


def join(unit: str, title: str, status_file: str | None = None, wait_seconds: float = 6 * 3600) -> Commands:
    """Wait until a unit is active, printing progress.

    Fails this host with the last lines of the journal when its start fails, be it the first of several that systemd
    would try, and when it takes longer than `wait_seconds`.

    Survives a lost connection; the start goes on after Ctrl-C. Status file: see `kit.units.join`.
    """
    yield JoinStart(unit, title, status_file, wait_seconds)


class JoinStart(Join):
    """The waiting of `join`, as a command."""

    def __init__(self, unit: str, title: str, status_file: str | None, wait_seconds: float):
        super().__init__(unit, title, status_file, wait_seconds)
        self._asked = time.monotonic()
        self._seen = False

    def __repr__(self) -> str:
        return f"JoinStart({self.unit})"

    def _ask(self, host: Host, connector_arguments: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Look until the start has ended, one way or the other, or until the next line of progress is due."""
        until = time.monotonic() + min(seconds, PROGRESS_SECONDS)
        while True:
            found = super()._ask(host, connector_arguments, LOOK_SECONDS if seconds else 0.0)
            if found is None:
                return None
            found["working"] = not self._ended(found["state"])
            if not found["working"] or time.monotonic() >= until:
                return found

    def _ended(self, state: Mapping[str, Any]) -> bool:
        if state["ActiveState"] in ("active", "failed") or state["Result"] not in ("", "success"):
            return True
        if state["LoadState"] != "loaded":
            return True
        self._seen = self._seen or state["ActiveState"] != "inactive"
        # Inactive before it was ever seen to start: its start waits for others to stop.
        return state["ActiveState"] == "inactive" and (self._seen or time.monotonic() - self._asked > QUEUED_SECONDS)

    def _judge(self, found: Mapping[str, Any]) -> None:
        state = found["state"]
        if state["LoadState"] != "loaded":
            raise Refusal(f"{self.title}: {self.unit} is {state['LoadState']} on this host. Fix: run deploy.py again")
        if found["working"] or (state["ActiveState"] == "active" and state["Result"] in ("", "success")):
            return
        raise Refusal(
            [f"{self.title}: {line}" for line in found["journal"]]
            + [
                f"{self.title}: {self.unit} did not start ({state['ActiveState']}, {state['Result']}), wanted it "
                f"active. Fix: see the lines above, and all of them with: journalctl -u {self.unit}"
            ]
        )
