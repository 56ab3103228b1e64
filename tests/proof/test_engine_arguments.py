"""Every profile's arguments, on both kinds of node, before the argument parser and the checks of every release itself.

Needs a deployed lab machine. The parser is the real one of the real wheel, over the deployed environment; the machine's
GPUs are described, so what SGLang decides by their kind it decides as there.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from node.hardware import GPU_MODELS
from node.layout import WeightsPaths
from node.manifest import File, Manifest
from node.models import DRAFTERS, KIMI_K26_ARCHITECTURE, MODELS, Drafter, Model
from node.plan import Plan, make
from node.profiles import BACKENDS, PROFILES
from node.releases import RELEASES, Release
from node.render import read_file
from tests.proof.engine import Engine, options_of

GPUS = ("rtx-pro-6000-blackwell-server", "b300")
ON_GPUS = [name for name, profile in PROFILES.items() if profile.device == "cuda"]
A = KIMI_K26_ARCHITECTURE

# config.json as SGLang reads it. Sizes are node.models'; the rest is what DeepSeek-V3's architecture asks for.
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "vision_config": {"model_type": "kimi_k25"},
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": A.hidden,
        "intermediate_size": A.dense_intermediate,
        "moe_intermediate_size": A.expert_intermediate,
        "num_hidden_layers": A.layers,
        "first_k_dense_replace": A.dense_layers,
        "n_routed_experts": A.experts,
        "n_shared_experts": A.shared_experts,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_attention_heads": A.heads,
        "num_key_value_heads": A.heads,
        "q_lora_rank": A.q_lora_rank,
        "kv_lora_rank": A.kv_lora_rank,
        "qk_nope_head_dim": A.qk_nope_head,
        "qk_rope_head_dim": A.qk_rope_head,
        "v_head_dim": A.v_head,
        "vocab_size": A.vocabulary,
        "max_position_embeddings": MODELS["kimi-k2.6"].context_tokens,
        "num_nextn_predict_layers": 0,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "strategy": "group",
                        "group_size": 32,
                        "symmetric": True,
                        "dynamic": False,
                    },
                }
            },
        },
    },
}
DRAFTER = DRAFTERS["kimi-k2.6-dflash"]
DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": A.hidden,
    "num_hidden_layers": DRAFTER.layers,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": A.vocabulary,
    "max_position_embeddings": MODELS["kimi-k2.6"].context_tokens,
    "block_size": DRAFTER.block_size,
    "num_target_layers": A.layers,
    "dflash_config": {"mask_token_id": A.vocabulary - 1, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
}

ASKED = (
    *("attention_backend", "moe_a2a_backend", "tp_size", "pp_size", "ep_size", "mem_fraction_static"),
    *("disable_cuda_graph", "speculative_algorithm", "speculative_num_draft_tokens"),
    *("speculative_draft_attention_backend", "trust_remote_code", "tool_call_parser", "reasoning_parser"),
)
EVERY_KEY = "ep8-dflash with every key"
OWNERS: dict[str, Any] = {
    "context_length": 65536,
    "max_running_requests": 32,
    "kv_cache_dtype": "fp8_e4m3",
    "served_model_name": "kimi",
    "memory_fraction": 0.84,
}
OWNED = ("context_length", "max_running_requests", "kv_cache_dtype", "served_model_name")


@functools.cache
def planned(release: str, gpu: str, profile: str, **more: Any) -> Plan:
    """The Plan of a node of eight of these GPUs. more: further keys of its inventory."""

    def read(path: str) -> bytes:
        entries: list[Model | Drafter] = [*MODELS.values(), *DRAFTERS.values()]
        for entry in entries:
            if path == f"files/manifests/{entry.key}.json":
                revision = entry.revision or "d" * 40
                return Manifest(entry.repository, revision, (File("config.json", 1, "a" * 64),)).dumps().encode()
        return read_file(path)

    data: dict[str, Any] = {"gpu": gpu, "gpu_count": 8, "weights_directory": "/srv/weights"}
    data |= {"release": release, "profile": profile, "drafter": DRAFTER.key if "dflash" in profile else None}
    data |= {"hub_token_file": "token", **more}
    made = make("gpu-1", {key: value for key, value in data.items() if value is not None}, read, None)
    assert isinstance(made, Plan), [str(problem) for problem in made]
    return made


def snapshots() -> str:
    """Shell that lays the two configurations where the plans' arguments say that the weights are."""
    lines = ["overlay /srv/weights", "overlay /etc"]
    for entry, config in ((MODELS["kimi-k2.6"], KIMI), (DRAFTER, DRAFT)):
        folder = WeightsPaths("/srv/weights", entry.repository, entry.revision or "d" * 40).snapshot
        lines += [f"mkdir -p {folder}", f"cat > {folder}/config.json <<'END'\n{json.dumps(config)}\nEND"]
    return "\n".join(lines)


def described(gpu: str) -> str:
    """Shell that has the lab's nvidia-smi print such a machine."""
    return f"""echo '{{"model": "{GPU_MODELS[gpu].pci_names[0]}"}}' > /etc/nvidia-smi-stand-in.json"""


def changed(words: tuple[str, ...], **values: str) -> list[str]:
    """An argument vector with other values for some of its options."""
    made = list(words)
    for option, value in values.items():
        made[made.index("--" + option.replace("_", "-")) + 1] = value
    return made


def wrong(plans: dict[str, Plan], release: Release) -> dict[str, list[str]]:
    """Vectors that each release must refuse: were one accepted, the acceptance of the others would say nothing."""
    vector = {name: plan.service.arguments[3:] for name, plan in plans.items()}
    limit = "--cuda-graph-max-bs"
    return {
        "an unknown option": [*vector["tp8"], "--tensor-paralel-size", "8"],
        "an unknown attention backend": changed(vector["tp8"], attention_backend="tritonn"),
        "a value of another type": changed(vector["tp8"], tp_size="eight"),
        "DFLASH in a pipeline": changed(vector["ep8-dflash"], pp_size="2"),
        "DDTREE": changed(vector["ep8-dflash"], speculative_algorithm="DDTREE"),
        **({"a name that is no longer one": [*vector["tp8"], limit, "8"]} if release.name == "sglang-0.5.23" else {}),
    }


@pytest.fixture(scope="module")
def judged(engine: Engine) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(release, gpu, profile or what is wrong) -> what the release says of the vector. Two releases run at a time."""
    cases = []
    for release in RELEASES.values():
        for gpu in GPUS:
            plans = {profile: planned(release.name, gpu, profile) for profile in ON_GPUS}
            vectors = {profile: list(plan.service.arguments[3:]) for profile, plan in plans.items()}
            vectors[EVERY_KEY] = list(planned(release.name, gpu, "ep8-dflash", **OWNERS).service.arguments[3:])
            vectors |= wrong(plans, release) if gpu == GPUS[0] else {}
            model = GPU_MODELS[gpu]
            asked = {
                "gpu": model.names[0],
                "capability": [int(part) for part in model.compute_capability.split(".")],
                "memory_mib": model.memory_mib,
                "count": 8,
                "vectors": vectors,
                "asked": ASKED + OWNED,
            }
            cases.append(
                {
                    "name": f"{release.name} {gpu}",
                    "argument": json.dumps(asked),
                    "environment": engine.environment(plans["tp8"], release),
                    "changes": f"{snapshots()}\n{described(gpu)}",
                }
            )
    found = engine.run("arguments_on_node.py", cases)
    judged = {}
    for name, result in found.items():
        assert result["code"] == 0, f"{name}: {result['output'][-3000:]}"
        release_name, gpu = name.split()
        for vector, said in json.loads(result["answer"]).items():
            judged[release_name, gpu, vector] = said
        print(f"{name}: {result['seconds']} s")
    return judged


@pytest.mark.parametrize("profile", ON_GPUS)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("release", RELEASES)
def test_the_release_accepts_what_the_plan_asks_and_changes_none_of_it(
    judged: dict[tuple[str, str, str], dict[str, Any]], release: str, gpu: str, profile: str
) -> None:
    said = judged[release, gpu, profile]
    assert "resolved" in said, said
    resolved, entry = said["resolved"], PROFILES[profile]
    backends = BACKENDS[GPU_MODELS[gpu].compute_capability]
    given = options_of(planned(release, gpu, profile).service.arguments)
    dflash = entry.speculative == "dflash"
    assert {name: resolved[name] for name in ASKED} == {
        "attention_backend": backends.attention,
        "moe_a2a_backend": "none",
        "tp_size": entry.tensor_parallel,
        "pp_size": entry.pipeline_parallel,
        "ep_size": entry.expert_parallel,
        "mem_fraction_static": float(given["--mem-fraction-static"]),
        "disable_cuda_graph": not entry.cuda_graphs,
        "speculative_algorithm": "DFLASH" if dflash else None,
        "speculative_num_draft_tokens": DRAFTER.block_size if dflash else None,
        "speculative_draft_attention_backend": backends.draft_attention if dflash else None,
        "trust_remote_code": True,
        "tool_call_parser": "kimi_k2",
        "reasoning_parser": "kimi_k2",
    }
    fit = planned(release, gpu, profile).fit
    assert fit is not None and (not entry.cuda_graphs or said["largest graph"] == fit.graph_batch), said


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("release", RELEASES)
def test_the_release_accepts_what_an_owner_may_set_besides(
    judged: dict[tuple[str, str, str], dict[str, Any]], release: str, gpu: str
) -> None:
    """Every inventory key that becomes an argument, at once; one of them has another name in the newest release."""
    said = judged[release, gpu, EVERY_KEY]
    assert "resolved" in said, said
    resolved = said["resolved"]
    assert resolved["mem_fraction_static"] == OWNERS["memory_fraction"]
    assert resolved["context_length"] == OWNERS["context_length"]
    assert resolved["max_running_requests"] == OWNERS["max_running_requests"]
    assert resolved["kv_cache_dtype"] == OWNERS["kv_cache_dtype"]
    assert resolved["served_model_name"] == OWNERS["served_model_name"]
    assert said["largest graph"] == OWNERS["max_running_requests"]


REFUSED = {
    "an unknown option": "argument parser",
    "an unknown attention backend": "argument parser",
    "a value of another type": "argument parser",
    "DFLASH in a pipeline": "pp_size == 1",
    "DDTREE": "DDTREE",
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("release", RELEASES)
def test_the_release_refuses_what_is_wrong(
    judged: dict[tuple[str, str, str], dict[str, Any]], release: str, what: str
) -> None:
    """The same words with one of them changed, so that it is that one which is refused."""
    said = judged[release, GPUS[0], what]
    assert REFUSED[what] in said.get("refused", f"accepted: {said}"), said


def test_the_newest_release_refuses_the_old_name_of_the_limit_of_cuda_graphs(
    judged: dict[tuple[str, str, str], dict[str, Any]],
) -> None:
    """Which of its two successors an abbreviation means, its parser cannot tell: why each release has a dialect."""
    assert judged["sglang-0.5.23", GPUS[0], "a name that is no longer one"]["refused"].startswith("argument parser")
