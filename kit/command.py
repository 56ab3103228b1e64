"""Plain commands for operations of roles, and the host they are for: all that a role needs of pyinfra's own names."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pyinfra import context
from pyinfra.api.command import QuoteString, StringCommand

if TYPE_CHECKING:
    from pyinfra.api.host import Host

__all__ = ["QuoteString", "StringCommand", "host"]


def host() -> Host:
    """The current host. In operations: `.name`, `.noop(text)`, `.log(text)`; its data by `kit.inventory.node_data`."""
    return cast("Host", context.ctx_host.get())  # type: ignore[no-untyped-call]
