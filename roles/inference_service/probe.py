"""Runs on the host: files and units of the service, how its process was started, what its cache lacks. Reads only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kit import on_host


def probe(
    paths: list[str],
    units: list[str],
    key: list[str] | None = None,
    process: dict[str, Any] | None = None,
    warmup: list[str] | None = None,
    firewall: dict[str, str] | None = None,
) -> dict[str, Any]:
    """{"files": ..., "units": ..., and what was asked for of "key", "process", "warm"}

    key: paths of the key and of the server's configuration with it. -> see `key_state`; a key never leaves the host.
    process: {"unit": name, "names": environment variables to look at, "key": path}. -> see `process_state`.
    warmup: the command that checks the cache. -> "warm": reasons why it is not, [] if it is.
    firewall: {"listed": command, "loaded": path}. -> "firewall_holds": whether its rules are those of its file: the
    command prints now what the firewall's unit kept at `path` when it loaded them.
    """
    found: dict[str, Any] = {"files": on_host.files(paths), "units": on_host.units(units)}
    if key is not None:
        found["key"] = key_state(*key)
    if process is not None:
        found["process"] = process_state(**process)
    if warmup is not None:
        found["warm"] = cold(warmup)
    if firewall is not None:
        listed = on_host.run(["/bin/sh", "-c", firewall["listed"]])
        found["firewall_holds"] = listed["code"] == 0 and listed["out"] == on_host.text(firewall["loaded"])
    return found


def key_state(key: str, configuration: str) -> str:
    """One of: missing, unusable: why, open to others, unknown to the server (which has none or another), good."""
    text = on_host.text(key)
    if text is None:
        return "missing"
    if not 16 <= len(text.strip()) <= 512 or len(text.split()) != 1:
        return f"unusable: {len(text.strip())} characters in {len(text.split())} words, wanted one word of 16 to 512"
    for state in on_host.files([key, configuration]).values():
        if state is not None and (state["mode"], state["user"], state["group"]) != ("600", "root", "root"):
            return "open to others"
    try:
        known = json.loads(on_host.text(configuration) or "null")["api-key"]
    except (ValueError, TypeError, KeyError):
        return "unknown to the server"
    return "good" if known == text.strip() else "unknown to the server"


def process_state(unit: str, names: list[str], key: str, proc: str = "/proc") -> dict[str, Any] | None:
    """What the unit's main process was started with; None where there is none.

    {"pid": int, "arguments": [...], "environment": {name: value | None}, "key_is_current": bool}
    """
    shown = on_host.run(["systemctl", "show", "--property=MainPID", "--value", "--", unit])
    pid = int(shown["out"].strip() or 0)
    if not pid:
        return None
    try:
        arguments = Path(proc, str(pid), "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[:-1]
        raw = Path(proc, str(pid), "environ").read_bytes().decode(errors="surrogateescape")
    except (FileNotFoundError, ProcessLookupError):
        return None
    environment = dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)
    given = f"{proc}/{pid}/root{environment.get('CREDENTIALS_DIRECTORY', '/nonexistent')}/api-key"
    return {
        "pid": pid,
        "arguments": arguments,
        "environment": {name: environment.get(name) for name in names},
        "key_is_current": (mine := on_host.text(given)) is not None and mine == on_host.text(key),
    }


def cold(command: list[str]) -> list[str]:
    """What jit_warmup.py --check says, a line a reason; a check that cannot run is a reason too."""
    done = on_host.run(command, timeout=90)
    if done["code"] == 0:
        return []
    lines = (done["out"] + done["err"]).strip().splitlines()
    return lines[-5:] or [f"{command[1]} exited {done['code']}"]
