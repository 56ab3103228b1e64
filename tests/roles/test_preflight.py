"""Preflight: what the probe brings is understood, and what makes a host unfit is said."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.program import probe_command
from node.hardware import QUERY_FIELDS, expected, parse_lspci
from node.manifest import File, Manifest
from node.models import MODELS
from node.plan import Observed
from node.problems import Problem
from node.render import read_file
from node.systems import SYSTEMS
from roles.preflight import deploy
from roles.preflight import probe as probe_module
from roles.preflight.deploy import host_problems, observe
from roles.preflight.facts import HostFacts


def found_here() -> dict[str, Any]:
    arguments = {"query_fields": list(QUERY_FIELDS), "weights_directory": "/srv/weights/new"}
    command = probe_command(HostFacts.source(), arguments).get_raw_value()
    answer = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(answer)["found"]
    return found


def test_the_probe_runs_whole_on_a_host() -> None:
    """One command, nothing installed first; what it brings is what the node's parsers read."""
    found = found_here()
    system = observe(found).system
    assert system.python == f"{sys.version_info[0]}.{sys.version_info[1]}" or system.python
    assert system.architecture == "x86_64"
    assert found["weights_file_system"]


MANIFEST = Manifest(MODELS["lab-tiny"].repository, "b" * 40, (File("config.json", 10, "a" * 64),))
GOOD: dict[str, Any] = {"uid": 0, "systemd": True, "weights_file_system": "ext4", "weights_behind": None}


def test_a_fit_host_has_no_problems() -> None:
    assert host_problems(GOOD) == []


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"uid": 1000}, "uid 1000"),
        ({"systemd": False}, "no systemd"),
        ({"weights_file_system": "nfs4"}, "nfs4"),
        ({"weights_file_system": "fuse.sshfs"}, "fuse.sshfs"),
        ({"weights_behind": "/root, mode 700"}, "found it behind /root, mode 700"),
    ],
)
def test_what_makes_a_host_unfit_is_said_with_its_fix(state: dict[str, Any], named: str) -> None:
    (problem,) = host_problems(GOOD | state)
    assert named in str(problem) and "Fix: " in str(problem)


@pytest.mark.parametrize(("driver", "count"), [("580.65.06", 1), ("580.95.05", 0), ("595.58.03", 0)])
def test_an_old_driver_that_works_is_warned_of_and_not_refused(
    driver: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = dataclasses.replace(expected("rtx-pro-6000-blackwell-server", 8), driver=driver)
    data = {"gpu": "rtx-pro-6000-blackwell-server", "gpu_count": 8, "weights_directory": "/w", "model": "lab-tiny"}
    warned: list[Problem] = []
    for name, stand_in in {
        "current_host": lambda: SimpleNamespace(name="gpu-1"),
        "node_data": lambda host: {**data, "profile": "cpu", "revision": "b" * 40, "manifest": "m"},
        "host_neighbours": lambda host: [],
        "observe": lambda found: Observed(SYSTEMS[0].as_system(), machine),
        "read_file": lambda path: MANIFEST.dumps().encode() if path == "m" else read_file(path),
        "warn": warned.extend,
    }.items():
        monkeypatch.setattr(deploy, name, stand_in)
    monkeypatch.setattr(HostFacts, "read", lambda **arguments: GOOD)
    plan = deploy.check.__wrapped__()  # type: ignore[attr-defined]
    assert plan.host == "gpu-1" and warned == plan.warnings
    assert [f"found {driver}" in str(one) and "Fix: upgrade the driver" in str(one) for one in warned] == [True] * count


def test_a_folder_on_the_way_that_is_closed_is_found(tmp_path: Path) -> None:
    """The agent is a user of its own: behind a home it could fetch nothing, and would say so only after a while."""
    inner = tmp_path / "home/weights"
    inner.mkdir(parents=True)
    on_the_way = [folder for folder in (*reversed(inner.parents), inner) if not folder.stat().st_mode & 0o001]
    for folder in on_the_way:
        folder.chmod(folder.stat().st_mode | 0o001)
    try:
        assert probe_module.closed(str(inner / "not/there/yet")) is None
        (tmp_path / "home").chmod(0o750)
        assert probe_module.closed(str(inner / "not/there/yet")) == f"{tmp_path}/home, mode 750"
        (tmp_path / "home").chmod(0o711)
        inner.chmod(0o700)
        assert probe_module.closed(str(inner)) == f"{inner}, mode 700"
    finally:
        for folder in reversed(on_the_way):
            folder.chmod(folder.stat().st_mode & ~0o001)


def test_sysfs_stands_in_for_lspci(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare machine has no pciutils; its GPUs are seen all the same, and nothing else is taken for one."""
    for address, values in {
        "0000:06:00.0": ("0x10de", "0x2bb5", "0x030200"),
        "0000:07:00.0": ("0x15b3", "0x1021", "0x020000"),
        "0000:08:00.0": ("0x10de", "0x22a3", "0x068000"),
    }.items():
        device = tmp_path / address
        device.mkdir()
        for name, value in zip(("vendor", "device", "class"), values, strict=True):
            (device / name).write_text(value + "\n")

    class Elsewhere(type(tmp_path)):  # type: ignore[misc]
        def __new__(cls, *parts: str) -> Any:
            return tmp_path if parts == ("/sys/bus/pci/devices",) else type(tmp_path)(*parts)

    monkeypatch.setattr(probe_module, "Path", Elsewhere)
    (gpu,) = parse_lspci(probe_module._bus())
    assert gpu.model == "rtx-pro-6000-blackwell-server"
