"""From one profile to another with one value, on a real systemd: what fails ends, what served before can come back, and
what is switched to serves alone.

The tests run in this order on one machine, each beginning where the one before it ended. They come last: the machine is
left with the other profile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest

from node import layout, systemd
from node.layout import ServicePaths
from node.plan import Plan
from roles.inference_service import content
from tests.proof.conftest import Node, lab
from tests.roles.test_inference_service import planned

OLD, NEW = ServicePaths("cpu"), ServicePaths("cpu-two-stages")
SWITCH = f"profile={NEW.profile}"
STARTS = 3  # of the unit's start limit
CRASH = "weights refuse to be loaded"
# A server that dies while it loads. RestartSec= is 30 in the unit; the limit is the same without the pauses.
DROP_IN = f"""[Service]
ExecStart=
ExecStart=/bin/sh -c "sleep 3; echo '{CRASH}' >&2; exit 1"
RestartSec=1
"""
AT_ONCE = 120  # seconds that the deploy may take: the start timeout is 900
SEGMENTS = ("nccl-AbCdEf", "psm_12ab34cd", "sem.mp-xyz", "torch_77_1", "sgl_shm_broadcast_77_ab")


@pytest.fixture(scope="module")
def machine(deployed: Node) -> Iterator[Node]:
    deployed.ssh("journalctl --quiet --rotate --vacuum-time=1s")
    yield deployed
    deployed.ssh(f"rm -rf /run/systemd/system/{NEW.unit}.d /dev/shm/psm_of_another; systemctl daemon-reload")


def state(machine: Node, unit: str) -> dict[str, str]:
    shown = machine.ssh(f"systemctl show --property=ActiveState,Result,UnitFileState -- {unit}")
    return dict(line.split("=", 1) for line in shown.splitlines())


def running(machine: Node) -> str:
    """Units of servers that serve or try to, a line each."""
    states = "--state=active,activating,reloading"
    return machine.ssh(f"systemctl list-units 'sglang-*' {states} --no-legend --plain | cut -d' ' -f1")


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds:.0f} s: {what}"
        time.sleep(1)


def journal(machine: Node, unit: str) -> str:
    return machine.ssh(f"journalctl --boot --no-pager --output=cat --unit={unit}")


def crashes(machine: Node) -> int:
    return journal(machine, NEW.unit).splitlines().count(CRASH)


def test_a_server_that_dies_while_it_loads_fails_the_deploy_at_once(machine: Node) -> None:
    """Not after the start timeout; with its own last words, with what was stopped for it, and how to go back."""
    assert running(machine) == OLD.unit
    folder = f"/run/systemd/system/{NEW.unit}.d"
    machine.ssh(f"mkdir -p {folder}; cat > {folder}/crash.conf <<'END'\n{DROP_IN}END\nsystemctl daemon-reload")
    began = time.monotonic()
    done = machine.deploy(SWITCH)
    assert done.code == 1, done.output
    assert CRASH in done.output and f"{NEW.unit} did not start" in done.output and "Fix: " in done.output
    assert f"to go back: --data profile={OLD.profile}" in done.output
    assert time.monotonic() - began < AT_ONCE


def test_a_crash_loop_ends_at_the_limit(machine: Node) -> None:
    wait_until(lambda: state(machine, NEW.unit)["ActiveState"] == "failed", "systemd gives up", seconds=120)
    time.sleep(5)  # it would start again after one
    ended = state(machine, NEW.unit)
    assert ended["ActiveState"] == "failed", ended
    assert crashes(machine) == STARTS
    assert "Start request repeated too quickly" in journal(machine, NEW.unit)


def test_after_a_failed_switch_nothing_serves_and_nothing_competes(machine: Node) -> None:
    """The old one is stopped and would not come back at a boot to fight for the GPUs; it is not removed yet."""
    assert running(machine) == ""
    old = state(machine, OLD.unit)
    assert (old["ActiveState"], old["UnitFileState"]) == ("inactive", "disabled")


GPU_UNITS = ("tp8", "pp8")


@pytest.fixture
def gpu_units(machine: Node) -> Iterator[tuple[Plan, ...]]:
    """Units of GPU profiles as they are laid down, without what compiles and asks; for the engine stands `sleep`."""
    plans = tuple(planned(profile) for profile in GPU_UNITS)
    for plan in plans:
        lines = content.render("sglang.service.j2", plan).splitlines()
        lines = [line for line in lines if "jit_warmup" not in line and not line.startswith("ExecStartPost=")]
        lines = [line for line in lines if not line.startswith(("BindReadOnlyPaths=", "RequiresMountsFor="))]
        lines = ["ExecStart=/bin/sleep infinity" if line.startswith("ExecStart=") else line for line in lines]
        assert sum("gpu_memory_free.py" in line for line in lines) == 1
        paths = plan.service_paths
        for path, text in (
            (f"/run/systemd/system/{paths.unit}", "\n".join(lines)),
            (paths.environment, systemd.environment_file(plan.service.environment)),
            (paths.gpu_memory, json.dumps(content.gpu_memory(plan))),
        ):
            machine.ssh(f"cat > {path} <<'END'\n{text}\nEND")
    machine.ssh("systemctl daemon-reload")
    yield plans
    units = " ".join(plan.service.unit for plan in plans)
    laid = [f"/run/systemd/system/{plan.service.unit}" for plan in plans]
    laid += [path for plan in plans for path in plan.service_paths.files]
    lab("gpus", machine.name, "{}")
    machine.ssh(f"systemctl stop {units}; systemctl reset-failed {units} 2>/dev/null; rm -f {' '.join(laid)}")
    machine.ssh("systemctl daemon-reload")


def test_a_start_waits_for_gpu_memory_and_profiles_exclude_each_other(
    machine: Node, gpu_units: tuple[Plan, ...]
) -> None:
    """In the sandbox of the unit, by its own Conflicts= and After=, with no help from a deploy."""
    first, second = (plan.service.unit for plan in gpu_units)
    lab("gpus", machine.name, json.dumps({"held": {"0": 60_000}}))
    machine.ssh(f"systemctl start --no-block {first}")
    waiting = "held by no process that nvidia-smi names"
    wait_until(lambda: waiting in journal(machine, first), "it says that it waits")
    assert state(machine, first)["ActiveState"] == "activating"
    lab("gpus", machine.name, "{}")
    wait_until(lambda: state(machine, first)["ActiveState"] == "active", "it starts when the memory is free")

    machine.ssh(f"systemctl start {second}")
    assert running(machine) == second
    said = machine.ssh("journalctl --boot --output=cat --no-pager _PID=1").splitlines()
    stopped = max(number for number, line in enumerate(said) if line.startswith(f"Stopped {first}"))
    assert stopped < max(number for number, line in enumerate(said) if line.startswith(f"Starting {second}"))
    machine.ssh(f"systemctl stop {second}")


def test_a_start_fails_at_once_where_somebody_else_has_the_gpus(machine: Node, gpu_units: tuple[Plan, ...]) -> None:
    unit = gpu_units[0].service.unit
    machine.ssh("setsid runuser -u nobody -- sleep 300 </dev/null >/dev/null 2>&1 &")
    stranger = machine.ssh("until pgrep -u nobody -x sleep; do sleep 0.1; done")
    held = {"seat": 3, "pid": int(stranger), "memory": 60_000, "name": "/usr/bin/sleep"}
    lab("gpus", machine.name, json.dumps({"processes": [held]}))
    began = time.monotonic()
    assert machine.ssh(f"systemctl start {unit} || echo failed", check=False) == "failed"
    assert time.monotonic() - began < 30
    said = journal(machine, unit)
    machine.ssh(f"systemctl stop {unit}; kill {stranger}")
    assert f"{stranger} sleep (user nobody) 60000 MiB" in said and "Fix: stop process" in said, said[-2000:]


def test_one_value_brings_back_what_served_before(machine: Node) -> None:
    """And a start takes away what a killed predecessor left in memory, whatever its name, and nothing of others."""
    for name in SEGMENTS:
        machine.ssh(f"echo left > /dev/shm/{name}; chown {layout.SERVICE_USER}: /dev/shm/{name}")
    machine.ssh("echo precious > /dev/shm/psm_of_another; chown nobody: /dev/shm/psm_of_another")
    done = machine.deploy()
    assert done.code == 0, done.output
    assert running(machine) == OLD.unit and state(machine, OLD.unit)["UnitFileState"] == "enabled"
    assert "391" in lab("ask", machine.name)
    assert machine.ssh(f"ls {' '.join(NEW.files)} 2>/dev/null", check=False) == ""
    left = machine.ssh("ls /dev/shm").split()
    assert not set(left) & set(SEGMENTS) and "psm_of_another" in left, left


def test_a_switch_stops_the_one_before_it_starts_the_other(machine: Node) -> None:
    before = state(machine, OLD.unit)
    assert before["ActiveState"] == "active"
    machine.ssh(f"rm -r /run/systemd/system/{NEW.unit}.d; systemctl daemon-reload")
    done = machine.deploy(SWITCH)
    assert done.code == 0, done.output
    assert running(machine) == NEW.unit and state(machine, NEW.unit)["UnitFileState"] == "enabled"
    assert "391" in lab("ask", machine.name)
    assert machine.ssh(f"ls {' '.join(OLD.files)} 2>/dev/null", check=False) == ""
    said = machine.ssh("journalctl --boot --output=short-monotonic --no-pager _PID=1").splitlines()
    stopped = [number for number, line in enumerate(said) if f"Stopped {OLD.unit}" in line]
    started = [number for number, line in enumerate(said) if f"Starting {NEW.unit}" in line]
    assert stopped[-1] < started[-1], said[-20:]


def test_what_was_switched_to_is_as_planned_in_every_process(machine: Node) -> None:
    """Two stages, each its own scheduler, with the patches: the verify suite, told of the same value."""
    titles = machine.ssh("ps -eo args | grep ^sglang::scheduler | sort").splitlines()
    assert [title.split("_")[1].strip() for title in titles] == ["PP0", "PP1"], titles
    verified = machine.verify("inference_service", data=(SWITCH,))
    assert verified.code == 0, verified.output
    again = machine.deploy(SWITCH)
    assert again.code == 0 and again.changed == (), again.output
