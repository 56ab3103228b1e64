"""What a release compiles at first use, as data: the modules that are compiled before it serves, and what cannot be.

A module that nobody has compiled is compiled by the first request that needs it, in front of its user. Which ones a
node needs follows from release, architecture and model; the rows below were read in the sources of each release along
the path of Kimi K2.6's own calls (models/kimi_k25.py, models/deepseek_v2.py and what they call). They are the same for
every profile, so that a switch of profiles finds its modules there. A short question reaches most of them, but not
all: `set_mla_kv_buffer` is compiled by the first prefill of 768 tokens or more (kernels/ops/kvcache/mla_buffer.py,
_TMA_BULK_STORE_MIN_LOCS), whenever that comes.

Not here, because nothing can compile it without the GPU or keep it for the next process:

- Triton's kernels: compiled for the device and the shapes they meet, kept in TRITON_CACHE_DIR. CUDA graph capture and
  the readiness question meet them before a user does.
- CuTe DSL's (FlashInfer's norms; the fused QKV projection on sm_120): compiled in each process, kept nowhere in
  0.5.12.post1 and 0.5.17; CUDA graph capture meets them.
- What depends on the profile and is met before a server is ready: the all-reduce of NVLink machines (one module of
  TVM-FFI, met by CUDA graph capture), what a drafter adds.
- torch.compile: no profile turns it on. DeepGEMM: no layer of an INT4 checkpoint is FP8, so nothing calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from node.memory import BYTES_PER_KV_VALUE
from node.models import Model
from node.releases import Release

Argument = str | int | bool

EVERY = ("sglang-0.5.12.post1", "sglang-0.5.17", "sglang-0.5.23")
# Groups of flashinfer/artifacts.py that the back ends of sm_100 and sm_103 load from: attention, the experts' batched
# products, single products. Not DEEPGEMM (FP8) and DSL_FMHA, which no path of Kimi K2.6 calls.
CUBIN_GROUPS = ("TRTLLM_GEN_FMHA", "TRTLLM_GEN_BMM", "TRTLLM_GEN_GEMM")
CUBIN_BYTES = 6 * 10**9  # free before they are fetched: those of flashinfer 0.6.11.post1 take 1.47 GB (measured)

MARLIN = ("9.0", "12.0")  # INT4 experts by Marlin; SGLang's own choice where FlashInfer has none for the architecture
TRTLLM = ("10.0", "10.3")  # INT4 experts and attention by kernels that NVIDIA ships compiled (trtllm-gen)


@dataclass(frozen=True)
class Module:
    """One module of a release, made by one call of the release's own.

    releases: which have it so. source, function: what is called; a function of FlashInfer's returns what to build, one
    of SGLang's builds and loads it through TVM-FFI. arguments: as the engine gives them; a text starting with
    "torch." is that attribute of torch, one in braces a number of the model's (see `_numbers`). architectures:
    compute capabilities, () for all. shaped: only for a model whose architecture node.models holds, which gives the
    numbers: Kimi K2.6 with INT4 experts. cubins: includes headers of the kernels that NVIDIA ships compiled, which must
    be there first.
    """

    releases: tuple[str, ...]
    source: str
    function: str
    arguments: tuple[Argument, ...] = ()
    architectures: tuple[str, ...] = ()
    shaped: bool = True
    cubins: bool = False


_TORCH_BFLOAT16 = "torch.bfloat16"
_OLD, _NEW, _NEWEST = EVERY
_JIT = "sglang.jit_kernel"  # where 0.5.12.post1 has what later ones have below sglang.kernels.ops
_OPS = "sglang.kernels.ops"

MODULES: tuple[Module, ...] = (
    # Any model: sampling with top_p, and the position of each next token (forward_batch_info.py).
    Module(EVERY, "flashinfer.jit.sampling", "gen_sampling_module", shaped=False),
    Module((_OLD,), f"{_JIT}.clamp_position", "_jit_clamp_position_module", ("torch.int64",), shaped=False),
    Module(
        (_NEW, _NEWEST),
        f"{_OPS}.attention.clamp_position",
        "_jit_clamp_position_module",
        ("torch.int64",),
        shaped=False,
    ),
    # Overlap scheduling (managers/overlap_utils.py); later releases have no such kernel.
    Module(
        (_OLD,),
        f"{_JIT}.resolve_future_token_ids",
        "_jit_resolve_future_token_ids_module",
        ("torch.int64",),
        shaped=False,
    ),
    # Multi-head latent attention: rotary embedding of interleaved pairs, and long prefills into the KV cache.
    Module((_OLD,), f"{_JIT}.rope", "_jit_fused_rope_module", (False, "{rope_head}", _TORCH_BFLOAT16)),
    Module(
        (_NEW, _NEWEST),
        f"{_OPS}.attention.rope",
        "_jit_fused_rope_module",
        (False, "{rope_head}", _TORCH_BFLOAT16, _TORCH_BFLOAT16),
    ),
    Module(
        (_OLD,),
        f"{_JIT}.set_mla_kv_buffer",
        "_jit_set_mla_kv_buffer_module",
        ("{latent_bytes}", "{rope_bytes}", True),
    ),
    Module(
        (_NEW, _NEWEST),
        f"{_OPS}.kvcache.set_mla_kv_buffer",
        "set_mla_kv_buffer_module",
        ("{latent_bytes}", "{rope_bytes}", True),
    ),
    # silu(gate) * up, of dense and shared experts as of Marlin's.
    Module((_OLD,), f"{_JIT}.activation", "_jit_activation_module", (_TORCH_BFLOAT16,)),
    Module((_NEW, _NEWEST), f"{_OPS}.activation.activation", "activation_module", (_TORCH_BFLOAT16,)),
    # The router of up to 16 tokens, and the fused projection of query and latent (sm_120 takes CuTe DSL for that).
    # 0.5.12.post1 has both compiled in sglang-kernel.
    Module((_NEW,), f"{_OPS}.gemm.dsv3_router_gemm", "dsv3_router_gemm_module", ("{experts}", "{hidden}", True, True)),
    Module(
        (_NEW, _NEWEST),
        f"{_OPS}.gemm.dsv3_fused_a_gemm",
        "dsv3_fused_a_gemm_module",
        ("{hidden}", "{query_and_latent}", True),
        architectures=("9.0", *TRTLLM),
    ),
    # INT4 experts by Marlin: weights repacked at load, then the product; the sort of a single token's experts.
    Module((_OLD,), f"{_JIT}.gptq_marlin_repack", "_jit_gptq_marlin_repack_module", architectures=MARLIN),
    Module(
        (_NEW, _NEWEST),
        f"{_OPS}.quantization.gptq_marlin_repack",
        "_jit_gptq_marlin_repack_module",
        architectures=MARLIN,
    ),
    Module(
        (_OLD,), f"{_JIT}.moe_wna16_marlin", "_jit_moe_wna16_marlin_module", (_TORCH_BFLOAT16,), architectures=MARLIN
    ),
    *(
        Module(
            (_NEW,),
            f"{_OPS}.moe.moe_wna16_marlin",
            "_jit_moe_wna16_marlin_module",
            (_TORCH_BFLOAT16, spread, False),
            architectures=MARLIN,
        )
        for spread in (False, True)
    ),
    # 0.5.23 has one for the first product and one for the second, which also zeroes rows that no expert fills.
    *(
        Module(
            (_NEWEST,),
            f"{_OPS}.moe.moe_wna16_marlin",
            "_jit_moe_wna16_marlin_module",
            (_TORCH_BFLOAT16, spread, False, not spread, second, not spread),
            architectures=MARLIN,
        )
        for spread in (False, True)
        for second in (False, True)
    ),
    Module(
        (_NEW,),
        f"{_OPS}.moe.moe_align_single_token",
        "_jit_align_single_token_module",
        architectures=MARLIN,
    ),
    Module(
        (_NEWEST,),
        f"{_OPS}.moe.moe_align_single_token",
        "_jit_align_single_token_module",
        (True,),
        architectures=MARLIN,
    ),
    # Launchers of the kernels that NVIDIA ships compiled: attention, and experts.
    Module(EVERY, "flashinfer.jit.attention.modules", "gen_trtllm_gen_fmha_module", architectures=TRTLLM, cubins=True),
    Module(
        (_NEW, _NEWEST),
        "flashinfer.jit.fused_moe",
        "gen_trtllm_gen_fused_moe_sm100_module",
        architectures=TRTLLM,
        cubins=True,
    ),
)


@dataclass(frozen=True)
class Call:
    """A module as it is asked for on one node."""

    source: str
    function: str
    arguments: tuple[Argument, ...]
    cubins: bool = False


def modules(release: Release, compute_capability: str, model: Model, kv_cache_dtype: str) -> tuple[Call, ...]:
    """What to compile before the server starts, in the order of the table. compute_capability: "12.0"."""
    numbers = _numbers(model, kv_cache_dtype)
    return tuple(
        Call(row.source, row.function, tuple(_given(each, numbers) for each in row.arguments), row.cubins)
        for row in MODULES
        if release.name in row.releases
        and (not row.architectures or compute_capability in row.architectures)
        and (not row.shaped or model.architecture is not None)
    )


def wants_cubins(release: Release, compute_capability: str, model: Model) -> bool:
    """Whether kernels that NVIDIA ships compiled must be fetched: where they are used and the lock brings none."""
    return compute_capability in TRTLLM and model.device == "cuda" and not release.cubins_in_lock


def _numbers(model: Model, kv_cache_dtype: str) -> Mapping[str, int]:
    shape = model.architecture
    if shape is None:
        return {}
    return {
        "{hidden}": shape.hidden,
        "{experts}": shape.experts,
        "{query_and_latent}": shape.q_lora_rank + shape.kv_lora_rank + shape.qk_rope_head,
        "{rope_head}": shape.qk_rope_head,
        "{latent_bytes}": int(shape.kv_lora_rank * BYTES_PER_KV_VALUE[kv_cache_dtype]),
        "{rope_bytes}": int(shape.qk_rope_head * BYTES_PER_KV_VALUE[kv_cache_dtype]),
    }


def _given(argument: Argument, numbers: Mapping[str, int]) -> Argument:
    return numbers[argument] if isinstance(argument, str) and argument.startswith("{") else argument
