"""The machine is what the inventory says it is."""

from __future__ import annotations

from typing import Any

from node import hardware, systems
from node.plan import Observed, Plan, declared_hardware


def test_machine_is_the_declared_one(data: dict[str, Any], observed: Observed, plan: Plan) -> None:
    """Seven of eight GPUs, a GPU off the fabric or an old driver leave every service green and every answer slow or
    wrong."""
    declared = declared_hardware(data)
    assert declared is not None
    problems = hardware.disagreements(observed.hardware, declared, plan.release.driver_floor)
    assert not problems, "\n".join(map(str, problems))


def test_system_is_supported(observed: Observed) -> None:
    """Wheels, toolkits and glibc fit each other on these systems only."""
    problems = systems.problems(observed.system)
    assert not problems, "\n".join(map(str, problems))
    assert observed.hardware.gpus, "no GPU is seen. Fix: nvidia-smi on the host tells why"
