"""Files, links and directories on a host: atomic, in one command however many, secrets unseen.

pyinfra's uploads go straight to the destination and are world-readable for a moment. Here content travels on standard
input to a program on the host that completes each file beside its destination (mode 600, fsync, owner, mode) and
renames it. Content is never in an argument, in -v, -vv, -vvv, --debug or --json output, and secrets not in --diff.

Everything here is for use inside an operation: `yield from files.apply([...], found["files"])`, with the state from
a Probe whose program calls `on_host.files(paths)`. What is as wanted already is left out; all as wanted is a noop.
A symbolic link in the last place of a path is replaced, not followed. With `_su_user` and a password standard input
is taken (pyinfra's askpass): use sudo.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import zlib
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyinfra import context, logger
from pyinfra.api.command import StringCommand
from pyinfra.api.state import StateStage

from kit.command import host
from kit.probe import Probe
from kit.program import act_command

State = Mapping[str, Mapping[str, Any] | None]

_PROGRAM = Path(__file__).parent / "write_on_host.py"
_MOST_TO_DIFF = 256 * 1024  # bytes


class Item:
    """One path and how it is wanted: File, Directory, Link or Absent."""

    path: str

    def unlike(self, found: Mapping[str, Any] | None) -> str:
        """Why this state (one entry of `on_host.files`) is not the wanted one; "" if it is."""
        raise NotImplementedError

    def sent(self) -> dict[str, Any]:
        """What the program on the host is told."""
        raise NotImplementedError


@dataclass(frozen=True)
class File(Item):
    """A file and its content. `mode` in octal digits, "644". A `secret` is never shown, in a diff neither."""

    path: str
    content: str | bytes = field(repr=False)
    mode: str = "644"
    user: str = "root"
    group: str = "root"
    secret: bool = False

    @property
    def data(self) -> bytes:
        """The content as bytes; text is UTF-8."""
        return self.content.encode() if isinstance(self.content, str) else self.content

    def unlike(self, found: Mapping[str, Any] | None) -> str:
        if found is None:
            return "missing"
        if found["kind"] != "file":
            return f"is a {found['kind']}, wanted a file"
        if found["sha256"] != hashlib.sha256(self.data).hexdigest():
            return "other content"
        return _owner_and_mode(self, found)

    def sent(self) -> dict[str, Any]:
        content = base64.b64encode(self.data).decode()
        return {
            "kind": "file",
            "path": self.path,
            "content": content,
            "mode": self.mode,
            "user": self.user,
            "group": self.group,
        }


@dataclass(frozen=True)
class Directory(Item):
    """A directory; those above it are made with mode 755 where missing."""

    path: str
    mode: str = "755"
    user: str = "root"
    group: str = "root"

    def unlike(self, found: Mapping[str, Any] | None) -> str:
        if found is None:
            return "missing"
        if found["kind"] != "directory":
            return f"is a {found['kind']}, wanted a directory"
        return _owner_and_mode(self, found)

    def sent(self) -> dict[str, Any]:
        return {"kind": "directory", "path": self.path, "mode": self.mode, "user": self.user, "group": self.group}


@dataclass(frozen=True)
class Link(Item):
    """A symbolic link, switched by rename: it points to the old target or to the new one, never nowhere."""

    path: str
    target: str

    def unlike(self, found: Mapping[str, Any] | None) -> str:
        if found is None:
            return "missing"
        if found["kind"] != "link":
            return f"is a {found['kind']}, wanted a link"
        return "" if found["target"] == self.target else f"points to {found['target']}, wanted {self.target}"

    def sent(self) -> dict[str, Any]:
        return {"kind": "link", "path": self.path, "target": self.target}


@dataclass(frozen=True)
class Absent(Item):
    """Nothing under this path. A directory is removed only as a `tree`, with all that is in it."""

    path: str
    tree: bool = False

    def unlike(self, found: Mapping[str, Any] | None) -> str:
        return "" if found is None else f"is there ({found['kind']}), wanted nothing"

    def sent(self) -> dict[str, Any]:
        return {"kind": "absent", "path": self.path, "tree": self.tree}


Commands = Generator[StringCommand, None, None]


def _owner_and_mode(item: File | Directory, found: Mapping[str, Any]) -> str:
    if int(found["mode"], 8) != int(item.mode, 8):
        return f"mode {found['mode']}, wanted {item.mode}"
    owner, wanted = f"{found['user']}:{found['group']}", f"{item.user}:{item.group}"
    return "" if owner == wanted else f"owner {owner}, wanted {wanted}"


def compare(state: State, wanted: Iterable[Item]) -> dict[str, str]:
    """What is not as wanted: path -> reason. `state` is what `on_host.files` returned for (at least) these paths.

    Raises KeyError where the state does not speak of a path: the probe did not look at it.
    """
    return {item.path: reason for item in wanted if (reason := item.unlike(state[item.path]))}


class _Payload:
    """Standard input of the program on the host; never printable."""

    def __init__(self, items: list[Item]):
        self.items = items

    def readlines(self) -> list[str]:
        sent = json.dumps([item.sent() for item in self.items]).encode()
        return [base64.b64encode(zlib.compress(sent)).decode()]

    def __repr__(self) -> str:
        return f"<{len(self.items)} items>"


class _Contents(Probe):
    program = "contents_on_host.py"


def apply(wanted: Iterable[Item], state: State | None = None) -> Commands:
    """Bring these paths to what is wanted, by one command; without a state all of them are written.

    Every new file and link is complete on disk before the first appears; each appears by one rename. Parents are made.
    Raises ValueError for a path that is not absolute and normal.
    """
    items = list(wanted)
    for item in items:
        if not item.path.startswith("/") or item.path != str(Path(item.path)) or "/../" in item.path + "/":
            raise ValueError(f"{item.path!r} is not an absolute path without . and .. in it")
    if state is not None:
        reasons = compare(state, items)
        if items and not reasons:
            host().noop(f"{', '.join(item.path for item in items)}: as wanted")
        items = [item for item in items if item.path in reasons]
    if not items:
        return
    _show_difference(items)
    yield act_command(_PROGRAM, {}, shown=tuple(item.path for item in items), _stdin=_Payload(items))


def write_many(wanted: Iterable[File], state: State | None = None) -> Commands:
    """Write these files; see `apply`."""
    yield from apply(wanted, state)


def write(
    path: str,
    content: str | bytes,
    mode: str = "644",
    user: str = "root",
    group: str = "root",
    secret: bool = False,
    state: State | None = None,
) -> Commands:
    """Write one file; see `apply`."""
    yield from apply([File(path, content, mode, user, group, secret)], state)


def link(path: str, target: str, state: State | None = None) -> Commands:
    """Point a symbolic link to a target by rename; see `apply`."""
    yield from apply([Link(path, target)], state)


def directory(
    path: str, mode: str = "755", user: str = "root", group: str = "root", state: State | None = None
) -> Commands:
    """Make a directory, or give it its owner and mode; see `apply`."""
    yield from apply([Directory(path, mode, user, group)], state)


def remove(path: str, tree: bool = False, state: State | None = None) -> Commands:
    """Remove a file or link, or a whole `tree`; see `apply`."""
    yield from apply([Absent(path, tree)], state)


def _show_difference(items: list[Item]) -> None:
    """Under --diff, print what changes in text files, once a run. Costs one more command, under --diff only."""
    state = context.ctx_state.get()  # type: ignore[no-untyped-call]
    if not state.config.DIFF or (state.current_stage >= StateStage.Execute and state.check_for_changes):
        return
    current = host()
    shown = [item for item in items if isinstance(item, File) and not item.secret and len(item.data) <= _MOST_TO_DIFF]
    before: dict[str, str | None] = {}
    if shown:
        before = _Contents.read(paths=[item.path for item in shown], up_to=_MOST_TO_DIFF)
    for item in items:
        if item not in shown:
            hidden = " (secret, not shown)" if isinstance(item, File) and item.secret else ""
            current.log(f"{item.path}: will change{hidden}", logger.info)
            continue
        assert isinstance(item, File)
        try:
            after = item.data.decode()
        except UnicodeDecodeError:
            current.log(f"{item.path}: will change (not text)", logger.info)
            continue
        old = before[item.path]
        named = item.path if old is not None else "/dev/null"
        for line in difflib.unified_diff((old or "").splitlines(), after.splitlines(), named, item.path, lineterm=""):
            current.log(line, logger.info)
