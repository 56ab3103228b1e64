"""Run an operation without a host: arguments and facts in, commands and noop text out.

    result = prepare(serve, {"plan": plan}, facts={ServiceFacts: {"files": {...}, "units": {...}}})
    assert result.commands == ["systemctl daemon-reload && ..."]
    assert result.noop == []

Facts are what the probe's program would return, or a function of the probe's arguments that returns it. An operation
that reads a fact not given here raises KeyError.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pyinfra import context
from pyinfra.api.command import StringCommand
from pyinfra.api.config import Config
from pyinfra.api.state import StateStage

from kit.files import Absent, Directory, File, Item, Link, _Payload
from kit.refusal import Refused


def file(
    content: str | bytes = "", mode: str = "644", user: str = "root", group: str = "root", changed: float = 0.0
) -> dict[str, Any]:
    """State of a file, as `on_host.files` gives it."""
    data = content.encode() if isinstance(content, str) else content
    return {
        "kind": "file",
        "mode": mode,
        "user": user,
        "group": group,
        "bytes": len(data),
        "modified": changed,
        "changed": changed,
        "sha256": hashlib.sha256(data).hexdigest(),
        "target": None,
    }


def directory(mode: str = "755", user: str = "root", group: str = "root", changed: float = 0.0) -> dict[str, Any]:
    """State of a directory."""
    return {**file(b"", mode, user, group, changed), "kind": "directory", "bytes": 4096, "sha256": None}


def link(target: str, changed: float = 0.0) -> dict[str, Any]:
    """State of a symbolic link."""
    return {**file(target, "777", changed=changed), "kind": "link", "sha256": None, "target": target}


def unit(
    active: str = "active", enabled: str = "enabled", started: float | None = 1000.0, **more: str
) -> dict[str, Any]:
    """State of a systemd unit, as `on_host.units` gives it."""
    running = active in ("active", "activating", "reloading")
    return {
        "LoadState": "loaded",
        "ActiveState": active,
        "SubState": {"active": "running", "activating": "start", "inactive": "dead"}.get(active, active),
        "Result": "exit-code" if active == "failed" else "success",
        "UnitFileState": enabled,
        "NeedDaemonReload": "no",
        "ExecMainStatus": "1" if active == "failed" else "0",
        "InvocationID": "0" * 32 if running else "",
        "started": started if running else None,
        **more,
    }


def as_wanted(items: Iterable[Item], changed: float = 0.0) -> dict[str, dict[str, Any] | None]:
    """A state of the paths in which nothing needs to be done."""
    states: dict[str, dict[str, Any] | None] = {}
    for item in items:
        match item:
            case File():
                states[item.path] = file(item.data, item.mode, item.user, item.group, changed)
            case Directory():
                states[item.path] = directory(item.mode, item.user, item.group, changed)
            case Link():
                states[item.path] = link(item.target, changed)
            case Absent():
                states[item.path] = None
    return states


@dataclass
class Result:
    """What an operation would do. `commands`: as text, `files`: what `kit.files` would bring about, by path."""

    commands: list[str] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)
    noop: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)


class _Host:
    name = "test"
    print_prefix = "[test] "
    in_op = False

    def __init__(self, facts: Mapping[Any, Any], result: Result, data: Mapping[str, Any]):
        self._facts, self._result = facts, result
        self.data = SimpleNamespace(**data)
        self.state = SimpleNamespace(
            config=Config(),  # type: ignore[no-untyped-call]
            current_stage=StateStage.Execute,
            check_for_changes=False,
            failed_hosts=set(),
            active_hosts={self},
            is_executing=True,
        )

    def get_fact(self, fact: type, **arguments: Any) -> Any:
        given = self._facts[fact]
        if "sent" in arguments:
            arguments = arguments["sent"].arguments
        return given(**arguments) if callable(given) else given

    def noop(self, description: str) -> None:
        self._result.noop.append(description)

    def log(self, message: str, log_func: Callable[[str], Any] | None = None) -> None:
        self._result.log.append(message)


def prepare(
    operation: Any,
    arguments: Mapping[str, Any] | None = None,
    facts: Mapping[Any, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Result:
    """Run an operation's generator (`kit.role.operation`, or a plain one) as in Execute, against these facts."""
    result = Result()
    host = _Host(facts or {}, result, data or {})
    generator = getattr(operation, "_inner", operation)
    with context.ctx_state.use(host.state), context.ctx_host.use(host):
        for command in generator(**(arguments or {})):
            _record(command, result)
    return result


def _record(command: Any, result: Result) -> None:
    if isinstance(command, Refused):
        result.refused.extend(command.refusal.lines())
        return
    payload = command.connector_arguments.get("_stdin") if isinstance(command, StringCommand) else None
    if isinstance(payload, _Payload):
        result.files.update({item.path: item for item in payload.items})
        result.commands.append("files: " + shlex.join(item.path for item in payload.items))
    else:
        result.commands.append(str(command) if isinstance(command, (StringCommand, str)) else repr(command))
