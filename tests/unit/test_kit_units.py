"""Long work on a host is joined and shown as it is. systemctl and journalctl are stand-ins that read a file here; the
real ones are met in tests/lab."""

from __future__ import annotations

import doctest
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit_project import DEPLOY, Project

from kit import testing, units
from kit.refusal import Refusal

SYSTEMCTL = """#!{python}
import json, sys, pathlib
here = pathlib.Path({folder!r})
if sys.argv[1] == "show":
    names = sys.argv[2].partition("=")[2].split(",")
    units = json.loads((here / "units.json").read_text())
    asked = sys.argv[sys.argv.index("--") + 1:]
    blocks = []
    for unit in asked:
        state = units.get(unit, {{"LoadState": "not-found", "ActiveState": "inactive", "Result": "success"}})
        blocks.append("\\n".join(f"{{name}}={{state.get(name, '')}}" for name in names))
    print("\\n\\n".join(blocks))
else:
    with (here / "asked").open("a") as asked:
        print(" ".join(sys.argv[1:]), file=asked)
"""
JOIN = """
from kit import units
from kit.role import operation


@operation("Work")
def work(folder):
    yield from units.start("work.service")
    yield from units.join("work.service", "Working", status_file=f"{folder}/status.json")
"""


class Machine:
    """A project whose @local host has a stand-in systemd with one unit."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.project = Project(folder)
        programs = folder / "programs"
        programs.mkdir()
        for name, text in (
            ("systemctl", SYSTEMCTL.format(python=sys.executable, folder=str(folder))),
            ("journalctl", "#!/bin/sh\necho 'first line'\necho \"asked: $*\"\n"),
        ):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.project.environment["PATH"] = f"{programs}:/usr/bin:/bin"
        self.project.write("work.py", JOIN)
        self.project.write("deploy.py", DEPLOY + f"from work import work\nwork({str(folder)!r})\n")

    def unit(self, active: str, **more: str) -> None:
        beside = self.folder / "units.new"
        beside.write_text(json.dumps({"work.service": {"LoadState": "loaded", "ActiveState": active, **more}}))
        beside.rename(self.folder / "units.json")

    def status(self, **status: Any) -> None:
        (self.folder / "status.json").write_text(json.dumps(status))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_unit_is_waited_for_until_it_ends(machine: Machine) -> None:
    machine.unit("activating", SubState="start", Result="success")
    machine.status(phase="hashing", done=5_000_000_000, total=20_000_000_000, rate=250e6, eta=60)
    said = ""
    with machine.project.start("-y") as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            assert process.stderr
            for line in process.stderr:  # it ends once it was seen at work
                said += line
                if "Working: " in line:
                    break
            machine.unit("inactive", SubState="dead", Result="success")
            ended = time.monotonic()
            said += process.stderr.read()
            noticed = time.monotonic() - ended
        finally:
            watchdog.cancel()
    assert process.returncode == 0, said
    assert "[@local] Working: hashing, 5.0 of 20.0 GB (25 %), 250.0 MB/s, 1 min left" in said
    assert noticed < units.PROGRESS_SECONDS  # and not only when the next line of progress is due
    assert (machine.folder / "asked").read_text() == "start --no-block -- work.service\n"


def test_a_failed_unit_fails_the_host_with_its_last_words(machine: Machine) -> None:
    machine.unit("failed", SubState="failed", Result="exit-code", ExecMainStatus="3", InvocationID="abc")
    done = machine.project.run("-y")
    assert done.code == 1
    assert "Refused: Working: first line" in done.err
    assert "asked: --no-pager --output=cat --lines=20 _SYSTEMD_INVOCATION_ID=abc" in done.err
    assert "Refused: Working: work.service failed (exit-code, exit code 3), wanted it to end well. Fix: " in done.err
    assert "Traceback" not in done.text


def test_a_unit_that_is_not_there_is_named(machine: Machine) -> None:
    (machine.folder / "units.json").write_text("{}")
    done = machine.project.run("-y")
    assert done.code == 1
    assert "Refused: Working: there is no unit work.service on this host. Fix: " in done.err


def test_a_half_written_status_is_not_shown_and_does_no_harm(machine: Machine) -> None:
    (machine.folder / "status.json").write_text('{"phase": "down')
    machine.unit("active", SubState="exited", Result="success")
    assert machine.project.run("-y").code == 0


class Flaky:
    """A host that answers, loses the connection, comes back."""

    name = "flaky"
    print_prefix = "[flaky] "

    def __init__(self, *answers: Any):
        self.answers = list(answers)
        self.connected = 0
        self.lines: list[str] = []
        self.connector = SimpleNamespace(connect=self.connect, client=None)

    def connect(self) -> None:
        self.connected += 1

    def log(self, line: str, log_func: Any) -> None:
        self.lines.append(line)

    def run_shell_command(self, command: Any, **arguments: Any) -> tuple[bool, Any]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        found: dict[str, Any] = {"state": testing.unit(**answer), "status": None, "journal": []}
        found["working"] = answer["active"] == "activating"
        lines = [json.dumps({"found": found})]
        return True, SimpleNamespace(stdout_lines=lines, stderr_lines=[])


WORKING, ENDED = {"active": "activating"}, {"active": "inactive"}
GONE = SimpleNamespace(stdout_lines=[], stderr_lines=[])


def wait(host: Flaky) -> None:
    units.Join("w.service", "Working", None, 60)._wait(host, {})  # type: ignore[arg-type]


def test_a_lost_connection_is_made_anew_and_the_unit_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    host = Flaky(WORKING, OSError("reset"), EOFError(), WORKING, ENDED)
    wait(host)
    assert host.connected == 2
    assert host.answers == []
    assert host.lines[1] == "Working: connection lost, w.service goes on; connecting again"


def test_a_host_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(units, "GIVE_UP_SECONDS", 0.0)
    with pytest.raises(Refusal, match=r"flaky has not answered for 0 s; w\.service may still be at work there\. Fix: "):
        wait(Flaky(WORKING, OSError("reset")))


def test_a_unit_that_works_too_long_is_left_at_work() -> None:
    with pytest.raises(Refusal, match=r"is still at work after .* it goes on\. Fix: journalctl -u w\.service"):
        units.Join("w.service", "Working", None, -1)._wait(Flaky(WORKING), {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "asked", "steps"),
    [
        (testing.unit(), {}, []),
        (testing.unit("inactive", "disabled"), {}, ["enable", "start"]),
        (testing.unit("failed"), {}, ["reset-failed", "start"]),
        (testing.unit(), {"restart_because": ["/etc/x changed"]}, ["restart"]),
        (testing.unit(), {"running": False, "enabled": False}, ["disable", "stop"]),
        (testing.unit("inactive", "disabled"), {"running": False, "enabled": False}, []),
        (testing.unit("inactive"), {"running": False, "restart_because": ["/etc/x changed"]}, []),
    ],
)
def test_a_service_is_brought_to_its_state_by_one_command(state: Any, asked: Any, steps: list[str]) -> None:
    result = testing.prepare(units.ensure, {"unit": "x.service", "state": state, **asked})
    command = " && ".join(["systemctl daemon-reload", *(f"systemctl {step} -- x.service" for step in steps)])
    assert result.commands == ([command] if steps else [])
    assert bool(result.noop) == (not steps)


@pytest.mark.parametrize(
    ("state", "started", "joined"),
    [
        (testing.unit("activating"), [], ["Join(x.service)"]),
        (testing.unit("active"), [], ["Join(x.service)"]),
        (testing.unit("active", SubState="exited"), ["systemctl start --no-block -- x.service"], []),
        (testing.unit("inactive"), ["systemctl start --no-block -- x.service"], []),
        (testing.unit("failed"), ["systemctl start --no-block -- x.service"], ["Join(x.service)"]),
    ],
)
def test_what_works_is_not_started_and_what_does_not_is_not_joined(
    state: Any, started: list[str], joined: list[str]
) -> None:
    assert testing.prepare(units.start, {"unit": "x.service", "state": state}).commands == started
    assert testing.prepare(units.join, {"unit": "x.service", "title": "X", "state": state}).commands == joined


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ({}, "at work for 5 s"),
        ({"phase": "compiling", "done": 3, "total": 12, "unit": "files"}, "compiling, 3 of 12 files (25 %)"),
        ({"done": 1536, "rate": 0}, "1.5 kB"),
        ({"done": 0, "total": 0, "eta": 0}, "0.0 B, 0 s left"),
    ],
)
def test_progress_says_only_what_the_status_says(status: dict[str, Any], line: str) -> None:
    assert units.progress(status, 5.2) == line


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(units).attempted >= 3
    assert doctest.testmod(units).failed == 0
