"""What every run of pyinfra needs first: `run.guard()` in config.py, `run.begin()` as the first line of a verb
(deploy.py, ...) after its imports.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from pyinfra import context
from pyinfra.api.state import BaseStateCallback, State

from kit import connection

if TYPE_CHECKING:
    from pyinfra.api.config import Config
    from pyinfra.api.host import Host
    from pyinfra.api.inventory import Inventory

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class _Failures(BaseStateCallback):
    """Under --no-wait pyinfra 3.10 forgets which hosts failed in an operation, and exits 0."""

    @staticmethod
    def operation_host_error(
        state: State, host: Host, op_hash: str, retry_count: int = 0, max_retries: int = 0
    ) -> None:
        if not state.get_op_data_for_host(host, op_hash).global_arguments["_ignore_errors"]:
            state.failed_hosts.add(host)


def _interrupted(state: State) -> Callable[[int, FrameType | None], None]:
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping:  # disconnecting hangs: a dead link
            os._exit(INTERRUPTED)
        stopping = True
        atexit.register(_leave)  # a command killed below may count as a failed host before the exit is heard
        print("Stopped by Ctrl-C. Units started on the hosts go on; run again to join them.", file=sys.stderr)
        logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # it prints a traceback of what is closed under it
        # pyinfra disconnects through the same pool in which commands still run, and would wait for them to end.
        state.pool.kill(block=False)
        sys.exit(INTERRUPTED)

    return stop


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def _watch(state: State) -> None:
    """Make exit codes tell: Ctrl-C 130 (pyinfra: 0, and only once all running commands have ended), a failed host 1.
    A second Ctrl-C leaves at once. Safe to call again."""
    if not any(isinstance(handler, _Failures) for handler in state.callback_handlers):
        state.add_callback_handler(_Failures())  # type: ignore[no-untyped-call]
        signal.signal(signal.SIGINT, _interrupted(state))


def guard() -> None:
    """Refuse a run that is for no host: pyinfra exits 0 where `--limit` or `--exclude` leave none, and where the
    inventory's file is missing or names none. It then runs no deploy code at all, but config.py it reads before all.
    """
    from pyinfra_cli.exceptions import CliError  # its package patches the standard library

    state: State = context.ctx_state.get()  # type: ignore[no-untyped-call]
    initialise = state.init

    def init(inventory: Inventory, config: Config | None, initial_limit: list[Host] | None = None) -> None:
        names = [host.name for host in inventory]
        if not names:
            raise CliError(
                "found no host in the inventory, wanted one at least. "
                "Fix: name a file under inventory/ that is there, and a host in it"
            )
        if initial_limit is not None and not initial_limit:
            raise CliError(
                f"found no host for --limit and --exclude, wanted one of {', '.join(names)} or a group of theirs. "
                "Fix: give another --limit"
            )
        initialise(inventory, config, initial_limit=initial_limit)
        _watch(state)  # Ctrl-C counts from here on, while hosts are being connected to as well

    state.init = init  # type: ignore[method-assign]


def begin() -> None:
    """Once per host: mend its connection, and see that exit codes tell, where no config.py did."""
    _watch(context.ctx_state.get())  # type: ignore[no-untyped-call]
    connection.prepare()
