"""Memory arithmetic: the story's figures, the published census, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from node.memory import GIB, MIB, fit, graph_batch, problems, stages, wait_seconds, wanted_free, weights_per_gpu
from node.models import DRAFTERS, KIMI_K26_ARCHITECTURE, MODELS
from node.profiles import PROFILES

PRO6000 = [97887] * 8  # MiB, as nvidia-smi reports
B300 = [275040] * 8


def test_the_architecture_has_the_published_bytes() -> None:
    """595,148,192,736 bytes of tensors: the index's total_size, as public model cards quote it."""
    assert KIMI_K26_ARCHITECTURE.total_bytes == pytest.approx(595_148_192_736, rel=0.001)


def test_one_layer_is_as_large_as_one_shard() -> None:
    """Shards 2 to 61 hold one mixture-of-experts layer each, about 9.8 GB."""
    assert KIMI_K26_ARCHITECTURE.moe_layer_bytes == pytest.approx(9.8e9, rel=0.01)


def test_pipeline_stages_are_sglangs() -> None:
    """sglang's get_pp_indices for 61 layers over 8 stages."""
    assert stages(61, 8) == [(0, 7), (7, 7), (14, 7), (21, 8), (29, 8), (37, 8), (45, 8), (53, 8)]
    assert stages(8, 4) == [(0, 2), (2, 2), (4, 2), (6, 2)]


def test_pp8_by_the_storys_arithmetic() -> None:
    """9 GB a layer, 549 GB in all: 63 to 72 GB of weights on a GPU of 96 GB, 24 to 33 GB left."""
    gigabytes_per_layer, memory = 9, 96
    weights = [count * gigabytes_per_layer for _, count in stages(61, 8)]
    assert sum(weights) == 549
    assert (min(weights), max(weights)) == (63, 72)
    left = [memory - used for used in weights]
    assert (min(left), max(left)) == (24, 33)


def test_pp8_by_the_models_bytes_agrees_with_the_story() -> None:
    """The same layout in true bytes, without the embedding of the first and the head of the last stage, within 5
    percent."""
    weights = [used / GIB for used in weights_per_gpu(KIMI_K26_ARCHITECTURE, PROFILES["pp8"])]
    middle = weights[1:-1]
    assert min(middle) == pytest.approx(63, rel=0.05)
    assert max(middle) == pytest.approx(72, rel=0.05)
    assert 96 - max(middle) == pytest.approx(24, rel=0.15)
    assert 96 - min(middle) == pytest.approx(33, rel=0.05)


@pytest.mark.parametrize("name", ["tp8", "ep8", "ep4"])
def test_tensor_and_expert_parallel_spread_all_weights_evenly(name: str) -> None:
    weights = weights_per_gpu(KIMI_K26_ARCHITECTURE, PROFILES[name])
    assert len(weights) == 8 and len(set(weights)) == 1
    assert sum(weights) == pytest.approx(KIMI_K26_ARCHITECTURE.total_bytes, rel=1e-6)


def test_the_fraction_is_what_was_found_to_hold() -> None:
    """0.85 of a 96 GB card held with Kimi K2.6 and its vision tower, 0.90 ran out of memory."""
    assert fit(KIMI_K26_ARCHITECTURE, PROFILES["tp8"], PRO6000).memory_fraction == 0.85


def test_tokens_of_tp8_are_of_the_measured_order() -> None:
    """116,000 tokens in bfloat16 and twice that in fp8 were measured on such a machine at 0.85."""
    bfloat16 = fit(KIMI_K26_ARCHITECTURE, PROFILES["tp8"], PRO6000)
    fp8 = fit(KIMI_K26_ARCHITECTURE, PROFILES["tp8"], PRO6000, kv_cache_dtype="fp8_e4m3")
    assert bfloat16.tokens == pytest.approx(116_000, rel=0.6)
    assert fp8.tokens == pytest.approx(2 * bfloat16.tokens, rel=0.001)


@pytest.mark.parametrize("name", [name for name, profile in PROFILES.items() if profile.device == "cuda"])
@pytest.mark.parametrize("memory_mib", [PRO6000, B300], ids=["pro6000", "b300"])
def test_every_profile_fits_both_kinds_of_node(name: str, memory_mib: list[int]) -> None:
    profile = PROFILES[name]
    drafter = DRAFTERS[MODELS["kimi-k2.6"].drafters[0]] if profile.speculative == "dflash" else None
    result = fit(KIMI_K26_ARCHITECTURE, profile, memory_mib, drafter=drafter)
    assert not problems(result, profile, None)
    for gpu in result.gpus:
        assert gpu.weights + gpu.kv_cache + gpu.reserve == gpu.memory


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    """80 GB cards: the weights alone leave nothing."""
    result = fit(KIMI_K26_ARCHITECTURE, PROFILES["tp8"], [81559] * 8)
    (problem,) = problems(result, PROFILES["tp8"], None)
    assert result.lines()[0] in problem.found and "weights 69." in problem.found
    assert "Fix: " in str(problem)


def test_a_context_longer_than_the_cache_is_refused() -> None:
    result = fit(KIMI_K26_ARCHITECTURE, PROFILES["tp8"], PRO6000)
    assert not problems(result, PROFILES["tp8"], result.tokens)
    (problem,) = problems(result, PROFILES["tp8"], result.tokens + 1)
    assert str(result.tokens + 1) in problem.wanted


def test_a_drafter_takes_its_share() -> None:
    profile = PROFILES["ep8-dflash"]
    without = fit(KIMI_K26_ARCHITECTURE, profile, PRO6000)
    drafted = fit(KIMI_K26_ARCHITECTURE, profile, PRO6000, drafter=DRAFTERS["kimi-k2.6-dflash"])
    assert drafted.gpus[0].weights - without.gpus[0].weights == pytest.approx(6_958_445_568 / 8, abs=8)
    assert drafted.tokens < without.tokens


def test_an_eager_profile_leaves_more_for_the_cache() -> None:
    assert (
        fit(KIMI_K26_ARCHITECTURE, PROFILES["tp8-eager"], PRO6000).tokens
        > fit(KIMI_K26_ARCHITECTURE, PROFILES["tp8"], PRO6000).tokens
    )


def test_a_pipeline_stage_caches_its_own_layers_only() -> None:
    result = fit(KIMI_K26_ARCHITECTURE, PROFILES["pp8"], PRO6000)
    assert [round(gpu.kv_bytes_per_token / 1152) for gpu in result.gpus] == [7, 7, 7, 8, 8, 8, 8, 8]


def test_weights_follow_the_architecture() -> None:
    """A model of half the experts takes about half the memory: nothing is a constant of Kimi."""
    half = replace(KIMI_K26_ARCHITECTURE, experts=192)
    assert half.total_bytes / KIMI_K26_ARCHITECTURE.total_bytes == pytest.approx(0.52, abs=0.01)


@pytest.mark.parametrize(
    ("name", "gib", "tokens", "limit", "expected"),
    [
        ("tp8", 95, 200_000, None, 512),
        ("pp8", 95, 700_000, None, 256),
        ("pp8", 268, 700_000, None, 512),
        ("tp8", 95, 32_768, None, 128),
        ("tp8", 95, 200_000, 32, 32),
        ("tp8", 95, 32_768, 2048, 128),
        ("tp8", 95, 100, None, 1),
        ("tp8-eager", 95, 200_000, 32, 0),
    ],
)
def test_the_largest_graph_is_what_the_engine_takes_and_the_cache_holds(
    name: str, gib: int, tokens: int, limit: int | None, expected: int
) -> None:
    assert graph_batch(PROFILES[name], gib << 30, tokens, limit) == expected


def test_a_tight_cache_captures_fewer_graphs() -> None:
    roomy = fit(KIMI_K26_ARCHITECTURE, PROFILES["tp8"], PRO6000)
    tight = fit(KIMI_K26_ARCHITECTURE, PROFILES["tp8"], PRO6000, memory_fraction=0.75)
    assert roomy.graph_batch == 512 > tight.graph_batch == tight.tokens // 256


@pytest.mark.parametrize("name", [name for name, profile in PROFILES.items() if profile.device == "cuda"])
def test_what_must_be_free_before_a_start_is_what_the_plan_takes_and_no_more_than_there_is(name: str) -> None:
    """More could never be free: a GPU at rest has some of it in use by its driver. Less would let a start eat into the
    KV cache that the plan promises."""
    result = fit(KIMI_K26_ARCHITECTURE, PROFILES[name], PRO6000)
    wanted = wanted_free(result)
    assert wanted.keys() == {gpu.gpu for gpu in result.gpus}
    for gpu in result.gpus:
        at_rest = gpu.memory / MIB - 1112
        assert (gpu.weights + max(0, gpu.kv_cache)) / MIB < wanted[gpu.gpu] < at_rest


@pytest.mark.parametrize("start_timeout", [60, 200, 3600])
def test_waiting_for_gpu_memory_ends_before_systemd_ends_it(start_timeout: int) -> None:
    assert 0 < wait_seconds(start_timeout) < start_timeout
