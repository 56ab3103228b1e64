"""Patches: what is decided from a host's evidence, on small sources; and that each cures its fault in real wheels."""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from uv import find_uv_bin

from node.patches import PATCHES, Digests, Evidence, Patch, apply, bears_load, decide, sha256, wanted_digest
from node.releases import RELEASES

PROJECT = Path(__file__).resolve().parents[2]

BEFORE = b"def first():\n    return 0\n\n\ndef other():\n    return 0  # stays\n"
AFTER = b"def first():\n    return start\n\n\ndef other():\n    return 0  # stays\n"
UPSTREAM = b"def first():\n    return begin\n"

SIMPLE = Patch(
    id="small",
    title="returns the start",
    package="engine",
    file="engine/core.py",
    versions=">=1.0,<2.0",
    nvcc_below=None,
    digests={"1.5": Digests(sha256(BEFORE), sha256(AFTER))},
    upstream={"2.0": sha256(UPSTREAM)},
    old="def first():\n    return 0\n",
    new="def first():\n    return start\n",
    retired_by="engine 2.0",
    shows="an IndexError",
    source="nobody",
)
BY_COMPILER = dataclasses.replace(SIMPLE, id="by-compiler", nvcc_below="12.9")


def evidence(version: str | None = "1.5", content: bytes | None = BEFORE, nvcc: str | None = "13.0") -> Evidence:
    return Evidence(version, sha256(content) if content is not None else None, nvcc)


def test_the_edit_changes_that_text_and_nothing_else() -> None:
    assert apply(SIMPLE, BEFORE) == AFTER


@pytest.mark.parametrize(
    "source", [b"nothing of it\n", BEFORE + BEFORE, AFTER], ids=["absent", "twice", "done already"]
)
def test_a_source_that_does_not_hold_the_text_exactly_once_is_refused(source: bytes) -> None:
    with pytest.raises(ValueError, match=r"engine/core\.py: found the text of patch small [02] times, wanted it once"):
        apply(SIMPLE, source)


def test_the_known_original_of_a_faulty_version_is_patched() -> None:
    assert decide(SIMPLE, evidence()).action == "apply"


def test_a_patched_file_is_left_alone() -> None:
    assert decide(SIMPLE, evidence(content=AFTER)).action == "already"


@pytest.mark.parametrize("content", [BEFORE + b"\n", BEFORE.replace(b"\n", b"\r\n"), UPSTREAM, None])
def test_a_file_that_is_neither_original_nor_result_is_a_conflict_that_names_all_three(content: bytes | None) -> None:
    decision = decide(SIMPLE, evidence(content=content))
    assert decision.action == "conflict"
    assert decision.reason.startswith("engine/core.py: found sha256 ")
    assert sha256(BEFORE) in decision.reason and sha256(AFTER) in decision.reason
    assert (sha256(content) if content is not None else "no file") in decision.reason
    assert "Fix: " in decision.reason


def test_a_version_that_upstream_has_mended_needs_no_patch_and_says_which_change_mended_it() -> None:
    decision = decide(SIMPLE, evidence("2.0", UPSTREAM))
    assert decision.action == "not needed"
    assert "engine 2.0" in decision.reason


def test_an_edited_file_is_found_also_where_no_patch_is_needed() -> None:
    assert decide(SIMPLE, evidence("2.0", UPSTREAM + b"#")).action == "conflict"
    assert decide(BY_COMPILER, evidence(content=BEFORE + b"#", nvcc="13.0")).action == "conflict"


def test_a_faulty_version_whose_digests_nobody_wrote_down_is_a_conflict() -> None:
    decision = decide(SIMPLE, evidence("1.6"))
    assert decision.action == "conflict"
    assert "engine 1.6" in decision.reason and "Fix: add its digests" in decision.reason


def test_a_package_that_is_not_there_is_a_conflict() -> None:
    assert decide(SIMPLE, evidence(version=None)).action == "conflict"


@pytest.mark.parametrize(
    ("nvcc", "action"),
    [("12.4", "apply"), ("12.8", "apply"), ("12.9", "not needed"), ("12.10", "not needed"), ("13.0", "not needed")],
)
def test_a_fault_of_old_compilers_is_patched_for_those_only(nvcc: str, action: str) -> None:
    decision = decide(BY_COMPILER, evidence(nvcc=nvcc))
    assert decision.action == action
    assert f"nvcc {nvcc}" in decision.reason


def test_without_a_compiler_nothing_is_decided_that_depends_on_it() -> None:
    decision = decide(BY_COMPILER, evidence(nvcc=None))
    assert decision.action == "conflict"
    assert "found no compiler" in decision.reason and "Fix: " in decision.reason
    assert decide(SIMPLE, evidence(nvcc=None)).action == "apply"


def test_a_patch_that_is_in_though_it_is_not_needed_is_said_to_be_in() -> None:
    decision = decide(BY_COMPILER, evidence(content=AFTER, nvcc="13.0"))
    assert decision.action == "already"
    assert "all the same" in decision.reason


def test_the_wanted_digest_follows_the_decision() -> None:
    assert wanted_digest(SIMPLE, "1.5", "13.0") == sha256(AFTER)
    assert wanted_digest(BY_COMPILER, "1.5", "13.0") == sha256(BEFORE)
    assert wanted_digest(BY_COMPILER, "1.5", "12.8") == sha256(AFTER)
    assert wanted_digest(SIMPLE, "2.0", "13.0") == sha256(UPSTREAM)
    assert wanted_digest(SIMPLE, "3.0", "13.0") is None


@pytest.mark.parametrize("patch", PATCHES.values(), ids=lambda patch: patch.id)
def test_every_patch_is_told_in_the_documentation(patch: Patch) -> None:
    page = (PROJECT / "docs" / "patches.md").read_text()
    assert f"`{patch.id}`" in page
    assert patch.file in page


def test_only_a_file_of_python_is_a_module() -> None:
    modules = {patch.id: patch.module for patch in PATCHES.values()}
    assert modules["sglang-pipeline-first-layer"] == "sglang.srt.layers.attention.triton_backend"
    assert modules["sglang-activation-return-type"] is None


@pytest.mark.parametrize("patch", PATCHES.values(), ids=lambda patch: patch.id)
def test_known_versions_and_version_range_agree(patch: Patch) -> None:
    assert all(bears_load(patch, version, None)[0] for version in patch.digests)
    assert not any(bears_load(patch, version, None)[0] for version in patch.upstream)


def test_the_default_toolkit_needs_one_patch_of_the_default_release_and_none_of_the_newest() -> None:
    needed = {
        name: [p for p in r.patches if bears_load(PATCHES[p], r.pins[PATCHES[p].package], r.toolkit.nvcc)[0]]
        for name, r in RELEASES.items()
    }
    assert needed == {
        "sglang-0.5.12.post1": ["sglang-pipeline-first-layer", "sglang-activation-return-type"],
        "sglang-0.5.17": ["sglang-pipeline-first-layer"],
        "sglang-0.5.23": [],
    }


# The real wheels, out of the locks.


def unpacked(release: str, distribution: str) -> Path:
    """A distribution of a release as its own wheel unpacks, in the project's cache folder; its hash is the lock's."""
    lock = (PROJECT / RELEASES[release].lock).read_text()
    lines = lock.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"{distribution}=="))
    last = next(number for number in range(first, len(lines)) if not lines[number].endswith("\\"))
    entry = "\n".join(lines[first : last + 1]) + "\n"
    cache = Path(os.environ.get("KIMI_NODES_CACHE") or Path.home() / ".cache" / "kimi-nodes")
    folder = cache / "unpacked" / f"{release}-{distribution}"
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "entry.txt").write_text(entry)
        subprocess.run(
            [
                *(find_uv_bin(), "pip", "install", "--quiet", "--no-deps", "--no-config", "--require-hashes"),
                *("--only-binary", ":all:", "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_34"),
                *("--target", str(folder), "--requirement", str(folder / "entry.txt")),
            ],
            env={"UV_CACHE_DIR": str(cache / "uv"), "UV_SYSTEM_CERTS": "1", **os.environ},
            check=True,
        )
        (folder / "complete").touch()
    return folder


REAL = [
    pytest.param(release.name, patch, id=f"{release.name}-{patch.id}", marks=pytest.mark.slow)
    for release in RELEASES.values()
    for patch in map(PATCHES.__getitem__, release.patches)
]


@pytest.mark.parametrize(("release", "patch"), REAL)
def test_the_wheel_s_file_has_the_recorded_digests_and_compiles_patched(release: str, patch: Patch) -> None:
    version = RELEASES[release].pins[patch.package]
    source = (unpacked(release, patch.package) / patch.file).read_bytes()
    if version in patch.upstream:
        assert sha256(source) == patch.upstream[version]
        with pytest.raises(ValueError, match="0 times"):
            apply(patch, source)
        return
    assert sha256(source) == patch.digests[version].before
    patched = apply(patch, source)
    assert sha256(patched) == patch.digests[version].after
    if patch.module:
        compile(patched, patch.file, "exec")


class Pool:
    """A pipeline stage's part of the key-value pool, indexed as SGLang's memory_pool.py does."""

    def __init__(self, start_layer: int, layers: int) -> None:
        self.start_layer = start_layer
        self.buffers = [SimpleNamespace(shape=(64, 1, 512)) for _ in range(layers)]

    def get_value_buffer(self, layer_id: int) -> Any:
        return self.buffers[layer_id - self.start_layer]


def value_dimension(source: bytes, pool: Pool) -> int:
    """What the real backend's own statement gives on this pool."""
    statements = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "self.v_head_dim"
        and "get_value_buffer(" in ast.unparse(node.value)
    ]
    assert len(statements) == 1, "the backend reads the value dimension in one place"
    return int(eval(ast.unparse(statements[0].value), {"model_runner": SimpleNamespace(token_to_kv_pool=pool)}))


# 61 layers over eight stages, as SGLang divides them.
STAGES = [(0, 7), (7, 7), (14, 7), (21, 8), (29, 8), (37, 8), (45, 8), (53, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_pipeline_stages_two_to_seven_fail_exactly_where_the_patch_bears_load(release: str) -> None:
    patch = PATCHES["sglang-pipeline-first-layer"]
    source = (unpacked(release, "sglang") / patch.file).read_bytes()
    failing = []
    for stage, (start, layers) in enumerate(STAGES):
        try:
            assert value_dimension(source, Pool(start, layers)) == 512
        except IndexError:
            failing.append(stage)
    assert failing == ([2, 3, 4, 5, 6, 7] if RELEASES[release].pipeline_fault else [])
    if RELEASES[release].pipeline_fault:
        assert [value_dimension(apply(patch, source), Pool(*stage)) for stage in STAGES] == [512] * 8


def check_of_architectures(core: Path, context: Path) -> str:
    """Run the real check as a server on sm_120 with nvcc 12.8 meets it; "passes", or what it raises.

    FlashInfer's own CompilationContext is made twice, as it is there: first at import, when the compiler is too old for
    the device, then after SGLang has named the architecture in the environment. torch and the compiler's version stand
    in.
    """
    program = (
        "import os, sys, types, ast\n"
        "torch = types.ModuleType('torch')\n"
        "torch.cuda = types.SimpleNamespace(device_count=lambda: 1, get_device_capability=lambda device: (12, 0))\n"
        "sys.modules['torch'] = torch\n"
        "for name in ('flashinfer', 'flashinfer.jit', 'flashinfer.jit.cpp_ext'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "sys.modules['flashinfer.jit.cpp_ext'].is_cuda_version_at_least = lambda wanted: wanted <= '12.8'\n"
        "core, context = open(sys.argv[1]).read(), open(sys.argv[2]).read()\n"
        "names = {}\n"
        "exec(compile(context, 'compilation_context.py', 'exec'), names)\n"
        "names['current_compilation_context'] = names['CompilationContext']()\n"
        "assert not names['current_compilation_context'].TARGET_CUDA_ARCHS\n"
        "os.environ['FLASHINFER_CUDA_ARCH_LIST'] = '12.0a'\n"
        "functions = [node for node in ast.parse(core).body if isinstance(node, ast.FunctionDef)]\n"
        "check = next(function for function in functions if function.name == 'check_cuda_arch')\n"
        "exec(compile(ast.Module([check], []), 'core.py', 'exec'), names)\n"
        "try:\n"
        "    names['check_cuda_arch']()\n"
        "    print('passes')\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLASHINFER_")}
    run = subprocess.run(
        [sys.executable, "-c", program, str(core), str(context)], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("release", ["sglang-0.5.12.post1", "sglang-0.5.17"])
def test_the_architecture_check_refuses_sm_120_on_an_old_compiler_and_passes_patched(
    release: str, tmp_path: Path
) -> None:
    patch = PATCHES["flashinfer-empty-architectures"]
    folder = unpacked(release, "flashinfer-python")
    original, context = folder / patch.file, folder / "flashinfer" / "compilation_context.py"
    patched = tmp_path / "core.py"
    patched.write_bytes(apply(patch, original.read_bytes()))
    refusal = "FlashInfer requires GPUs with sm75 or higher"
    assert check_of_architectures(original, context) == refusal
    assert check_of_architectures(patched, context) == "passes"
