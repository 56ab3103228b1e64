"""The owner's data of a host, without what belongs to pyinfra itself.

`python -m kit.inventory INVENTORY`, run from the project's root, prints {host name: {"groups", "data", "ssh"}} as JSON.
Other programs read an inventory through that child process (`load`), because importing pyinfra's CLI patches the
standard library for gevent.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyinfra.api.host import Host

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def pyinfra_keys() -> frozenset[str]:
    """Keys of host data that mean something to pyinfra: its connectors' settings and its global arguments."""
    from pyinfra.api.arguments import all_argument_meta
    from pyinfra.api.connectors import get_all_connectors

    known = get_all_connectors()  # type: ignore[no-untyped-call]
    connectors = {key for connector in known.values() for key in connector.data_meta}
    return frozenset(connectors | set(all_argument_meta))


def node_data(host: Host) -> dict[str, Any]:
    """All data of a host (--data, host, groups, all), less what is pyinfra's: what is left is ours, or unknown."""
    return _divided(host)[0]


def _divided(host: Host) -> tuple[dict[str, Any], dict[str, Any]]:
    """A host's data, less pyinfra's, and pyinfra's."""
    data: dict[str, Any] = host.data.dict()  # type: ignore[no-untyped-call]
    theirs = {key: data.pop(key) for key in pyinfra_keys() & data.keys()}
    return data, theirs


@dataclass(frozen=True)
class HostEntry:
    """One host of an inventory: its groups, our keys, and pyinfra's that are set (ssh_user, ssh_port, _sudo, ...).

    Without an `ssh_hostname` among them, `name` is the address.
    """

    name: str
    groups: tuple[str, ...]
    data: Mapping[str, Any]
    ssh: Mapping[str, Any]


class InventoryError(Exception):
    """An inventory that cannot be read; the text ends with `Fix: ...`."""


def load(path: str | Path, limit: str | None = None) -> dict[str, HostEntry]:
    """The hosts of an inventory by name, read in a child process. `limit`: a host pattern or a group.

    Raises InventoryError where the inventory cannot be read, or the limit matches no host of it.
    """
    done = subprocess.run(
        [sys.executable, "-m", "kit.inventory", str(Path(path).resolve())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise InventoryError(done.stderr.strip())
    entries = {
        name: HostEntry(name, tuple(entry["groups"]), entry["data"], entry["ssh"])
        for name, entry in json.loads(done.stdout).items()
    }
    if limit is None:
        return entries
    limited = {name: entry for name, entry in entries.items() if fnmatch(name, limit) or limit in entry.groups}
    if not limited:
        raise InventoryError(
            f"no host of {path} matches {limit!r}, wanted one of {', '.join(entries)} or a group of theirs. "
            "Fix: give another --limit"
        )
    return limited


def override(text: str) -> tuple[str, Any]:
    """One --data KEY=VALUE, as pyinfra reads it: a Python literal, else text. Raises InventoryError."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InventoryError(f"--data {text}: found no key and value, wanted KEY=VALUE. Fix: --data profile=ep4")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _read(path: str) -> dict[str, Any]:
    from pyinfra.api.config import Config
    from pyinfra.api.state import State
    from pyinfra.context import ctx_config, ctx_inventory, ctx_state
    from pyinfra_cli.inventory import make_inventory

    state = State()
    state.cwd = str(Path.cwd())
    config = Config()  # type: ignore[no-untyped-call]
    with ctx_state.use(state), ctx_config.use(config):
        inventory = make_inventory(path, override_data={}, cwd=state.cwd)
        ctx_inventory.set(inventory)  # type: ignore[no-untyped-call]
        state.init(inventory, config)
        hosts = {}
        for host in inventory:
            data, theirs = _divided(host)
            hosts[host.name] = {"groups": list(dict.fromkeys(host.groups)), "data": data, "ssh": theirs}
        return hosts


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} cannot be told to other programs, wanted text, numbers, lists or tables")


def main(arguments: list[str]) -> int:
    """Print an inventory as JSON; 0, or 1 with one line on stderr where it cannot be read."""
    if len(arguments) != 1:
        print("usage: python -m kit.inventory INVENTORY", file=sys.stderr)
        return 2
    (path,) = arguments
    if not Path(path).is_file():
        print(f"{path}: no such file, wanted an inventory. Fix: name a file under inventory/", file=sys.stderr)
        return 1
    try:
        with contextlib.redirect_stdout(sys.stderr):
            read = _read(path)
        print(json.dumps(read, default=_plain))
    except Exception as error:
        cause = getattr(error, "exception", error)  # pyinfra wraps what an inventory file raises
        where = f"{cause.filename}:{cause.lineno}: " if isinstance(cause, SyntaxError) else ""
        print(
            f"{path}: {where}{type(cause).__name__}: {cause}; wanted an inventory that pyinfra can read. "
            f"Fix: pyinfra {path} debug-inventory",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
