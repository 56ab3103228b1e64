"""Preflight: what the probe brings is understood, and what makes a host unfit is said."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kit.program import probe_command
from node.hardware import QUERY_FIELDS, parse_lspci
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


GOOD: dict[str, Any] = {"uid": 0, "systemd": True, "weights_file_system": "ext4"}


def test_a_fit_host_has_no_problems() -> None:
    assert host_problems(GOOD) == []


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"uid": 1000}, "uid 1000"),
        ({"systemd": False}, "no systemd"),
        ({"weights_file_system": "nfs4"}, "nfs4"),
        ({"weights_file_system": "fuse.sshfs"}, "fuse.sshfs"),
    ],
)
def test_what_makes_a_host_unfit_is_said_with_its_fix(state: dict[str, Any], named: str) -> None:
    (problem,) = host_problems(GOOD | state)
    assert named in str(problem) and "Fix: " in str(problem)


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
