"""The pipeline fault, and its cure: the releases' own servers, with eight layers over four stages, on the processor.

Needs a deployed lab machine, and 8 GB beside its service. The releases have the same torch, so that of 0.5.12.post1
only what differs is laid over the deployed one. 0.5.23's own file needs no patch: tests/unit/test_patches.py, by the
file of its wheel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from node.patches import PATCHES
from node.releases import RELEASES, Release
from roles.inference_service import content
from tests.proof.conftest import PROJECT
from tests.proof.engine import Engine

PATCH = PATCHES["sglang-pipeline-first-layer"]
FAULTY = [release for release in RELEASES.values() if release.pipeline_fault]
STAGES, LAYERS = 4, 8  # two layers a stage: stage 2 asks its pool for layer 0 - 4 of 2
SECONDS = 300  # a start takes a quarter of that, alone on two cores


def edited(engine: Engine, release: Release, patched: bool) -> str:
    """Shell that gives the case the file as wanted, whichever of the two lies there; its digest must be the known
    one."""
    file = f"{engine.site(release)}/{PATCH.file}"
    known = PATCH.digests[release.sglang]
    other, wanted = (PATCH.old, PATCH.new) if patched else (PATCH.new, PATCH.old)
    program = (
        "import hashlib\n"
        f"source = open({file!r}).read().replace({other!r}, {wanted!r})\n"
        f"assert hashlib.sha256(source.encode()).hexdigest() == {(known.after if patched else known.before)!r}\n"
        f"open({file!r}, 'w').write(source)\n"
    )
    return f"overlay {file.rpartition('/')[0]}\npython3 - <<'END'\n{program}END"


@pytest.fixture(scope="module")
def started(engine: Engine) -> dict[tuple[str, bool], dict[str, Any]]:
    """(release, patched) -> how its start went, one after another."""
    service = engine.plan.service
    port = service.port + 500
    arguments = {
        "model": engine.plan.weights[0].paths.snapshot,
        "layers": LAYERS,
        "port": port,
        "seconds": SECONDS,
        "arguments": [
            *("--nccl-port", str(port + 1), "--pp-size", str(STAGES), "--device", "cpu", "--load-format", "dummy"),
            *("--attention-backend", "triton", "--grammar-backend", "none", "--max-total-tokens", "4096"),
            # The first question would run Triton's kernels, which want a GPU.
            *("--disable-radix-cache", "--skip-server-warmup"),
        ],
    }
    cases = [
        {
            "name": json.dumps([release.name, patched]),
            "argument": json.dumps(arguments),
            "environment": engine.environment(
                engine.plan,
                release,
                RUNTIME_DIRECTORY="$WORK/home",
                SGLANG_NCCL_SO_PATH="/nowhere/libnccl.so",  # found, it would want a CUDA device for each stage
            ),
            "changes": edited(engine, release, patched),
        }
        for release in FAULTY
        for patched in (False, True)
    ]
    found = engine.run("pipeline_on_node.py", cases, seconds=SECONDS + 60, at_once=1)
    for name, result in found.items():
        assert result["code"] == 0, f"{name}: {result['output'][-3000:]}"
        print(f"{name}: {result['seconds']} s")
    return {tuple(json.loads(name)): json.loads(result["answer"]) for name, result in found.items()}


each_release = pytest.mark.parametrize("release", FAULTY, ids=lambda release: release.name)


def schedulers(seen: dict[str, Any]) -> dict[str, Any]:
    """Process title -> what the scheduler has loaded of the patched file."""
    module = PATCH.file.removesuffix(".py").replace("/", ".")
    return {title: said[module] for title, said in seen["modules"].items() if said[module]}


def failed_stages(log: str) -> set[int]:
    return {int(stage) for stage in re.findall(r"PP(\d)\] Scheduler hit an exception", log)}


@each_release
def test_unpatched_it_dies_as_the_story_tells(
    started: dict[tuple[str, bool], dict[str, Any]], release: Release
) -> None:
    seen = started[release.name, False]
    assert not seen["answered"] and seen["code"], seen["log"][-2000:]
    assert "IndexError: list index out of range" in seen["log"]
    assert re.search(r'triton_backend\.py", line \d+, in __init__\n\s+self\.v_head_dim = ', seen["log"]), seen["log"]
    failed = failed_stages(seen["log"])
    assert failed and failed <= {2, 3}, f"stages {failed} failed, wanted only those whose first layer is 4 or later"


@each_release
def test_patched_all_stages_come_up_and_each_has_the_patch(
    started: dict[tuple[str, bool], dict[str, Any]], release: Release, engine: Engine
) -> None:
    """What each scheduler says of the file that it has loaded is what the verify suite goes by on a node."""
    seen = started[release.name, True]
    assert seen["answered"], seen["log"][-3000:]
    wanted = {
        "file": f"{engine.site(release)}/{PATCH.file}",
        "sha256": PATCH.digests[release.sglang].after,
        "runs": True,
    }
    assert schedulers(seen) == {f"sglang::scheduler_PP{stage}": wanted for stage in range(STAGES)}


@each_release
def test_a_scheduler_without_the_patch_says_so(
    started: dict[tuple[str, bool], dict[str, Any]], release: Release
) -> None:
    """Those that died of it at least: a stage that is late is killed before it has loaded the file."""
    said = schedulers(started[release.name, False]).values()
    assert {entry["sha256"] for entry in said} == {PATCH.digests[release.sglang].before}


@each_release
def test_the_fault_is_named_by_diagnose(started: dict[tuple[str, bool], dict[str, Any]], release: Release) -> None:
    command = [sys.executable, "diagnose.py", "--log", "-", "--json"]
    log = started[release.name, False]["log"]
    done = subprocess.run(command, cwd=PROJECT, input=log, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "pipeline-layer-zero" in done.stdout, done.stdout


def test_the_engine_is_told_to_watch_the_patched_file(engine: Engine) -> None:
    """Were the module's name another than the file's, no scheduler would ever speak of it."""
    assert "sglang.srt.layers.attention.triton_backend" in content.patched_modules(engine.plan)
