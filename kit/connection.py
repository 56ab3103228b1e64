"""The SSH connection of a host: mend its socket, and count the commands that go over it.

paramiko never sets TCP_NODELAY, so that each command waits about 40 ms for a delayed acknowledgement, and its
keepalive expects no answer, so that a silently dead link hangs for ever.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from typing import Any

from pyinfra import logger
from pyinfra.api.host import Host
from pyinfra.api.state import BaseStateCallback, State

from kit.command import host

COUNT_COMMANDS = "KIMI_NODES_COUNT_COMMANDS"

# A dead link is noticed after 15 + 3 x 5 s while idle, after 30 s while sending.
SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),  # seconds
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),  # seconds
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),  # milliseconds
)

# Host name -> stage of the run -> remote commands. Empty unless counting is on.
commands: dict[str, Counter[str]] = {}


def prepare() -> None:
    """Mend the current host's connection; once per host, safe to call again. Counts commands if asked (see `run`)."""
    current = host()
    mend(current)
    if os.environ.get(COUNT_COMMANDS):
        count(current)


def mend(of: Host) -> bool:
    """Set the socket options. False where there is no TCP socket: @local, or behind ProxyJump or ProxyCommand."""
    client = getattr(of.connector, "client", None)
    transport = client.get_transport() if client is not None else None
    connected = getattr(transport, "sock", None)
    if not hasattr(connected, "setsockopt"):
        return False
    assert connected is not None
    for level, option, value in SOCKET_OPTIONS:
        connected.setsockopt(level, option, value)
    return True


def count(of: Host) -> None:
    """Count this host's remote commands from now on, facts included; they are logged when it is disconnected.

    The connector object of this host is wrapped, because pyinfra has no callback for commands and none for facts.
    """
    if of.name in commands:
        return
    counter = commands[of.name] = Counter()
    for name in ("run_shell_command", "put_file", "get_file"):
        setattr(of.connector, name, _counted(getattr(of.connector, name), counter, of))
    if not any(isinstance(handler, _Report) for handler in of.state.callback_handlers):
        of.state.add_callback_handler(_Report())  # type: ignore[no-untyped-call]


def _counted(function: Any, counter: Counter[str], of: Host) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counter[of.state.current_stage.name] += 1
        return function(*args, **kwargs)

    return counted


class _Report(BaseStateCallback):
    @staticmethod
    def host_disconnect(state: State, host: Host) -> None:
        if host.name in commands:
            counter = commands[host.name]
            stages = ", ".join(f"{stage} {number}" for stage, number in counter.items())
            logger.info(f"{host.print_prefix}remote commands: {counter.total()} ({stages or 'none'})")
