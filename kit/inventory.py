"""The owner's data of a host, without what belongs to pyinfra itself.

`python -m kit.inventory INVENTORY [--data KEY=VALUE]...`, run from the project's root, prints {host name: {"groups",
"data", "ssh", "address"}} as JSON. Other programs read an inventory through that child process (`load`), because
importing pyinfra's CLI patches the standard library for gevent.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePath
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
    return {key: _plain(value) for key, value in data.items()}, theirs


@dataclass(frozen=True)
class HostEntry:
    """One host of an inventory: its groups, our keys, and pyinfra's that are set (ssh_user, ssh_port, _sudo, ...).

    Without an `ssh_hostname` among them, `name` is the address. address: by which other hosts reach it, see
    `peer_address`; "" for the only host of an inventory.
    """

    name: str
    groups: tuple[str, ...]
    data: Mapping[str, Any]
    ssh: Mapping[str, Any]
    address: str = ""


class InventoryError(Exception):
    """An inventory that cannot be read; the text ends with `Fix: ...`."""


def load(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, HostEntry]:
    """The hosts of an inventory by name, read in a child process. `overrides`: KEY=VALUE, as pyinfra's --data.

    Raises InventoryError for an inventory that cannot be read or has no host, and for an override that is none.
    """
    done = subprocess.run(
        [sys.executable, "-m", "kit.inventory", str(Path(path).resolve()), *(f"--data={text}" for text in overrides)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise InventoryError(done.stderr.strip())
    entries = {
        name: HostEntry(name, tuple(entry["groups"]), entry["data"], entry["ssh"], entry["address"])
        for name, entry in json.loads(done.stdout).items()
    }
    return entries


def limited(entries: Mapping[str, HostEntry], limits: Sequence[str]) -> dict[str, HostEntry]:
    """Those that one of the limits names, each a host pattern or a group; all where there is no limit.

    Raises InventoryError for a limit that matches none of them.
    """
    chosen: set[str] = set()
    for limit in limits:
        matching = {name for name, entry in entries.items() if fnmatch(name, limit) or limit in entry.groups}
        if not matching:
            raise InventoryError(
                f"no host of the inventory matches {limit!r}, wanted one of {', '.join(entries)} or a group of theirs. "
                "Fix: give another --limit"
            )
        chosen |= matching
    return {name: entry for name, entry in entries.items() if not limits or name in chosen}


def peer_address(name: str, data: Mapping[str, Any], ssh: Mapping[str, Any]) -> str:
    """The IPv4 address by which other hosts reach this one; where the controller knows none, the name it asked for."""
    asked = str(data.get("weights_address") or ssh.get("ssh_hostname") or name)
    try:
        return str(socket.getaddrinfo(asked, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return asked


def host_neighbours(host: Host) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, address, data) of every host of the inventory that a host is in, limited or not, in its order.

    A host by itself has none: nobody's address is asked for.
    """
    hosts = [(other.name, *_divided(other)) for other in host.state.inventory]
    if len(hosts) < 2:
        return []
    return [(name, peer_address(name, data, ssh), data) for name, data, ssh in hosts]


def neighbours(entries: Mapping[str, HostEntry]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """The same of all that `load` read."""
    return [(entry.name, entry.address, entry.data) for entry in entries.values() if entry.address]


def _overrides(texts: Iterable[str]) -> dict[str, Any]:
    """--data of the command line, by pyinfra's own reading of a value. Raises InventoryError."""
    from pyinfra_cli.util import parse_cli_arg

    data = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InventoryError(f"--data {text}: found no key and value, wanted KEY=VALUE. Fix: --data profile=ep4")
        data[key] = parse_cli_arg(value)
    return data


def _read(path: str, overrides: dict[str, Any]) -> dict[str, Any]:
    from pyinfra.api.config import Config
    from pyinfra.api.state import State
    from pyinfra.context import ctx_config, ctx_inventory, ctx_state
    from pyinfra_cli.inventory import make_inventory

    state = State()
    state.cwd = str(Path.cwd())
    config = Config()  # type: ignore[no-untyped-call]
    with ctx_state.use(state), ctx_config.use(config):
        inventory = make_inventory(path, override_data=overrides, cwd=state.cwd)
        ctx_inventory.set(inventory)  # type: ignore[no-untyped-call]
        state.init(inventory, config)
        hosts = {}
        for host in inventory:
            data, theirs = _divided(host)
            address = peer_address(host.name, data, theirs) if len(inventory) > 1 else ""
            groups = list(dict.fromkeys(host.groups))
            hosts[host.name] = {"groups": groups, "data": data, "ssh": theirs, "address": address}
        return hosts


def _plain(value: Any) -> Any:
    """A value as other programs are told it, in a deploy too, so that all judge the same."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, PurePath) else value


def _untold(value: Any) -> Any:
    raise InventoryError(
        f"found {value!r}, wanted text, numbers, lists or tables only. "
        "Fix: remove it, or let its name begin with two underscores if only the file itself uses it"
    )


def _place(cause: BaseException, path: str) -> str:
    """File and line of what an inventory's file raises, its group data's too; else the inventory."""
    last = traceback.extract_tb(getattr(cause, "_traceback", cause.__traceback__))[-1]
    name, line = last.filename, last.lineno
    if isinstance(cause, SyntaxError):
        name, line = cause.filename or path, cause.lineno
    return f"{name}:{line}" if Path(name).is_relative_to(Path(path).parent) else path


def main(arguments: list[str]) -> int:
    """Print an inventory as JSON; 0, or 1 with one line on stderr where it cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m kit.inventory", description=main.__doc__)
    parser.add_argument("inventory", metavar="INVENTORY")
    parser.add_argument("--data", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    path = options.inventory
    if not Path(path).is_file():
        print(f"{path}: no such file, wanted an inventory. Fix: name a file under inventory/", file=sys.stderr)
        return 1
    try:
        with contextlib.redirect_stdout(sys.stderr):
            read = _read(path, _overrides(options.data))
        if not read:
            raise InventoryError(
                "found no host in it, wanted one at least. "
                'Fix: hosts = ["gpu-1"], a list of names or of (name, settings)'
            )
        print(json.dumps(read, default=_untold))
    except InventoryError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        cause = getattr(error, "exception", error)  # pyinfra wraps what an inventory file raises
        print(
            f"{_place(cause, path)}: {type(cause).__name__}: {cause}; wanted an inventory that pyinfra can read. "
            f"Fix: pyinfra {path} debug-inventory",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
