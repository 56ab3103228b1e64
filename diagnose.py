#!/usr/bin/env python3
"""Say what is wrong with the hosts of an inventory, and how to mend it. Nothing is changed on them.

    python diagnose.py INVENTORY [--limit NAME-OR-GROUP] [--hours 24] [--json]
    python diagnose.py --log FILE                      one log ("-": standard input), with no host at all

One line a finding: host, severity, what was seen and where, its cause, its fix; or one JSON object with --json.
Exit code 0: nothing found; 1: something was found; 2: a host, or what was asked for, could not be looked at.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit import ssh_config
from kit.inventory import HostEntry, InventoryError, limited, load, neighbours
from kit.program import probe_command
from node import fingerprints, inventory, systems
from node import plan as plan_module
from node.fingerprints import Line, redact
from node.plan import Plan
from node.problems import Malformed, Problem, excerpt
from node.releases import DEFAULT_RELEASE, RELEASES
from node.render import read_file
from node.sharing import Neighbour
from node.systems import System
from roles.diagnosis import judgement
from roles.diagnosis.facts import Symptoms
from roles.diagnosis.judgement import Finding

AT_ONCE = 32
"""Hosts that are looked at together."""


@dataclass(frozen=True)
class Report:
    """What was found of one host. problem: why it could not be looked at, with its fix; unread: part -> why; state:
    what it said of itself, logs left out."""

    host: str
    findings: list[Finding] = field(default_factory=list)
    problem: str | None = None
    unread: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)


class NotLookedAt(Exception):
    """A host that gives no answer; the text says why and ends with `Fix: ...`."""


# --- one host --------------------------------------------------------------------------------------------------------


def look(entry: HostEntry, config: Path, path: str, hours: float, everyone: Sequence[Neighbour] = ()) -> Report:
    """Ask a host and judge what it says. config: an ssh_config that knows it. path: the inventory's. hours: how far
    back logs are read. everyone: the inventory's hosts, this one among them."""
    data = entry.data
    values, _ = inventory.read(data)
    release = values["release"] if values["release"] in RELEASES else DEFAULT_RELEASE
    toolkit = RELEASES[release].toolkit
    weights_directory = values["weights_directory"] if isinstance(values["weights_directory"], str) else None
    plan = planned(entry.name, data, everyone)
    asked = judgement.questions(plan if isinstance(plan, Plan) else None, toolkit, weights_directory, hours)
    try:
        found = ask(entry, config, asked)
    except NotLookedAt as error:
        return Report(entry.name, problem=redact(filled(str(error), entry.name, path)))
    try:
        system = systems.from_probe(**found["system"]) if found["system"] else None
    except Malformed as error:
        system, plan = None, [error.problem()]
    if system is not None:  # only a plan for the host's own system has its release's digest
        plan = planned(entry.name, data, everyone, system)
    findings = judgement.findings(found, toolkit, plan, weights_directory)
    return Report(
        entry.name,
        [dataclasses.replace(one, fix=filled(one.fix, entry.name, path, plan)) for one in findings],
        unread=found["unread"],
        state={name: part for name, part in found.items() if name not in ("logs", "kernel", "unread")},
    )


def planned(
    name: str, data: Mapping[str, Any], everyone: Sequence[Neighbour], system: System | None = None
) -> Plan | list[Problem]:
    """The host's Plan, or why there is none. That others of its inventory cannot be found is no reason."""
    plan = plan_module.make(name, data, read_file, None, system, everyone)
    return plan if isinstance(plan, Plan) else plan_module.make(name, data, read_file, None, system)


def ask(entry: HostEntry, config: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the probe brings, by one command. Raises NotLookedAt."""
    if entry.name.startswith("@") and not ssh_config.is_local(entry):
        raise NotLookedAt(f"found {entry.name}, wanted a host reached by ssh or @local. Fix: name it by its address")
    command = probe_command(Symptoms.source(), asked).get_raw_value()
    try:
        answer = subprocess.run(
            ssh_config.argv(config, entry, command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=Symptoms.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotLookedAt(
            f"found no answer within {Symptoms.timeout} s, wanted the host's state. Fix: ssh HOST uptime shows whether "
            "it is overloaded"
        ) from None
    except OSError as error:
        raise NotLookedAt(f"found {error}, wanted the program ssh. Fix: apt-get install openssh-client") from None
    said = answer.stdout.strip().splitlines()
    try:
        told = json.loads(said[-1]) if answer.returncode == 0 else {}
    except (IndexError, ValueError):
        told = {}
    if "found" in told:
        found: dict[str, Any] = told["found"]
        return found
    if "problem" in told:
        raise NotLookedAt(told["problem"])
    if "traceback" in told:
        last = told["traceback"].strip().splitlines()[-1]
        raise NotLookedAt(f"the probe failed there: {last}. Fix: report this with the host's system and Python")
    raise NotLookedAt(unreachable(answer.stderr or answer.stdout, answer.returncode))


def unreachable(said: str, code: int) -> str:
    """Why ssh or sudo gave no answer, by the same table as everything else."""
    known = fingerprints.match(Line(line) for line in said.splitlines())
    if known:
        return f"found {excerpt(known[0].text)!r}: {known[0].cause}. Fix: {known[0].fix}"
    last = excerpt((said.strip().splitlines() or ["nothing"])[-1])
    return f"found {last!r} and exit code {code}, wanted the host's state. Fix: ssh HOST true"


def filled(text: str, host: str, path: str, plan: Any = None) -> str:
    """A fix with this host's own names in it."""
    names = {"HOST": host, "INVENTORY": path}
    if isinstance(plan, Plan):
        names |= {"UNIT": plan.service.unit, "PROFILE": plan.profile.name}
    return re.sub(r"\b(" + "|".join(names) + r")\b", lambda found: names[found[1]], text)


# --- what is printed -------------------------------------------------------------------------------------------------


def line(host: str, finding: Finding) -> str:
    """One finding, on one line."""
    again = f"{finding.times} lines" if finding.times > 1 else ""
    last = time.strftime("last %Y-%m-%d %H:%M:%S UTC", time.gmtime(finding.last)) if finding.last else ""
    remark = ", ".join(part for part in (again, last) if part)
    seen = f"{finding.seen} ({remark})" if remark else finding.seen
    where = f"{host}: {finding.severity}: {finding.id} in {finding.where}"
    return f"{where}: {seen}. Cause: {finding.cause}. Fix: {finding.fix}"


def print_text(reports: list[Report]) -> None:
    for report in reports:
        for finding in report.findings:
            print(line(report.host, finding))
        if report.problem:
            print(f"{report.host}: could not be looked at: {report.problem}", file=sys.stderr)
        elif not report.findings:
            print(f"{report.host}: nothing found", file=sys.stderr)
        for part, why in report.unread.items():
            print(f"{report.host}: not read: {part}: {redact(why)}", file=sys.stderr)


def print_json(reports: list[Report]) -> None:
    document = {
        "findings": [{"host": report.host, **dataclasses.asdict(one)} for report in reports for one in report.findings],
        "not_looked_at": {report.host: report.problem for report in reports if report.problem},
        "unread": {report.host: report.unread for report in reports if report.unread},
        "state": {report.host: report.state for report in reports if report.state},
    }
    print(json.dumps(hidden(document), indent=2))


def hidden(value: Any) -> Any:
    """The same, without secrets in any of its texts."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: hidden(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [hidden(part) for part in value]
    return value


# --- the command -----------------------------------------------------------------------------------------------------


def of_hosts(options: argparse.Namespace) -> list[Report]:
    """A report of each host, in the inventory's order. Raises InventoryError."""
    everyone = load(options.inventory, options.data)
    entries = limited(everyone, options.limit)
    beside = [Neighbour(*each) for each in neighbours(everyone)]

    def report(entry: HostEntry) -> Report:
        try:
            return look(entry, config, options.inventory, options.hours, beside)
        except Exception as error:  # one host's surprise must not hide the others
            what = f"unexpected {type(error).__name__}: {redact(str(error))}. Fix: report this with the inventory"
            return Report(entry.name, problem=what)

    with ssh_config.written(entries) as config, ThreadPoolExecutor(min(AT_ONCE, len(entries))) as pool:
        return list(pool.map(report, entries.values()))


def of_log(path: str) -> Report:
    """What one log shows. Raises OSError."""
    if path == "-":
        return Report("standard input", judgement.of_log("log", sys.stdin.buffer.read().decode("utf-8", "replace")))
    return Report(path, judgement.of_log("log", Path(path).read_bytes().decode("utf-8", "replace")))


def main(arguments: list[str] | None = None) -> int:
    """0: nothing found. 1: findings. 2: a host, the inventory or the log could not be looked at."""
    summary, _, usage = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="diagnose.py", description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inventory", metavar="INVENTORY", nargs="?", help="the pyinfra inventory of the hosts")
    parser.add_argument(
        "--limit",
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="only hosts of this name, pattern or group",
    )
    parser.add_argument("--data", action="append", default=[], metavar="KEY=VALUE", help="as pyinfra's, for all hosts")
    parser.add_argument("--hours", type=float, default=24, help="how far back logs are read (default: 24)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--log", metavar="FILE", help='match this log instead; "-" is standard input')
    options = parser.parse_args(arguments)
    if bool(options.inventory) == bool(options.log):
        parser.error("wanted either an INVENTORY or --log FILE. Fix: diagnose.py inventory/pro6000.py")
    if not options.hours > 0:
        parser.error(f"--hours {options.hours:g}: wanted more than 0. Fix: --hours 24")
    try:
        reports = [of_log(options.log)] if options.log else of_hosts(options)
    except InventoryError as error:
        print(redact(str(error)), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{options.log}: {error.strerror}, wanted a log to read. Fix: name a file, or -", file=sys.stderr)
        return 2
    (print_json if options.json else print_text)(reports)
    if any(report.problem for report in reports):
        return 2
    return 1 if any(report.findings for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
