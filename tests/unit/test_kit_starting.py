"""A service that takes long to be ready is started without one long command. systemctl and journalctl are stand-ins
that read a file here; the real ones are met on lab machines."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from kit_project import DEPLOY
from test_kit_units import Machine

from kit import starting, testing

START = """
from kit import starting
from kit.role import operation


@operation("Serve")
def serve(folder):
    yield from starting.start("work.service", stop_first=["old.service"], disable=["old.service"])
    yield from starting.join("work.service", "Starting", status_file=f"{folder}/status.json", wait_seconds=30)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.project.write("serving.py", START)
    made.project.write("deploy.py", DEPLOY + f"from serving import serve\nserve({str(tmp_path)!r})\n")
    return made


def later(machine: Machine, seconds: float, active: str, **more: str) -> threading.Thread:
    """Change the unit some seconds after its start was asked for."""

    def change() -> None:
        asked = machine.folder / "asked"
        until = time.monotonic() + 60
        while time.monotonic() < until and not (asked.exists() and "--no-block" in asked.read_text()):
            time.sleep(0.05)
        time.sleep(seconds)
        machine.unit(active, **more)

    thread = threading.Thread(target=change)
    thread.start()
    return thread


def test_a_start_is_waited_for_until_the_service_is_active(machine: Machine) -> None:
    """The start is only asked for; before it begins the unit may be inactive, while another one still stops."""
    machine.unit("inactive", SubState="dead", Result="success")
    machine.status(phase="asking a question")
    waiting = later(machine, 3, "active", SubState="running", Result="success")
    done = machine.project.run("-y")
    waiting.join()
    assert done.code == 0, done.text
    assert "[@local] Starting: asking a question" in done.err
    asked = (machine.folder / "asked").read_text().splitlines()
    assert asked == [
        "daemon-reload",
        "disable -- old.service",
        "stop -- old.service",
        "reset-failed -- work.service",
        "enable -- work.service",
        "start --no-block -- work.service",
    ]


def test_the_first_failure_of_a_start_is_its_failure(machine: Machine) -> None:
    """systemd goes on to try again, for minutes or an hour; who deploys wants to know now."""
    machine.unit("activating", SubState="start", Result="success")
    failed = {"SubState": "auto-restart", "Result": "exit-code", "InvocationID": "abc"}
    waiting = later(machine, 4, "activating", **failed)
    done = machine.project.run("-y")
    waiting.join()
    assert done.code == 1
    assert "Refused: Starting: first line" in done.err
    assert "work.service did not start (activating, exit-code), wanted it active. Fix: " in done.err


def test_a_service_that_ends_while_it_starts_has_failed(machine: Machine) -> None:
    machine.unit("activating", SubState="start", Result="success")
    waiting = later(machine, 4, "inactive", SubState="dead", Result="success")
    done = machine.project.run("-y")
    waiting.join()
    assert done.code == 1
    assert "work.service did not start (inactive, success), wanted it active. Fix: " in done.err


def test_a_unit_that_is_not_there_is_named(machine: Machine) -> None:
    (machine.folder / "units.json").write_text("{}")
    done = machine.project.run("-y")
    assert done.code == 1
    assert "work.service is not-found on this host. Fix: " in done.err


def test_a_start_that_is_forgotten_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    join = starting.JoinStart("work.service", "Starting", None, 60)
    waiting = testing.unit("inactive")
    assert not join._ended(waiting)
    monkeypatch.setattr(time, "monotonic", lambda: join._asked + starting.QUEUED_SECONDS + 1)
    assert join._ended(waiting)
