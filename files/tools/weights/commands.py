"""The commands of weights_agent.py.

    fetch   CONFIGURATION       what the unit runs: bring the snapshot to whole, and end
    repair  [CONFIGURATION...]  the same by hand: hash what is doubtful, fetch only what is wrong
    verify  [--deep] [--json]   is every snapshot whole? by receipt in milliseconds, or by hashing all of it
    status  [--json]            what the agent is doing
    gc      [--delete]          snapshots that no configuration wants any more; shown, and removed only with --delete
    share   SHARING             what kimi-share.service runs: give to other nodes and take from them, until stopped

Without a CONFIGURATION all of /etc/kimi-nodes/weights-*.json are meant. Exit codes: see docs/weights.md.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import pwd
import signal
import sys
import time
from collections.abc import Sequence
from threading import Event
from typing import Any

from . import configuration as configurations
from . import manifest, receipt, sharing, snapshot
from .configuration import Configuration
from .errors import AgentError, Misconfigured, NoRoom, Stopped, WrongContent
from .gather import say
from .hub import source
from .status import Status, notify

CREDENTIAL = "hub-token"
CONFIGURATIONS = "/etc/kimi-nodes/weights-*.json"


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="weights_agent.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("fetch", "repair", "verify", "status", "gc", "share"):
        command = commands.add_parser(name)
        only = name in ("fetch", "share")
        command.add_argument("configurations", nargs=1 if only else "*", metavar="CONFIGURATION")
        if name == "verify":
            command.add_argument("--deep", action="store_true", help="hash every file, in parallel")
        if name in ("verify", "status"):
            command.add_argument("--json", action="store_true", help="one JSON object")
        if name == "gc":
            command.add_argument("--delete", action="store_true", help="remove what is shown")
    given = parser.parse_args(arguments)
    stopping = Event()
    signalled: list[int] = []

    def stop(number: int, _: Any) -> None:
        signalled.append(number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        if given.command == "share":
            return _share(given.configurations[0], stopping)
        paths = given.configurations or sorted(glob.glob(CONFIGURATIONS))
        if not paths:
            raise Misconfigured(f"there is no {CONFIGURATIONS}, wanted at least one. Fix: run deploy.py on this node")
        loaded = [configurations.load(path) for path in paths]
        return int(_COMMANDS[given.command](loaded, given, stopping))
    except AgentError as error:
        if isinstance(error, Stopped) and signalled:
            signal.signal(signalled[0], signal.SIG_DFL)
            os.kill(os.getpid(), signalled[0])
        print(error, file=sys.stderr, flush=True)
        return error.code


def _token_path(configuration: Configuration) -> str | None:
    """The file of the hub token: of the unit's credentials, or root's where root runs a command by hand."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    if not configuration.token_file:
        return None
    return os.path.join(folder, CREDENTIAL) if folder else configuration.token_file


def _token(configuration: Configuration) -> str | None:
    path = _token_path(configuration)
    if path is None:
        return None
    try:
        with open(path, encoding="ascii") as source:
            token = source.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"hub token {path}: {error}. Fix: run deploy.py again, or this command as root") from None
    if not token or any(c.isspace() for c in token):
        raise Misconfigured(f"hub token {path}: found no single word. Fix: mend hub_token_file, run deploy.py again")
    return token


def _become(user: str) -> None:
    """Root's hands make files that the unit could not mend later: work as the weights' owner."""
    if os.geteuid() != 0:
        return
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise Misconfigured(f"there is no user {user}, wanted the weights' owner. Fix: run deploy.py again") from None
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)


def _manifest(configuration: Configuration) -> manifest.Manifest:
    loaded = manifest.load(configuration.manifest)
    if (loaded.repository, loaded.revision) != (configuration.repository, configuration.revision):
        raise Misconfigured(
            f"manifest {configuration.manifest}: found {loaded.repository} at {loaded.revision}, wanted "
            f"{configuration.repository} at {configuration.revision}. Fix: run deploy.py again"
        )
    return loaded


def _bring(configuration: Configuration, token: str | None, stopping: Event) -> None:
    status = Status(configuration.status, configuration.repository, configuration.revision)
    status.start()
    notify("READY=1")  # started, not done: nothing waits for a unit that takes hours
    try:
        # After `_become` root's file cannot be read again by the hub's client: it then asks without a token, and fails.
        hub = source(configuration.hub, token, configuration.stall_seconds, _token_path(configuration))
        company = sharing.Alone()
        if configuration.sharing:
            told = sharing.load(configuration.sharing)
            company = sharing.Company(told, configuration.repository, configuration.revision, say)
        done = snapshot.bring(configuration, _manifest(configuration), hub, status, stopping, company)
    except AgentError as error:
        status.end("stopped" if isinstance(error, Stopped) else "failed", str(error))
        raise
    except OSError as error:
        where = error.filename or configuration.directory
        text = (
            f"{where}: {error.strerror}, wanted to read and write there. Fix: see what is wrong with that file system"
        )
        status.end("failed", text)
        raise NoRoom(text) from error
    except BaseException as error:
        status.end("failed", f"unexpected {type(error).__name__}: {error}. Fix: report this with the unit's journal")
        raise
    status.end("complete")
    print(f"{configuration.snapshot}: whole ({done})", flush=True)


def _fetch(loaded: Sequence[Configuration], _: argparse.Namespace, stopping: Event) -> int:
    _bring(loaded[0], _token(loaded[0]), stopping)
    return 0


def _repair(loaded: Sequence[Configuration], _: argparse.Namespace, stopping: Event) -> int:
    tokens = [_token(configuration) for configuration in loaded]  # root's file cannot be read afterwards
    _become(loaded[0].user)
    for configuration, token in zip(loaded, tokens, strict=True):
        _bring(configuration, token, stopping)
    return 0


def _verify(loaded: Sequence[Configuration], given: argparse.Namespace, stopping: Event) -> int:
    answers = []
    for configuration in loaded:
        began = time.monotonic()
        wanted = _manifest(configuration)
        found = receipt.check(configuration.snapshot, wanted.sha256)
        if given.deep and found["state"] != "absent":
            hashed = snapshot.hash_all(configuration.snapshot, wanted.files, lambda count: None, stopping)
            known = {file.path: file for file in wanted.files}
            found["damaged"] = {
                each.file.path: f"found {each.found}, wanted {each.file.digest}" for each in hashed if not each.right
            }
            found["strangers"] = receipt.strangers(configuration.snapshot, known)
            found["state"] = "damaged" if found["damaged"] or found["strangers"] else "whole"
        seconds = time.monotonic() - began
        answers.append(
            {
                "snapshot": configuration.snapshot,
                "repository": configuration.repository,
                "revision": configuration.revision,
                "deep": given.deep,
                "bytes": wanted.bytes,
                "seconds": round(seconds, 4),
                **found,
            }
        )
    if given.json:
        print(json.dumps({"weights": answers}))
    else:
        for answer in answers:
            whole = f"{answer['snapshot']}: whole ({answer['bytes']} bytes, {answer['seconds']} s)"
            print("\n".join(problems(answer)) or whole)
    return 0 if all(answer["state"] == "whole" for answer in answers) else WrongContent.code


def problems(answer: dict[str, Any]) -> list[str]:
    """What is wrong with one snapshot, a line each."""
    path, fix = answer["snapshot"], "Fix: run deploy.py, or weights_agent.py repair on this node"
    if answer["state"] == "absent":
        return [f"{path}: found nothing, wanted the snapshot. {fix}"]
    if answer["state"] == "unproved":
        return [f"{path}: found no receipt for its manifest, wanted every file proved. {fix}"]
    return [f"{path}/{name}: {how}. {fix}" for name, how in sorted(answer["damaged"].items())] + [
        f"{path}/{name}: is not in the manifest, wanted nothing there. {fix}" for name in answer["strangers"]
    ]


def _status(loaded: Sequence[Configuration], given: argparse.Namespace, _: Event) -> int:
    told = []
    for configuration in loaded:
        try:
            with open(configuration.status, encoding="utf-8") as source:
                told.append(json.load(source))
        except (OSError, ValueError):
            known = {"repository": configuration.repository, "revision": configuration.revision}
            told.append({**known, "phase": "never started"})
    if given.json:
        print(json.dumps({"weights": told}))
        return 0
    for status in told:
        line = f"{status['repository']} {status['revision'][:12]}: {status['phase']}"
        if status.get("total"):
            line += f", {status['done']} of {status['total']} bytes"
            line += f", {status['files_done']} of {status['files_total']} files"
        if status.get("rate"):
            line += f", {status['rate'] / 1e6:.1f} MB/s"
        if status.get("eta") is not None:
            line += f", {status['eta']} s left"
        if status.get("time"):
            line += f" ({max(0, time.time() - status['time']):.0f} s ago)"
        print(line)
        if status.get("error"):
            print(f"  {status['error']}")
    return 0


def _gc(loaded: Sequence[Configuration], given: argparse.Namespace, stopping: Event) -> int:
    # All configurations count, whatever was named: a snapshot that another one wants is not old.
    every = {c.snapshot: c for c in [*loaded, *map(configurations.load, sorted(glob.glob(CONFIGURATIONS)))]}
    found = snapshot.old(list(every.values()))
    if not found:
        print("nothing to remove")
    for path, size in found:
        using = snapshot.users(path)
        verb = "in use by " + ", ".join(map(str, using)) if using else "removed" if given.delete else "would be removed"
        if given.delete and not using:
            snapshot.delete(path, os.path.dirname(loaded[0].staging))
        print(f"{path}: {size} bytes, {verb}")
    return 0


def _share(path: str, stopping: Event) -> int:
    told = sharing.load(path)
    try:
        from .share import Sharer
    except ImportError as error:
        raise Misconfigured(
            f"{sys.executable}: {error}, wanted the tools' environment with libtorrent. Fix: run deploy.py again"
        ) from None
    Sharer(told, stopping).run()
    return 0


_COMMANDS = {"fetch": _fetch, "repair": _repair, "verify": _verify, "status": _status, "gc": _gc}
