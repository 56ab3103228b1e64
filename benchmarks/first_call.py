"""First against tenth call of the modules that a release compiles, with a cold and with a warmed cache, on a GPU.

    PYTHON benchmarks/first_call.py [--folder DIR] [--cuda-home /usr/local/cuda-13.0] [--architecture 12.0f]

PYTHON is a release's own (on a node: /opt/kimi-nodes/current/bin/python), on a machine with a GPU that nothing else
uses. What a module computes is held against the same in torch, so that a fast wrong answer is no result. Two processes
run the engine's own calls, each over a cache of its own and in the engine's order: FlashInfer imported, set_cuda_arch,
then the calls. One finds its cache empty, and compiles as a server without a warm-up does in front of its first user.
The other finds what files/tools/jit_warmup.py has laid into it, and what it writes there is counted: nothing may be.
The first process and the warm-up run at the same time, each with one compiler or few; wants eight cores for that.

It is the modules alone: no weights, no server. benchmarks/first_request.py asks a whole node.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

CALLS = 20
BAR = 1.2  # first request against the tenth: what the project holds itself to, of whole requests
EXPERTS, TOP_K, HIDDEN, EXPERT_WIDTH, GROUP = 16, 8, 7168, 512, 32  # a slice of Kimi K2.6's experts, bfloat16 by INT4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="for both caches; default: a temporary one")
    parser.add_argument("--cuda-home", default="/usr/local/cuda-13.0")
    parser.add_argument("--architecture", help="as FlashInfer names it; default: this GPU's")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        print(json.dumps(engine()))
        return 0
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = measure(folder, arguments.cuda_home, arguments.architecture or detected())
    print(json.dumps(result, indent=1))
    print(table(result))
    wrong = [name for run in ("cold", "warmed") for name, call in result[run]["calls"].items() if not call["right"]]
    return 1 if wrong or result["written_after_warming"] else 0


def detected() -> str:
    """ "9.0a" of this machine's GPU."""
    from node.hardware import GPU_MODELS

    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    capability = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    names = {model.compute_capability: model.flashinfer_architecture for model in GPU_MODELS.values()}
    return names[capability]


def measure(folder: Path, cuda_home: str, architecture: str) -> dict[str, Any]:
    caches = {name: folder / name for name in ("cold", "warmed")}
    for cache in caches.values():
        cache.mkdir(parents=True)  # not one that is there: it might not be cold
    environments = {name: environment(cache, cuda_home, architecture) for name, cache in caches.items()}
    asked = warmup(caches["warmed"], environments["warmed"], architecture)
    warming = subprocess.Popen(
        [sys.executable, PROJECT / "files/tools/jit_warmup.py", asked], env=environments["warmed"], stdout=sys.stderr
    )
    try:
        cold = run_engine(environments["cold"])
    finally:
        code = warming.wait()
    assert code == 0, "the warm-up failed: see above"
    before = content(caches["warmed"])
    warmed = run_engine(environments["warmed"])
    receipt = json.loads((caches["warmed"] / "warmed.json").read_text())
    return {
        "architecture": architecture,
        "cold": cold,
        "warmed": warmed,
        "warm_up": {module["name"]: module["seconds"] for module in receipt["modules"]},
        "written_after_warming": sorted(set(content(caches["warmed"]).items()) - set(before.items())),
    }


def environment(cache: Path, cuda_home: str, architecture: str) -> dict[str, str]:
    """What decides where and how is compiled, as a node's unit has it (node/plan.py)."""
    from node.releases import DEFAULT_RELEASE, RELEASES

    names = RELEASES[DEFAULT_RELEASE].cache_environment
    own = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHINFER", "TVM_", "SGLANG"))}
    return {
        **own,
        "CUDA_HOME": cuda_home,
        "PATH": f"{Path(sys.executable).parent}:{cuda_home}/bin:{os.environ['PATH']}",
        "HOME": str(cache),
        "FLASHINFER_CUDA_ARCH_LIST": architecture,
        **{name: f"{cache}/{folder}" for name, folder in names.items()},
        "MAX_JOBS": "4",
        "FLASHINFER_NO_DOWNLOAD": "1",
    }


def warmup(cache: Path, environment: dict[str, str], architecture: str) -> str:
    """The configuration of files/tools/jit_warmup.py for the release that this Python is. -> its path."""
    from importlib.metadata import version

    from node import kernels
    from node.models import MODELS
    from node.releases import RELEASES

    release = next(release for release in RELEASES.values() if release.sglang == version("sglang"))
    modules = kernels.modules(release, architecture.rstrip("af"), MODELS["kimi-k2.6"], "auto")
    asked = {
        "release": release.name,
        "architecture": architecture,
        "environment": {name: environment[name] for name in ("CUDA_HOME", "FLASHINFER_WORKSPACE_BASE")},
        "modules": [dataclasses.asdict(module) for module in modules if not module.cubins],
        "cubins": None,
        "library": str(cache),
        "receipt": str(cache / "warmed.json"),
        "nvcc": release.toolkit.nvcc,
    }
    path = cache.with_suffix(".json")
    path.write_text(json.dumps(asked))
    return str(path)


def run_engine(environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--engine"], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def content(cache: Path) -> dict[str, int]:
    """Objects and libraries in a cache -> when they were written, in nanoseconds."""
    return {
        str(path.relative_to(cache)): path.stat().st_mtime_ns
        for path in cache.rglob("*")
        if path.suffix in (".o", ".so", ".cu", ".cubin")
    }


def table(result: dict[str, Any]) -> str:
    rows = [
        "| module | cold: first / tenth | warmed: first / tenth | cold first / warmed first |",
        "| --- | --- | --- | --- |",
    ]
    for name, cold in result["cold"]["calls"].items():
        warmed = result["warmed"]["calls"][name]
        ratios = (cold["first"] / cold["tenth"], warmed["first"] / warmed["tenth"], cold["first"] / warmed["first"])
        rows.append(f"| {name} | {ratios[0]:.0f} | {ratios[1]:.1f} | {ratios[2]:.0f} |")
    return "\n".join(rows)


# --- one process of the engine ---


def engine() -> dict[str, Any]:
    """Every call twenty times; seconds of the first and of the tenth, which is the median of the last eleven."""
    import flashinfer.sampling  # noqa: F401
    import torch
    from sglang.srt.utils import common

    common.set_cuda_arch()
    torch.manual_seed(7)
    torch.zeros(1, device="cuda")  # the device itself is no module's to wait for
    calls = {}
    for name, call in CASES.items():
        with contextlib.redirect_stdout(sys.stderr):
            seconds, right = [], True
            run, check = call()
            for _ in range(CALLS):
                torch.cuda.synchronize()
                began = time.perf_counter()
                given = run()
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
                right = right and check(given)
        calls[name] = {"first": seconds[0], "tenth": statistics.median(seconds[9:]), "right": bool(right)}
        print(name, calls[name], file=sys.stderr, flush=True)
    return {"device": torch.cuda.get_device_name(), "calls": calls}


Case = Callable[[], "tuple[Callable[[], Any], Callable[[Any], bool]]"]


def close(found: Any, wanted: Any, tolerance: float) -> bool:
    """Largest difference against the largest value."""
    difference = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    return bool(difference < tolerance)


def sampling() -> tuple[Callable[[], Any], Callable[[Any], bool]]:
    """Of 16 tokens, those of top_p 0.8 and no other, as often as they are likely."""
    import torch
    from flashinfer.sampling import top_k_top_p_sampling_from_probs

    rows = 65536
    likely = torch.softmax(torch.linspace(3, 0, 16, device="cuda"), 0)
    kept = likely * (likely.cumsum(0) - likely < 0.8)
    kept = kept / kept.sum()
    batch = likely.repeat(rows, 1)
    top_k = torch.full((rows,), 1 << 30, dtype=torch.int32, device="cuda")
    top_p = torch.full((rows,), 0.8, device="cuda")

    def check(tokens: Any) -> bool:
        share = torch.bincount(tokens.long(), minlength=16) / rows
        return bool(((share - kept).abs() < 6 * (kept * (1 - kept) / rows).sqrt() + 1e-9).all())

    return lambda: top_k_top_p_sampling_from_probs(batch, top_k, top_p, filter_apply_order="joint"), check


def long_prefill() -> tuple[Callable[[], Any], Callable[[Any], bool]]:
    """1024 latent vectors and rotary keys, to scattered places of the cache."""
    import torch
    from sglang.kernels.ops.kvcache.set_mla_kv_buffer import set_mla_kv_buffer

    cache = torch.zeros(4096, 576, dtype=torch.bfloat16, device="cuda")
    places = torch.randperm(4096, device="cuda")[:1024]
    latent = torch.randn(1024, 512, dtype=torch.bfloat16, device="cuda")
    rotary = torch.randn(1024, 64, dtype=torch.bfloat16, device="cuda")
    wanted = torch.zeros_like(cache)
    wanted[places] = torch.cat([latent, rotary], 1)

    def run() -> Any:
        set_mla_kv_buffer(cache, places, latent, rotary)
        return cache

    return run, lambda found: bool((found == wanted).all())


def activation() -> tuple[Callable[[], Any], Callable[[Any], bool]]:
    import torch
    from sglang.kernels.ops.activation.activation import silu_and_mul

    both = torch.randn(8, 2 * EXPERT_WIDTH, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(8, EXPERT_WIDTH, dtype=torch.bfloat16, device="cuda")
    gate, up = both.float().chunk(2, 1)
    wanted = torch.nn.functional.silu(gate) * up

    def run() -> Any:
        silu_and_mul(both, out)
        return out

    return run, lambda found: close(found, wanted, 0.01)


def positions() -> tuple[Callable[[], Any], Callable[[Any], bool]]:
    import torch
    from sglang.kernels.ops.attention.clamp_position import clamp_position_cuda

    lengths = torch.tensor([0, 1, 5, 262144], device="cuda")
    return lambda: clamp_position_cuda(lengths), lambda found: found.tolist() == [0, 0, 4, 262143]


def router() -> tuple[Callable[[], Any], Callable[[Any], bool]]:
    import torch
    from sglang.kernels.ops.gemm.dsv3_router_gemm import dsv3_router_gemm

    tokens = torch.randn(4, HIDDEN, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(384, HIDDEN, dtype=torch.bfloat16, device="cuda")
    wanted = tokens.float() @ weight.float().T
    return lambda: dsv3_router_gemm(tokens, weight, out_dtype=torch.float32), lambda found: close(found, wanted, 0.01)


def rotary_embedding() -> tuple[Callable[[], Any], Callable[[Any], bool]]:
    """Interleaved pairs of 64 values, turned by position over 10000^(2i/64)."""
    import torch
    from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace

    angles = torch.outer(torch.arange(4096.0), 10000.0 ** -(torch.arange(0, 64, 2) / 64)).cuda()
    turns = torch.cat([angles.cos(), angles.sin()], 1)
    at = torch.tensor([0, 3, 77, 4095], device="cuda")
    query = torch.randn(4, 8, 64, dtype=torch.bfloat16, device="cuda")
    key = torch.randn(4, 1, 64, dtype=torch.bfloat16, device="cuda")

    def turned(values: Any) -> Any:
        even, odd = values.float()[..., ::2], values.float()[..., 1::2]
        cosine, sine = (part[:, None] for part in turns[at].chunk(2, 1))
        return torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], -1).flatten(-2)

    def run() -> Any:
        given = query.clone(), key.clone()
        apply_rope_with_cos_sin_cache_inplace(*given, turns, at, is_neox=False)
        return given

    wanted = turned(query), turned(key)
    return run, lambda found: all(close(*pair, 0.01) for pair in zip(found, wanted, strict=True))


def experts() -> tuple[Callable[[], Any], Callable[[Any], bool]]:
    """One token through eight INT4 experts: weights packed as the checkpoint has them, repacked as at load, the sort of
    the token's experts, and the product; against the product with the same weights written out."""
    import torch
    from sgl_kernel.scalar_type import scalar_types
    from sglang.kernels.ops.moe.moe_align_single_token import moe_align_single_token
    from sglang.kernels.ops.moe.moe_wna16_marlin import moe_wna16_marlin_gemm
    from sglang.kernels.ops.quantization.gptq_marlin_repack import gptq_marlin_repack

    integers = torch.randint(0, 16, (EXPERTS, HIDDEN, EXPERT_WIDTH), dtype=torch.int32, device="cuda")
    scales = (torch.rand(EXPERTS, HIDDEN // GROUP, EXPERT_WIDTH, device="cuda") + 0.5).bfloat16() / 64
    weights = (integers.float() - 8) * scales.float().repeat_interleave(GROUP, 1)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device="cuda")[None, None, :, None]
    packed = (integers.view(EXPERTS, HIDDEN // 8, 8, EXPERT_WIDTH) << shifts).sum(2, dtype=torch.int32)
    unordered = torch.empty(0, dtype=torch.int32, device="cuda")
    order = [i + 8 * j for i in range(8) for j in range(8)]  # marlin_permute_scales (layers/quantization/marlin_utils)
    scales = scales.reshape(-1, 64)[:, order].reshape(scales.shape).contiguous()
    token = torch.randn(1, HIDDEN, dtype=torch.bfloat16, device="cuda")
    chosen = torch.randperm(EXPERTS, device="cuda")[None, :TOP_K].int().contiguous()
    routed = torch.full((1, TOP_K), 1 / TOP_K, device="cuda")
    workspace = torch.zeros(1024, dtype=torch.int32, device="cuda")
    wanted = torch.stack([token[0].float() @ weights[expert] for expert in chosen[0]])

    def run() -> Any:
        repacked = torch.stack(
            [gptq_marlin_repack(packed[e], unordered, HIDDEN, EXPERT_WIDTH, 4) for e in range(EXPERTS)]
        )
        order_of_tokens, experts_of_blocks, padded = moe_align_single_token(chosen, 8)
        return moe_wna16_marlin_gemm(
            token,
            torch.zeros(TOP_K, EXPERT_WIDTH, dtype=torch.bfloat16, device="cuda"),
            repacked,
            None,
            scales,
            None,
            None,
            None,
            None,
            workspace,
            order_of_tokens,
            experts_of_blocks,
            padded,
            routed,
            moe_block_size=8,
            top_k=TOP_K,
            mul_topk_weights=False,
            is_ep=False,
            b_q_type=scalar_types.uint4b8,
            size_m=1,
            size_n=EXPERT_WIDTH,
            size_k=HIDDEN,
            use_atomic_add=True,
            use_fp32_reduce=True,
        )

    return run, lambda found: close(found, wanted, 0.02)


CASES: dict[str, Case] = {
    "sampling with top_p (FlashInfer)": sampling,
    "KV cache of a prefill of 1024 tokens": long_prefill,
    "silu(gate) * up": activation,
    "position of the next token": positions,
    "router": router,
    "rotary embedding": rotary_embedding,
    "INT4 experts: repack, sort, product (Marlin)": experts,
}


if __name__ == "__main__":
    sys.exit(main())
