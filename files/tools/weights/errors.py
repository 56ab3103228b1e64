"""How the agent ends when it cannot go on. The exit codes are sysexits.h's where it has a fitting one.

systemd does not restart the unit for the permanent ones (RestartPreventExitStatus): trying again would only do the
same again, until the owner has followed the Fix.
"""

from __future__ import annotations


class AgentError(Exception):
    """What went wrong, in one line: what was found, what was wanted, and `Fix: ...`."""

    code = 70
    permanent = True


class Misconfigured(AgentError):
    """Configuration or manifest that cannot be trusted, or a program that is not installed."""

    code = 78


class WrongContent(AgentError):
    """Bytes that are not the manifest's, from both transports, or in a published snapshot."""

    code = 65


class NotOnHub(AgentError):
    """The hub answers, and has no such repository, revision or file."""

    code = 66


class Refused(AgentError):
    """The hub wants a token, or does not accept the one it was given."""

    code = 77


class NoRoom(AgentError):
    """The file system is too small, full, not writable, or not a local one."""

    code = 73


class HubUnreachable(AgentError):
    """No answer, or no bytes any more: systemd tries again, with everything that has arrived kept."""

    code = 69
    permanent = False


class TransportFailed(AgentError):
    """aria2 ended by itself; systemd starts afresh."""

    code = 75
    permanent = False


class Stopped(AgentError):
    """Asked to stop (SIGTERM, SIGINT). Everything that has arrived is kept."""

    code = 143
    permanent = False


PERMANENT = tuple(sorted(kind.code for kind in (AgentError, Misconfigured, WrongContent, NotOnHub, Refused, NoRoom)))
