"""What is compiled before a node serves: the table, held against the sources of each release."""

from __future__ import annotations

import ast

import pytest

from node import kernels
from node.models import MODELS
from node.releases import RELEASES
from tests.unit.test_patches import unpacked

KIMI = MODELS["kimi-k2.6"]


def names(release: str, compute_capability: str, model: str = "kimi-k2.6") -> list[str]:
    calls = kernels.modules(RELEASES[release], compute_capability, MODELS[model], "auto")
    return [call.source.rpartition(".")[2] for call in calls]


@pytest.mark.parametrize("release", RELEASES)
def test_int4_experts_are_marlin_s_on_sm_120_and_nvidia_s_own_on_sm_103(release: str) -> None:
    assert "moe_wna16_marlin" in names(release, "12.0") and "gptq_marlin_repack" in names(release, "12.0")
    assert "moe_wna16_marlin" not in names(release, "10.3") and "modules" in names(release, "10.3")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("compute_capability", ["12.0", "10.3"])
def test_what_a_short_question_does_not_reach_is_compiled(release: str, compute_capability: str) -> None:
    """Found by reading: the first prefill of 768 tokens or more compiles this one, long after a server is ready."""
    assert "set_mla_kv_buffer" in names(release, compute_capability)


@pytest.mark.parametrize("release", RELEASES)
def test_a_model_of_unknown_shape_is_given_what_every_model_needs(release: str) -> None:
    assert {"sampling", "clamp_position"} <= set(names(release, "12.0", "lab-tiny"))
    assert "moe_wna16_marlin" not in names(release, "12.0", "lab-tiny")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("compute_capability", ["12.0", "10.3", "10.0", "9.0"])
def test_no_module_is_asked_for_twice_and_none_with_a_hole_in_it(release: str, compute_capability: str) -> None:
    calls = kernels.modules(RELEASES[release], compute_capability, KIMI, "auto")
    assert len(set(calls)) == len(calls)
    assert not [call for call in calls if any("{" in str(argument) for argument in call.arguments)]


def test_rows_of_the_cache_are_as_wide_as_its_type() -> None:
    """512 latent values and 64 rotary ones: two bytes each, or one in FP8."""
    for kv_cache_dtype, wanted in (("auto", (1024, 128, True)), ("fp8_e4m3", (512, 64, True))):
        calls = kernels.modules(RELEASES["sglang-0.5.17"], "12.0", KIMI, kv_cache_dtype)
        assert next(call.arguments for call in calls if call.source.endswith("set_mla_kv_buffer")) == wanted


def test_nvidia_s_compiled_kernels_are_fetched_where_they_are_used_and_the_lock_has_none() -> None:
    wanting = {
        (release.name, compute_capability)
        for release in RELEASES.values()
        for compute_capability in ("9.0", "10.0", "10.3", "12.0")
        if kernels.wants_cubins(release, compute_capability, KIMI)
    }
    newer = ("sglang-0.5.17", "sglang-0.5.23")
    assert wanting == {(release, compute) for release in newer for compute in ("10.0", "10.3")}
    assert not kernels.wants_cubins(RELEASES["sglang-0.5.17"], "10.3", MODELS["lab-tiny"])


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_every_row_is_a_function_of_its_release_that_takes_these_arguments(release: str) -> None:
    for row in kernels.MODULES:
        if release not in row.releases:
            continue
        package = "flashinfer-python" if row.source.startswith("flashinfer.") else "sglang"
        file = unpacked(release, package) / (row.source.replace(".", "/") + ".py")
        (function,) = [
            node
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name == row.function
        ]
        least = len(function.args.args) - len(function.args.defaults)
        assert least <= len(row.arguments) <= len(function.args.args), (row, function.lineno)


@pytest.mark.slow
@pytest.mark.parametrize("release", ["sglang-0.5.17", "sglang-0.5.23"])
def test_the_groups_that_are_fetched_are_groups_of_flashinfer_s(release: str) -> None:
    tree = ast.parse((unpacked(release, "flashinfer-python") / "flashinfer/artifacts.py").read_text())
    for name in ("ArtifactPath", "CheckSumHash"):
        (kind,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        fields = {ast.unparse(node.target) for node in kind.body if isinstance(node, ast.AnnAssign)}
        assert set(kernels.CUBIN_GROUPS) <= fields
