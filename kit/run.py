"""What every run of a verb (deploy.py, ...) needs first: `run.begin()`, the verb's first line after its imports.

An empty `--limit` cannot be mended here: pyinfra then runs no deploy code at all, warns "No host matches found" and
exits 0. Scripts must look for that warning.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from pyinfra import context
from pyinfra.api.host import Host
from pyinfra.api.state import BaseStateCallback, State

from kit import connection

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
        print("Stopped by Ctrl-C. Units started on the hosts go on; run again to join them.", file=sys.stderr)
        # pyinfra disconnects through the same pool in which commands still run, and would wait for them to end.
        state.pool.kill(block=False)
        sys.exit(INTERRUPTED)

    return stop


def begin() -> None:
    """Once per host: mend its connection, and make exit codes tell: Ctrl-C 130 (pyinfra: 0, and only once all
    running commands have ended), a failed host 1. A second Ctrl-C leaves at once."""
    state = context.ctx_state.get()  # type: ignore[no-untyped-call]
    if not any(isinstance(handler, _Failures) for handler in state.callback_handlers):
        state.add_callback_handler(_Failures())
        signal.signal(signal.SIGINT, _interrupted(state))
    connection.prepare()
