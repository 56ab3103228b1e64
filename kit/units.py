"""systemd units on a host: services, and long work that must outlive the connection.

Long work (gigabytes of weights, compiling) is a unit of the host, never a command of ours: a remote command goes on
after Ctrl-C without anybody to see it end. `start` it early, `join` it late; a second run joins what it finds running.
All functions are for use inside an operation (`yield from`), all unit names carry their suffix ("x.service").
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pyinfra import logger
from pyinfra.api.command import PyinfraCommand, QuoteString, StringCommand
from pyinfra.api.exceptions import ConnectError

from kit.command import host
from kit.probe import Malformed, Probe
from kit.program import probe_command
from kit.refusal import Refusal, report
from kit.watch_on_host import working

if TYPE_CHECKING:
    from pyinfra.api.host import Host
    from pyinfra.api.state import State

UnitState = Mapping[str, Any]
Commands = Generator[PyinfraCommand, None, None]

PROGRESS_SECONDS = 10.0  # between two lines of progress, and the longest that one question to the host takes
GIVE_UP_SECONDS = 300.0  # for a host that cannot be reached while its unit is waited for


class _Watch(Probe):
    program = "watch_on_host.py"


def start(unit: str, state: UnitState | None = None) -> Commands:
    """Start a unit without waiting for it. Noop where `state` (an entry of `on_host.units`) says that it works.

    A unit that failed before is started again.
    """
    if state is not None and working(dict(state)):
        host().noop(f"{unit} is {state['ActiveState']} already")
        return
    yield StringCommand("systemctl start --no-block --", QuoteString(unit))


def ensure(
    unit: str, state: UnitState, running: bool = True, enabled: bool = True, restart_because: Iterable[str] = ()
) -> Commands:
    """Bring a service to running and enabled (or not), by one command; noop where it is so.

    `state`: its entry of `on_host.units`. `restart_because`: reasons to restart it if it runs, usually of
    `kit.signals.reasons_to_restart`, or that this very operation has just changed its files. Waits for the start.
    """
    reasons = list(restart_because)
    active = state["ActiveState"] in ("active", "activating", "reloading")
    is_enabled = state["UnitFileState"] in ("enabled", "enabled-runtime")
    steps: list[str] = []
    if enabled != is_enabled:
        steps.append("enable" if enabled else "disable")
    if running and (reasons or not active):
        steps.append("restart" if active else "start")
    if not running and active:
        steps.append("stop")
    if not steps:
        host().noop(f"{unit} is {state['ActiveState']}, {state['UnitFileState'] or 'not installed'}")
        return
    for reason in reasons:
        host().log(f"{unit}: {reason}", logger.debug)
    name = QuoteString(unit)
    bits: list[Any] = ["systemctl daemon-reload"]
    if running and state["ActiveState"] == "failed":
        bits += ["&& systemctl reset-failed --", name]  # else a start limit of before would forbid the start
    for step in steps:
        bits += [f"&& systemctl {step} --", name]
    yield StringCommand(*bits)


def join(
    unit: str,
    title: str,
    status_file: str | None = None,
    state: UnitState | None = None,
    wait_seconds: float = 6 * 3600,
) -> Commands:
    """Wait until a unit's work has ended, printing a line of progress every ten seconds or so.

    The unit's program may keep a JSON object in `status_file` (replaced by rename): "phase" (text), "done", "total",
    "unit" (of those two, "bytes" if absent), "rate" (per second), "eta" (seconds). What it leaves out is not printed.

    Survives a lost connection by connecting again. Fails this host with the last lines of the journal when the unit
    failed, and when it works longer than `wait_seconds`. The unit goes on after Ctrl-C. A unit that ended well and one
    never started look alike to systemd: whether the work is done is for the role's own facts to say. Noop where
    `state` says that the unit does not work and has not failed.
    """
    if state is not None and not working(dict(state)) and state["ActiveState"] != "failed":
        host().noop(f"{unit} is not at work")
        return
    yield Join(unit, title, status_file, wait_seconds)


class Join(PyinfraCommand):
    """The waiting of `join`, as a command."""

    def __init__(self, unit: str, title: str, status_file: str | None, wait_seconds: float):
        super().__init__()
        self.unit, self.title, self.status_file, self.wait_seconds = unit, title, status_file, wait_seconds

    def __repr__(self) -> str:
        return f"Join({self.unit})"

    def execute(self, state: State, host: Host, connector_arguments: Any) -> bool:
        try:
            self._wait(host, {**connector_arguments, "_timeout": int(PROGRESS_SECONDS) + 30})
        except Refusal as refusal:
            report(host, refusal)
            return False
        return True

    def _wait(self, host: Host, connector_arguments: dict[str, Any]) -> None:
        began = heard = time.monotonic()
        seconds = 0.0  # the first question is answered at once: it shows what the unit is doing
        while True:
            found = self._ask(host, connector_arguments, seconds)
            now = time.monotonic()
            if found is None:
                if now - heard > GIVE_UP_SECONDS:
                    raise Refusal(
                        f"{self.title}: {host.name} has not answered for {GIVE_UP_SECONDS:.0f} s; {self.unit} may "
                        "still be at work there. Fix: see why it cannot be reached, then run this again to join it"
                    )
                time.sleep(2)
                continue
            heard, seconds = now, PROGRESS_SECONDS
            self._judge(found)
            if not found["working"]:
                return
            host.log(f"{self.title}: {progress(found['status'], now - began)}", logger.info)
            if now - began > self.wait_seconds:
                raise Refusal(
                    f"{self.title}: {self.unit} is still at work after {now - began:.0f} s, wanted at most "
                    f"{self.wait_seconds:.0f} s; it goes on. Fix: journalctl -u {self.unit}, then run this again"
                )

    def _judge(self, found: Mapping[str, Any]) -> None:
        state = found["state"]
        if state["LoadState"] == "not-found":
            raise Refusal(f"{self.title}: there is no unit {self.unit} on this host. Fix: run deploy.py again")
        if not found["working"] and (state["ActiveState"] == "failed" or state["Result"] not in ("", "success")):
            raise Refusal(
                [f"{self.title}: {line}" for line in found["journal"]]
                + [
                    f"{self.title}: {self.unit} failed ({state['Result']}, exit code {state['ExecMainStatus']}), "
                    f"wanted it to end well. Fix: see the lines above, and all of them with: journalctl -u {self.unit}"
                ]
            )

    def _ask(self, host: Host, connector_arguments: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """One question; None where no answer came, and the connection has been made anew if that was possible."""
        asked = {"unit": self.unit, "status_file": self.status_file, "seconds": seconds}
        command = probe_command(_Watch.source(), asked)
        try:
            answered, output = host.run_shell_command(command, **connector_arguments)
        except Exception as error:  # paramiko, socket and gevent each have their own for a connection that is gone
            logger.debug("%s: %r", host.name, error)
            answered, output = False, None
        if answered and output is not None and output.stdout_lines:
            found = _Watch().process(output.stdout_lines)
            if isinstance(found, Malformed):
                raise Refusal(f"{self.title}: {found.problem}")
            return dict(found)
        if output is not None and output.stderr_lines:
            raise Refusal([*output.stderr_lines, f"{self.title}: cannot look at {self.unit}. Fix: see the lines above"])
        host.log(f"{self.title}: connection lost, {self.unit} goes on; connecting again", logger.warning)
        try:
            host.connector.connect()
        except (ConnectError, OSError, EOFError) as error:
            logger.debug("%s: %r", host.name, error)
        else:
            from kit.connection import mend

            mend(host)
        return None


def progress(status: Mapping[str, Any] | None, waited: float) -> str:
    """One line of a unit's status; only what the status says, and nothing it does not.

    >>> progress({"phase": "hashing", "done": 5_000_000_000, "total": 20_000_000_000, "rate": 250e6, "eta": 60}, 9.0)
    'hashing, 5.0 of 20.0 GB (25 %), 250.0 MB/s, 1 min left'
    >>> progress(None, 125.0)
    'at work for 2 min 5 s'
    """
    if not status:
        return f"at work for {duration(waited)}"
    parts = [str(status["phase"])] if status.get("phase") else []
    unit, done, total = status.get("unit", "bytes"), status.get("done"), status.get("total")
    if done is not None and total:
        parts.append(f"{_amount(done, total, unit)} ({100 * done // total:.0f} %)")
    elif done is not None:
        parts.append(_one(done, unit))
    if status.get("rate"):
        parts.append(f"{_one(status['rate'], unit)}/s")
    if status.get("eta") is not None:
        parts.append(f"{duration(status['eta'])} left")
    return ", ".join(parts) or f"at work for {duration(waited)}"


_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


def _scale(number: float) -> tuple[float, str]:
    return next(((size, name) for size, name in _BYTES if number >= size), _BYTES[-1])


def _one(number: float, unit: str) -> str:
    if unit != "bytes":
        return f"{number:g} {unit}"
    size, name = _scale(number)
    return f"{number / size:.1f} {name}"


def _amount(done: float, total: float, unit: str) -> str:
    if unit != "bytes":
        return f"{done:g} of {total:g} {unit}"
    size, name = _scale(total)
    return f"{done / size:.1f} of {total / size:.1f} {name}"


def duration(seconds: float) -> str:
    """
    >>> [duration(s) for s in (0.4, 59, 60, 125, 7260)]
    ['0 s', '59 s', '1 min', '2 min 5 s', '2 h 1 min']
    """
    whole = int(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{rest} s"
