"""What a host's symptoms mean: what the probe brought and the Plan in, Findings out. No host is touched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from node import fingerprints, layout, toolkits
from node.fingerprints import BY_ID, Fingerprint, Line, Match, redact
from node.plan import Plan
from node.problems import Problem, excerpt
from node.toolkits import Toolkit

Found = Mapping[str, Any]  # what probe.py returns

OTHER_UNITS = ("nvidia-fabricmanager.service", "nvidia-persistenced.service")
KERNEL, NVIDIA_SMI, STATE, INVENTORY = "kernel log", "nvidia-smi", "state", "inventory"
MEMORY_BYTES = 2 * 1024**3  # what one compiler job of the warm-up may take
DISK_BYTES = 10**9
GPU_MEMORY_MIB = 1024  # a GPU that nobody uses holds a few MiB, one with a display some hundred
RUNS = ("active", "activating", "reloading", "deactivating")


@dataclass(frozen=True)
class Finding:
    """One cause, found on one host.

    id: of its fingerprint. where: units, or one of KERNEL, NVIDIA_SMI, STATE, INVENTORY, or a file's name. seen: what
    showed it, secrets hidden. times: lines; last: Unix time of the last one, where known.
    """

    id: str
    severity: str
    where: str
    seen: str
    times: int
    last: float | None
    cause: str
    fix: str


def questions(plan: Plan | None, toolkit: Toolkit, weights_directory: str | None, hours: float) -> dict[str, Any]:
    """The arguments of the probe. Without a plan only what depends on none is asked."""
    paths = (layout.ROOT, layout.CACHE, layout.STATE, "/", "/tmp", "/var/log")
    return {
        "hours": hours,
        "units": list(OTHER_UNITS),
        "secrets": [layout.API_KEY, layout.API_KEY_CONFIGURATION, layout.HUB_TOKEN],
        "nvcc": toolkit.nvcc_path,
        "alternative": toolkits.ALTERNATIVE,
        "current": layout.CURRENT,
        "receipts": _receipts(plan) if plan else [],
        "file_systems": [*paths, *([weights_directory] if weights_directory else [])],
        "health": f"http://{plan.service.host}:{plan.service.port}/health" if plan else None,
    }


def _receipts(plan: Plan) -> list[str]:
    return [plan.paths.receipt, plan.paths.patches_receipt, toolkits.RECEIPT, *(w.paths.receipt for w in plan.weights)]


# --- all of a host ---------------------------------------------------------------------------------------------------


def findings(
    found: Found, toolkit: Toolkit, plan: Plan | Sequence[Problem], weights_directory: str | None = None
) -> list[Finding]:
    """Everything that is wrong with a host, causes before their consequences, each cause once.

    plan: the host's, or why there is none. weights_directory: may be as full as the owner likes.
    """
    problems = [] if isinstance(plan, Plan) else list(plan)
    made = plan if isinstance(plan, Plan) else None
    seen: dict[str, list[Match]] = {}
    for unit, runs in (found["logs"] or {}).items():
        seen[unit] = _merged(match for run in runs for match in fingerprints.match(Line(text, at) for at, text in run))
    seen[KERNEL] = fingerprints.match(Line(text, at) for at, text in found["kernel"] or [])
    said = found["gpus"] or {"out": "", "err": ""}
    seen[NVIDIA_SMI] = fingerprints.match(Line(text) for text in (said["out"] + "\n" + said["err"]).splitlines())
    for where, match in _states(found, toolkit, made, weights_directory):
        seen[where] = _merged([*seen.get(where, []), match])

    ids = {where: {match.fingerprint.id for match in matches} for where, matches in seen.items()}
    kept: list[tuple[str, Match]] = []
    for where, matches in seen.items():
        elsewhere = {one for place, there in ids.items() if place != where for one in there}
        causes = fingerprints.causes((match.fingerprint for match in matches), elsewhere)
        kept += [(where, match) for match in matches if match.fingerprint in causes]
    told = [_finding(where, match) for where, match in kept]
    told += [_of(problem) for problem in problems]
    order = [fingerprint.id for fingerprint in fingerprints.FINGERPRINTS]
    return sorted(_once(told), key=lambda finding: (finding.severity != "error", order.index(finding.id)))


def of_log(name: str, text: str) -> list[Finding]:
    """What one log shows, with no host at hand."""
    return [_finding(name, match) for match in fingerprints.match(Line(line) for line in text.splitlines())]


def _of(problem: Problem) -> Finding:
    match = _match("no-plan", f"{problem.subject}: {problem.found}")
    return _finding(INVENTORY, replace(match, cause=f"found {problem.found}, wanted {problem.wanted}", fix=problem.fix))


def _merged(matches: Iterable[Match]) -> list[Match]:
    """The matches of several runs, each fingerprint once; the last run tells how it looks."""
    merged: dict[str, Match] = {}
    for match in matches:
        earlier = merged.get(match.fingerprint.id)
        merged[match.fingerprint.id] = replace(match, times=match.times + earlier.times) if earlier else match
    return list(merged.values())


def _once(told: Iterable[Finding]) -> list[Finding]:
    """The same cause in several places is one finding."""
    once: dict[tuple[str, str], Finding] = {}
    for finding in told:
        first = once.setdefault((finding.id, finding.cause), finding)
        if first is not finding:
            times = [at for at in (first.last, finding.last) if at is not None]
            once[finding.id, finding.cause] = replace(
                first,
                where=f"{first.where}, {finding.where}",
                times=first.times + finding.times,
                last=max(times) if times else None,
            )
    return list(once.values())


def _finding(where: str, match: Match) -> Finding:
    fingerprint = match.fingerprint
    unit = where if where.endswith(".service") else None
    fix = re.sub(r"\bUNIT\b", unit, match.fix) if unit else match.fix
    return Finding(
        fingerprint.id,
        fingerprint.severity,
        where,
        excerpt(redact(match.text), 2 * fingerprints.SEEN_CHARACTERS),
        match.times,
        match.last,
        redact(match.cause),
        redact(fix),
    )


# --- states ----------------------------------------------------------------------------------------------------------


def _match(name: str, seen: str) -> Match:
    fingerprint: Fingerprint = BY_ID[name]
    return Match(fingerprint, seen, 1, None, fingerprint.cause, fingerprint.fix)


def engines(found: Found) -> list[str]:
    """Units of ours that use the GPUs now."""
    return [
        name
        for name, state in found["units"].items()
        if name.startswith(("sglang-", "kimi-warmup-")) and state["ActiveState"] in RUNS
    ]


def _states(
    found: Found, toolkit: Toolkit, plan: Plan | None, weights_directory: str | None
) -> Iterable[tuple[str, Match]]:
    """(where, what) of everything that needs no log to be seen."""
    deployed = found["current"] is not None or any(name.startswith("sglang-") for name in found["units"])
    yield from _of_units(found)
    yield from _of_gpus(found, plan)
    yield from _of_machine(found, weights_directory)
    if not deployed:
        yield STATE, _match("not-deployed", f"no {layout.CURRENT}, no unit sglang-*")
        return
    yield from _of_toolkit(found, toolkit)
    if plan:
        yield from _of_release(found, plan)
        yield from _of_service(found, plan)
        if plan.sharing:
            yield from _of_sharing(found)


def _of_units(found: Found) -> Iterable[tuple[str, Match]]:
    for name, state in found["units"].items():
        again = state["ActiveState"] == "activating" and state.get("NRestarts", "0") != "0"
        if state["ActiveState"] == "failed" or again:
            how = f"restarted {state['NRestarts']} times" if again else f"result {state.get('Result')}"
            yield name, _match("unit-failed", f"{state['ActiveState']} ({state['SubState']}), {how}")
        if state.get("NeedDaemonReload") == "yes" and name not in OTHER_UNITS:
            yield name, _match("unit-edited", "NeedDaemonReload=yes")


def _of_service(found: Found, plan: Plan) -> Iterable[tuple[str, Match]]:
    unit = plan.service.unit
    state = found["units"].get(unit)
    others = [name for name in engines(found) if name.startswith("sglang-") and name != unit]
    if others:
        yield STATE, _match("other-profile", f"{', '.join(others)} runs, wanted {unit}")
    elif state is None:
        yield STATE, _match("not-deployed", f"no unit {unit}")
    elif state["ActiveState"] == "inactive":
        yield unit, _match("service-stopped", f"inactive ({state['SubState']})")
    elif state["ActiveState"] == "active" and found["health"] not in (None, 200):
        yield unit, _match("no-answer", f"active, and /health says {found['health']}")


def _of_sharing(found: Found) -> Iterable[tuple[str, Match]]:
    state = found["units"].get(layout.SHARING_UNIT)
    if state is None or state["ActiveState"] == "inactive":
        yield layout.SHARING_UNIT, _match("sharing-stopped", "inactive" if state else "there is no such unit")


def _of_release(found: Found, plan: Plan) -> Iterable[tuple[str, Match]]:
    current = (found["current"] or "nothing").rsplit("/", 1)[-1]
    if current != plan.paths.digest:
        yield STATE, _match("other-release", f"{layout.CURRENT} leads to {current}, wanted {plan.paths.digest}")
        return
    for path in (plan.paths.receipt, plan.paths.patches_receipt):
        if found["receipts"] is not None and found["receipts"].get(path) is None:
            yield STATE, _match("receipt-missing", f"no {path}")


def _of_toolkit(found: Found, toolkit: Toolkit) -> Iterable[tuple[str, Match]]:
    said = found["nvcc"]
    if said is not None:
        release = re.search(r"release (\d+\.\d+)", said["out"])
        if said["code"] != 0 or release is None or release[1] != toolkit.nvcc:
            shown = f"says {release[1]}" if release else excerpt(said["err"] or said["out"]) or f"exits {said['code']}"
            yield STATE, _match("toolkit-missing", f"{toolkit.nvcc_path}: {shown}, wanted {toolkit.nvcc}")
    link = found["alternative"]
    if link is not None and not link["nvcc"]:
        yield STATE, _match("cuda-link", f"{toolkits.ALTERNATIVE} leads to {link['target']}, which has no bin/nvcc")


def _of_gpus(found: Found, plan: Plan | None) -> Iterable[tuple[str, Match]]:
    said = found["gpus"]
    if said is None:
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in said["out"].splitlines()]
    rows = [row for row in rows if row[0].isdigit() and len(row) >= 8]
    if plan and said["code"] is not None and len(rows) < len(plan.hardware.gpus):
        listed = ", ".join(row[2] for row in rows) or "none"
        yield NVIDIA_SMI, _match("gpus-missing", f"{len(rows)} of {len(plan.hardware.gpus)} GPUs answer: {listed}")
    waiting = [row[0] for row in rows if row[8:] and row[8] in ("In Progress", "Not Started")]
    if waiting:
        yield NVIDIA_SMI, _match("fabric-not-up", f"fabric.state of GPU {', '.join(waiting)} is not Completed")
    held = [row[0] for row in rows if row[3].split()[0].isdigit() and int(row[3].split()[0]) > GPU_MEMORY_MIB]
    if held and not engines(found):
        listed = "; ".join((found["gpu_processes"] or {"out": ""})["out"].splitlines()[:4])
        seen = f"memory of GPU {', '.join(held)} is held and no engine of ours runs: {listed or 'no process is listed'}"
        yield NVIDIA_SMI, _match("gpu-memory-held", seen)


def _of_machine(found: Found, weights_directory: str | None) -> Iterable[tuple[str, Match]]:
    memory = found["memory"]
    if memory and memory["MemAvailable"] < MEMORY_BYTES:
        seen = f"{_gigabytes(memory['MemAvailable'])} of {_gigabytes(memory['MemTotal'])} are available"
        yield STATE, _match("memory-low", seen)
    rooms = found["file_systems"] or {}
    full = {}
    for path, room in rooms.items():
        if path in ("/dev/shm", weights_directory):
            continue
        if room["bytes"] and room["free"] < DISK_BYTES:
            full[room["device"]] = f"{path}: {_gigabytes(room['free'])} of {_gigabytes(room['bytes'])} are free"
        elif room["inodes"] and room["free_inodes"] * 100 < room["inodes"]:
            full[room["device"]] = f"{path}: {room['free_inodes']} of {room['inodes']} inodes are free"
    if full:
        yield STATE, _match("disk-full", "; ".join(full.values()))
    shared = rooms.get("/dev/shm")
    if shared and shared["bytes"] and shared["free"] * 10 < shared["bytes"]:
        seen = f"/dev/shm: {_gigabytes(shared['free'])} of {_gigabytes(shared['bytes'])} are free"
        yield STATE, _match("shm-full", seen)
    segments = found["segments"] or []
    if segments and not engines(found):
        total = sum(segment["bytes"] for segment in segments)
        yield STATE, _match("nccl-segments-left", f"{len(segments)} segments, {_gigabytes(total)}, and no engine runs")


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
