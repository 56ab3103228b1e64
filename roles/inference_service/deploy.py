"""Serve a model: lay down its unit, compile its kernels while weights still come, start it, and let it answer."""

from __future__ import annotations

from pathlib import Path

from kit import files
from kit.refusal import refuse
from kit.role import role
from node import layout
from node.plan import Plan
from node.problems import Problem
from roles.inference_service import content
from roles.inference_service.operations import lay_down, serve, start_warming

PROJECT = Path(__file__).resolve().parents[2]


@role("Inference service")
def configure(plan: Plan) -> None:
    """Its cache, key, environment and units, and the firewall of its ports."""
    lay_down(
        wanted=content.wanted(plan),
        key=owners_key(plan.service.api_key_file),
        firewall=content.FIREWALL_SEEN,
    )


@role("JIT warm-up")
def warm(plan: Plan) -> None:
    """Compile for the node's GPUs, as a unit of the host."""
    start_warming(paths=plan.service_paths, check=warmup_check(plan))


@role("Inference service: start")
def activate(plan: Plan) -> None:
    """The server runs what the plan says and has answered."""
    paths = plan.service_paths
    serve(
        paths=paths,
        arguments=[*plan.service.arguments, "--config", f"/run/credentials/{paths.unit}/keys.yaml"],
        environment=plan.service.environment,
        read_at_start=read_at_start(plan),
        check=warmup_check(plan),
        others=content.other_services(plan),
        wait_seconds=content.longest_start(plan),
    )


def read_at_start(plan: Plan) -> list[str]:
    """What the process of the server has read at its start, and is not seen in its arguments and environment."""
    return [
        plan.service_paths.unit_file,
        plan.paths.receipt,  # written when a release is built: a rebuild in place changes files under a running server
        layout.ENGINE_LOGGING,
        f"{layout.TOOLS}/engine_log.py",
        *content.patched_files(plan),
        *(part.paths.snapshot for part in plan.weights),
    ]


def warmup_check(plan: Plan) -> list[str]:
    """The command that says why the cache is not warm."""
    return [plan.paths.python, f"{layout.TOOLS}/jit_warmup.py", plan.service_paths.warmup, "--check"]


def owners_key(path: str | None) -> list[files.File]:
    """The API key from the owner's file, as files of the node; none where the node makes its own. Raises Refusal."""
    if path is None:
        return []
    file = PROJECT / Path(path).expanduser()
    try:
        key = file.read_text(encoding="utf-8").strip()
        problem = content.key_problem(key)
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "no text"
    if problem:
        wanted = "a file with one key in it"
        refuse(Problem("inventory key api_key_file", f"{file}: {problem}", wanted, "mend that file"))
    return content.key_files(key)
