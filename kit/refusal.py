"""Fail one host with clear lines while the others go on.

In pyinfra an exception raised by deploy code, in Prepare or inside an operation, stops the run for all hosts. Here a
Refusal raised under `kit.role.role` or `kit.role.operation` fails its own host only: its problems are printed one a
line, nothing more is added or executed on that host, and pyinfra exits 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pyinfra import logger
from pyinfra.api.command import PyinfraCommand
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.output import format_text

from kit import command

if TYPE_CHECKING:
    from pyinfra.api.host import Host
    from pyinfra.api.state import State


class Refusal(Exception):
    """This host is not touched any further. `problems`: objects whose str() is one clear line ending in `Fix: ...`."""

    def __init__(self, problems: Iterable[object] | object):
        if isinstance(problems, (str, Exception)) or not isinstance(problems, Iterable):
            problems = [problems]
        self.problems: list[object] = list(problems)
        super().__init__("; ".join(self.lines()))

    def lines(self) -> list[str]:
        """The problems as text, each on one line."""
        return [" ".join(str(problem).split("\n")).strip() for problem in self.problems]


def refuse(problems: Iterable[object] | object) -> None:
    """Refuse this host for these problems; nothing happens where there are none. Raises Refusal."""
    refusal = Refusal(problems)
    if refusal.problems:
        raise refusal


def warn(problems: Iterable[object]) -> None:
    """Print problems that are no reason to refuse this host, one a line; pyinfra counts them at its prompt."""
    current = command.host()
    for line in Refusal(problems).lines():
        current.state.increment_warning_counter()
        logger.warning(f"{current.print_prefix}{format_text('Warning: ', 'yellow')}{line}")


def is_refused(host: Host) -> bool:
    """Whether this host has failed already, by a refusal or otherwise."""
    return host in host.state.failed_hosts


def report(host: Host, refusal: Refusal) -> None:
    """Print a refusal, one problem a line, on stderr."""
    for line in refusal.lines():
        logger.error(f"{host.print_prefix}{format_text('Refused: ', 'red')}{line}")


def fail_now(host: Host, refusal: Refusal) -> None:
    """Print a refusal and take the host out of the run, in Prepare.

    Where pyinfra is to ask the operator about failed hosts, as under --dry, `State.fail_hosts` would ask for each of
    them now; so its two sets are kept here. Raises PyinfraError, and pyinfra exits 1, when this was the last host or
    more have failed than --fail-percent allows.
    """
    report(host, refusal)
    state = host.state
    state.failed_hosts.add(host)
    state.active_hosts.discard(host)
    if state.active_hosts and state.should_raise_failed_hosts is None:
        state.fail_hosts({host})  # type: ignore[no-untyped-call]
    if not state.active_hosts:
        raise PyinfraError("no host is left to work on: nothing was changed by this step or any after it")


class Refused(PyinfraCommand):
    """A command that sends nothing: it prints a refusal and fails its operation on this host."""

    def __init__(self, refusal: Refusal):
        super().__init__()
        self.refusal = refusal

    def __repr__(self) -> str:
        return f"Refused({'; '.join(self.refusal.lines())})"

    def execute(self, state: State, host: Host, connector_arguments: Any) -> bool:
        report(host, self.refusal)
        return False
