"""What inference_service does to a host. Each operation reads one fact, and changes nothing where nothing needs it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit import files, signals, starting, units
from kit.command import StringCommand, host
from kit.program import act_command
from kit.refusal import refuse
from kit.role import operation
from node import layout
from node.layout import ServicePaths
from node.problems import Problem
from roles.inference_service.facts import ServiceFacts

_HERE = Path(__file__).parent
Commands = Generator[Any, Any, Any]


@operation("Lay down the service: key, environment, units")
def lay_down(wanted: Sequence[files.Item], key: Sequence[files.File], firewall: Mapping[str, str]) -> Commands:
    """Bring the service's files to what is wanted, and keep it on the machine by its firewall. Starts no server.

    + wanted: its files and folders, firewall and units among them.
    + key: the owner's API key as files; none: a key is made on the host, once.
    + firewall: how to see that its rules are loaded, see probe.py.
    """
    unit = f"{layout.UNITS}/{layout.FIREWALL_UNIT}"
    everything = [*wanted, *key]
    found = ServiceFacts.read(
        paths=[item.path for item in (*wanted, *key)],
        units=[layout.FIREWALL_UNIT],
        key=[layout.API_KEY, layout.API_KEY_CONFIGURATION],
        firewall=dict(firewall),
    )
    refuse(_unusable_key(found["key"]) if not key else [])
    changed = files.compare(found["files"], everything)
    if changed:
        yield from files.apply(everything, found["files"])
    make_key = not key and found["key"] != "good"
    if make_key:
        paths = {"key": layout.API_KEY, "configuration": layout.API_KEY_CONFIGURATION}
        yield act_command(_HERE / "key_on_host.py", paths, shown=(layout.API_KEY,))
    if any(path.startswith(layout.UNITS + "/") for path in changed):
        yield StringCommand("systemctl daemon-reload")
    reasons = [f"{path}: {why}" for path, why in changed.items() if path in (layout.FIREWALL, unit)]
    if not found["firewall_holds"]:
        reasons.append(f"table {layout.FIREWALL_TABLE} is not loaded as it is laid down")
    state = found["units"][layout.FIREWALL_UNIT]
    if reasons or state["ActiveState"] != "active" or state["UnitFileState"] != "enabled":
        yield from units.ensure(layout.FIREWALL_UNIT, state, restart_because=reasons)
    elif not changed and not make_key:
        host().noop(f"{len(everything)} files and folders, the key and the firewall: as wanted")


def _unusable_key(state: str) -> list[Problem]:
    if not state.startswith("unusable"):
        return []
    return [
        Problem(
            layout.API_KEY,
            state.removeprefix("unusable: "),
            "one key",
            "remove that file: the next deploy makes a new key",
        )
    ]


@operation("Start compiling the kernels")
def start_warming(paths: ServicePaths, check: Sequence[str]) -> Commands:
    """Start the unit that compiles, unless the cache is warm or it is at it already. Does not wait.

    + check: the command that says why the cache is not warm.
    """
    found = ServiceFacts.read(paths=[], units=[paths.warmup_unit], warmup=list(check))
    if not found["warm"]:
        host().noop("the cache is warm: compiled files, compiler and receipt agree")
        return
    yield from units.start(paths.warmup_unit, found["units"][paths.warmup_unit])


@operation("Serve, and be asked")
def serve(
    paths: ServicePaths,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    read_at_start: Sequence[str],
    check: Sequence[str],
    others: Sequence[ServicePaths],
    wait_seconds: float,
) -> Commands:
    """Wait for the compiler, stop what another profile serves, and start or restart the server where that is needed.

    Ends when the server has given a right answer to a question that makes it sample, or fails with its last lines.

    + arguments, environment: what its process must have been started with, or it is restarted.
    + read_at_start: files and folders that a running server has read; changed after its start, it is restarted.
    + check: the command that says why the cache is not warm.
    + others: services of every other profile; they are stopped and removed.
    + wait_seconds: how long the start may take.
    """
    remains = [path for other in others for path in other.files]
    found = ServiceFacts.read(
        paths=[*read_at_start, *remains],
        units=[paths.unit, paths.warmup_unit],
        process={"unit": paths.unit, "names": sorted(environment), "key": layout.API_KEY},
        warmup=list(check),
    )
    unit, warming = found["units"][paths.unit], found["units"][paths.warmup_unit]
    old = [other for other in others if any(found["files"][path] is not None for path in other.files)]
    running = unit["ActiveState"] in ("active", "activating", "reloading") and unit["SubState"] != "auto-restart"
    reasons = [
        *signals.reasons_to_restart(unit, {path: found["files"][path] for path in read_at_start}),
        *differences(found["process"], arguments, environment),
    ]
    starts = not running or bool(reasons)
    steady = not starts and unit["ActiveState"] == "active" and unit["UnitFileState"] == "enabled"
    if steady and not old and not found["warm"]:
        host().noop(f"{paths.unit} is active, with the arguments, environment, key and files of the plan")
        return
    if found["warm"]:
        yield from units.join(paths.warmup_unit, "Compiling", paths.warmup_status, warming)
    if starts:
        for reason in reasons:
            host().log(f"{paths.unit}: {reason}")
        for other in old:
            host().log(f"{other.unit} makes way for {paths.unit}; to go back: --data profile={other.profile}")
        units_of_old = [other.unit for other in old if found["files"][other.unit_file] is not None]
        yield from starting.start(paths.unit, [*units_of_old, *([paths.unit] if running else [])], units_of_old)
    elif unit["UnitFileState"] != "enabled":
        yield StringCommand("systemctl enable --", paths.unit)
    if starts or unit["ActiveState"] != "active":
        yield from starting.join(paths.unit, "Starting the server", paths.status, wait_seconds)
    if old:
        yield from files.apply([files.Absent(path) for other in old for path in other.files], found["files"])
        yield StringCommand("systemctl daemon-reload")


def differences(
    process: Mapping[str, Any] | None, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """Why a process is not the one that would be started now; [] without a process."""
    if process is None:
        return []
    reasons = []
    if process["arguments"] != list(arguments):
        reasons.append("it was started with other arguments")
    names = sorted(name for name, value in environment.items() if process["environment"].get(name) != value)
    if names:
        reasons.append(f"it was started with another {', '.join(names)}")
    if not process["key_is_current"]:
        reasons.append("it was started with another API key")
    return reasons
