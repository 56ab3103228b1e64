"""The program that waits for the memory of a predecessor, before machines that the stand-in of nvidia-smi describes."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from files.tools import gpu_memory_free
from files.tools.gpu_memory_free import NotFree
from tests.lab.settings import STAND_INS
from tests.lab.stand_ins.gpu_stand_in import nvidia_smi
from tests.lab.stand_ins.gpu_stand_in.machine import Description

PROGRAM = Path(gpu_memory_free.__file__)
ME = pwd.getpwuid(os.getuid()).pw_name
TOTAL, AT_REST = 97887, Description().gpus()[0].free
WANTED = TOTAL - 2048
SECRET = "--api-key=sk-of-nobody"


def process(pid: int, memory: int, seat: int = 0) -> dict[str, Any]:
    return {"seat": seat, "pid": pid, "memory": memory, "name": "/opt/x/bin/python"}


@pytest.fixture
def gone() -> Iterator[int]:
    """A process that has ended and not been waited for, as a killed scheduler is while its memory is returned."""
    child = subprocess.Popen(["/bin/true"])
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    yield child.pid
    child.wait()


@pytest.fixture
def other() -> Iterator[int]:
    """A living process with a secret in its arguments."""
    child = subprocess.Popen(["/usr/bin/tail", "-f", "/dev/null", "--", SECRET], stderr=subprocess.DEVNULL)
    yield child.pid
    child.kill()
    child.wait()


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The description that nvidia-smi on PATH reads anew each time."""
    file = tmp_path / "machine.json"
    file.write_text("{}")
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\nsys.path.insert(0, {str(STAND_INS)!r})\n"
        "from gpu_stand_in.machine import parse\nfrom gpu_stand_in.nvidia_smi import answer\n"
        f"output, code = answer(sys.argv[1:], parse(pathlib.Path({str(file)!r}).read_text()))\n"
        "print(output, end='')\nsys.exit(code)\n"
    )
    program.chmod(0o755)
    return file


@pytest.fixture
def run(tmp_path: Path, machine: Path) -> Run:
    """The program as systemd runs it, for eight GPUs unless told otherwise."""

    def run(seconds: float = 30, user: str = ME, gpus: range = range(8), mib: int = WANTED) -> Any:
        wanted = tmp_path / "wanted.json"
        wanted.write_text(json.dumps({"gpus": {str(n): mib for n in gpus}, "user": user, "seconds": seconds}))
        (tmp_path / "run").mkdir(exist_ok=True)
        environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "RUNTIME_DIRECTORY": str(tmp_path / "run")}
        command = [sys.executable, "-I", str(PROGRAM), str(wanted)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_free_gpus_are_not_waited_for(run: Run, tmp_path: Path) -> None:
    began = time.monotonic()
    done = run()
    assert (done.returncode, done.stderr) == (0, "") and "free on 8 GPUs" in done.stdout
    assert time.monotonic() - began < gpu_memory_free.BETWEEN_LOOKS
    assert not (tmp_path / "run/status.json").exists()


def test_memory_of_the_dead_is_waited_for_and_named(run: Run, machine: Path, gone: int, tmp_path: Path) -> None:
    """Each look of the program runs the driver's: after the third, the driver has returned the memory."""
    held = json.dumps({"processes": [process(gone, 90_000)]})
    machine.write_text(held)
    program = tmp_path / "bin/nvidia-smi"
    counted = f"open({str(tmp_path / 'looks')!r}, 'a').write('x')\n"
    freed = f"len(open({str(tmp_path / 'looks')!r}).read()) > 6 and pathlib.Path({str(machine)!r}).write_text('{{}}')\n"
    program.write_text(program.read_text().replace("output, code", counted + freed + "output, code"))
    done = run()
    assert done.returncode == 0, done.stderr
    assert f"GPU 0: found {AT_REST - 90_000} of {TOTAL} MiB free, wanted {WANTED}; held by {gone} true" in done.stdout
    assert "which has ended" in done.stdout and "90000 MiB" in done.stdout
    assert json.loads((tmp_path / "run/status.json").read_text())["phase"].startswith("waiting for GPU memory")


def test_time_is_up_with_what_is_held_and_by_whom(run: Run, machine: Path, gone: int) -> None:
    machine.write_text(json.dumps({"processes": [process(gone, 90_000, seat=5)], "held": {"6": 70_000}}))
    done = run(seconds=1)
    assert done.returncode == 1
    for part in ("GPU 5: found", f"{gone} true", "GPU 6: found", "no process that nvidia-smi names", "Fix: "):
        assert part in done.stderr, done.stderr
    assert "GPU 4" not in done.stderr


def test_a_living_process_of_somebody_else_fails_at_once(run: Run, machine: Path, other: int) -> None:
    machine.write_text(json.dumps({"processes": [process(other, 60_000)]}))
    began = time.monotonic()
    done = run(user="nobody", seconds=300)
    assert done.returncode == 1 and time.monotonic() - began < 10
    assert f"{other} tail (user {ME}) 60000 MiB" in done.stderr
    assert f"Fix: stop process {other} (tail)" in done.stderr
    assert SECRET not in done.stdout + done.stderr


def test_what_the_service_itself_left_alive_is_waited_for_then_named(run: Run, machine: Path, other: int) -> None:
    machine.write_text(json.dumps({"processes": [process(other, 60_000)]}))
    done = run(seconds=1)
    assert done.returncode == 1 and f"kill -9 {other}" in done.stderr


def test_a_monitor_beside_the_dead_is_not_blamed(run: Run, machine: Path, gone: int, other: int) -> None:
    """Its 500 MiB are within what the plan leaves to others: without the dead there would be enough."""
    machine.write_text(json.dumps({"processes": [process(gone, 60_000), process(other, 500)]}))
    done = run(user="nobody", seconds=3)
    assert done.returncode == 1 and "the driver has not returned" in done.stderr, done.stderr
    assert "Fix: stop" not in done.stderr


def test_gpus_of_no_profile_do_not_count(run: Run, machine: Path, other: int) -> None:
    machine.write_text(json.dumps({"processes": [process(other, 90_000, seat=7)]}))
    assert run(gpus=range(4)).returncode == 0


def test_a_missing_gpu_and_a_silent_driver_are_told(run: Run, machine: Path, tmp_path: Path) -> None:
    machine.write_text(json.dumps({"silent": [2]}))
    done = run()
    assert done.returncode == 1 and "no GPU 7" in done.stderr and "Fix: " in done.stderr
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 9\n")
    done = run()
    assert done.returncode == 1 and "Failed to initialize NVML" in done.stderr and "Fix: " in done.stderr


def test_root_writes_through_no_link_of_the_services(run: Run, machine: Path, gone: int, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.status.json.new").symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("kept")
    machine.write_text(json.dumps({"processes": [process(gone, 90_000)]}))
    run(seconds=1)
    assert (tmp_path / "precious").read_text() == "kept"


MOMENT = st.fixed_dictionaries({str(seat): st.integers(0, AT_REST) | st.just(0) for seat in range(3)})


@settings(deadline=None, max_examples=200)
@given(moments=st.lists(MOMENT, min_size=1, max_size=6), mib=st.integers(0, AT_REST), named=st.booleans())
def test_it_passes_exactly_when_enough_is_free(moments: list[dict[str, int]], mib: int, named: bool) -> None:
    """Whatever is held when, and whether the driver names a process for it: never with less, never later than then."""
    ended = 2**22 + 1  # above every process number
    machines = [
        Description(count=3, processes=tuple(process(ended, moment[seat], int(seat)) for seat in moment))
        if named
        else Description(count=3, held=moment)
        for moment in moments
    ]
    now = 0

    def ask(query: str) -> list[list[str]]:
        seen = machines[min(now, len(machines) - 1)]
        output, code = nvidia_smi.answer([query, "--format=csv,noheader,nounits"], seen)
        assert code == 0
        return [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 1

    first = next((n for n, each in enumerate(machines) if all(gpu.free >= mib for gpu in each.gpus())), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_memory_free, "nvidia_smi", ask)
        patch.setattr("time.sleep", sleep)
        patch.setattr("time.monotonic", lambda: float(now))
        if first is None:
            with pytest.raises(NotFree, match="Fix: "):
                gpu_memory_free.wait(dict.fromkeys(range(3), mib), ME, len(machines))
        else:
            gpu_memory_free.wait(dict.fromkeys(range(3), mib), ME, len(machines))
            assert now == first
