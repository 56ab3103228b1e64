"""Does it fit? Bytes of weights on each GPU, what is left for the KV cache, and the tokens that buys.

The story's own arithmetic for pp8 (9 GB a layer: 63 to 72 GB a GPU, 24 to 33 GB left of 96) is `stages` with equal
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from node.models import Architecture, Drafter
from node.problems import Problem
from node.profiles import Profile

GIB = 1 << 30
MIB = 1 << 20

# What an engine needs beside weights and KV cache: CUDA contexts, NCCL buffers, activations of a prefill chunk, and
# captured graphs. 0.85 of a 96 GB card was the most that held with Kimi K2.6 and its vision tower, 0.90 ran out
# (soulmachine, 2026-06).
RESERVE = {True: 14.3 * GIB, False: 11.0 * GIB}

LEAST_KV_TOKENS = 32_768  # below this a server answers but is of no use: one long request fills it
LEAST_REQUEST_TOKENS = 256  # prompt and answer of a short request: more requests than these fill the cache never run

HELD_BY_DRIVER = 2 * GIB
"""Most of a GPU that may be taken before the engine starts, out of the reserve: what the driver keeps (616 MiB of an
H200, measured) and the context of a monitor."""

WAIT_SECONDS = 300
"""For memory that is being returned. SGLang ends by SIGKILL, also when it is asked to stop, and the driver then tears
down eight contexts and unpins host memory by itself. A bound, not a measurement."""
WAIT_MARGIN_SECONDS = 10

BYTES_PER_KV_VALUE = {"auto": 2.0, "fp8_e4m3": 1.0}


@dataclass(frozen=True)
class GpuFit:
    """One GPU (all in bytes): weights on it, what it keeps free for the engine, the KV cache, and the bytes a token
    takes."""

    gpu: int
    memory: int
    weights: int
    reserve: int
    kv_cache: int
    kv_bytes_per_token: float

    @property
    def tokens(self) -> int:
        return max(0, int(self.kv_cache // self.kv_bytes_per_token))


@dataclass(frozen=True)
class Fit:
    """All GPUs of a node under a profile. memory_fraction: what the server is told to take for weights and KV cache.
    graph_batch: requests of the largest batch that is captured as a CUDA graph, 0 for a profile without graphs."""

    gpus: tuple[GpuFit, ...]
    memory_fraction: float
    graph_batch: int

    @property
    def tokens(self) -> int:
        """Tokens the KV cache holds: the GPU with the fewest decides."""
        return min(gpu.tokens for gpu in self.gpus)

    def lines(self) -> list[str]:
        """The arithmetic, a line a GPU, in GiB."""
        return [
            f"gpu {g.gpu}: {g.memory / GIB:.1f} GiB - weights {g.weights / GIB:.1f} - reserve {g.reserve / GIB:.1f}"
            f" = {g.kv_cache / GIB:.1f} GiB for KV cache, {g.tokens} tokens at {g.kv_bytes_per_token:.0f} bytes"
            for g in self.gpus
        ]


def stages(layers: int, pipeline_parallel: int) -> list[tuple[int, int]]:
    """(first layer, count) of each pipeline stage. SGLang gives the remainder to the last stages
    (sglang/srt/distributed/utils.py, get_pp_indices): 61 layers over 8 are 7, 7, 7, 8, 8, 8, 8, 8."""
    least, more = divmod(layers, pipeline_parallel)
    counts = [least + (stage >= pipeline_parallel - more) for stage in range(pipeline_parallel)]
    return [(sum(counts[:stage]), count) for stage, count in enumerate(counts)]


def weights_per_gpu(architecture: Architecture, profile: Profile, drafter: Drafter | None = None) -> list[int]:
    """Bytes of weights on each GPU of the profile.

    Tensor parallelism divides every layer by tensor_parallel; expert parallelism moves whole experts and leaves the sum
    the same. Of a pipeline, the first stage also holds the embedding and the vision tower, the last one the output
    head.
    """
    per_gpu: list[int] = []
    parts = stages(architecture.layers, profile.pipeline_parallel)
    for stage, (first, count) in enumerate(parts):
        total = sum(architecture.layer_bytes(layer) for layer in range(first, first + count))
        if stage == 0:
            total += architecture.embedding_bytes + architecture.vision_bytes
        if stage == len(parts) - 1:
            total += architecture.embedding_bytes
        if drafter:
            total += drafter.bytes
        per_gpu += [-(-total // profile.tensor_parallel)] * profile.tensor_parallel
    return per_gpu


def fit(
    architecture: Architecture,
    profile: Profile,
    memory_mib: Sequence[int],
    kv_cache_dtype: str = "auto",
    drafter: Drafter | None = None,
    memory_fraction: float | None = None,
    max_running_requests: int | None = None,
) -> Fit:
    """The memory of every GPU under a profile. memory_mib: of each GPU, at least as many as the profile uses.

    memory_fraction: the owner's, or None for the largest hundredth that leaves the reserve free. max_running_requests:
    the owner's limit, or None.
    """
    smallest = min(memory_mib) * MIB
    fraction = memory_fraction or max(0.0, int((1 - RESERVE[profile.cuda_graphs] / smallest) * 100) / 100)
    parts = stages(architecture.layers, profile.pipeline_parallel)
    per_value = BYTES_PER_KV_VALUE[kv_cache_dtype]
    gpus = []
    for index, weights in enumerate(weights_per_gpu(architecture, profile, drafter)):
        memory = memory_mib[index] * MIB
        count = parts[index // profile.tensor_parallel][1]
        per_token = architecture.kv_bytes_per_token_and_layer(per_value) * count
        if drafter:
            per_token += drafter.kv_bytes_per_token / profile.tensor_parallel
        allowed = int(memory * fraction)
        gpus.append(GpuFit(index, memory, weights, memory - allowed, allowed - weights, per_token))
    batch = graph_batch(profile, smallest, min(gpu.tokens for gpu in gpus), max_running_requests)
    return Fit(tuple(gpus), fraction, batch)


def graph_batch(profile: Profile, memory: int, tokens: int, max_running_requests: int | None) -> int:
    """Requests of the largest batch worth a CUDA graph; 0 for an eager profile. memory: bytes of the smallest GPU.

    SGLang would capture up to 512, or 256 with fewer than four tensor-parallel ranks on less than 160 GiB, whatever the
    KV cache holds, and counts 2 MiB of GPU memory for each (sglang/srt/server_args.py, _handle_gpu_memory_settings,
    0.5.12.post1 and 0.5.17; arg_groups/memory_hook.py, 0.5.23). No more are captured than the cache can hold at once.
    """
    if not profile.cuda_graphs:
        return 0
    engines = 256 if profile.tensor_parallel < 4 and memory < 160 * GIB else 512
    return max(1, min(engines, tokens // LEAST_REQUEST_TOKENS, max_running_requests or engines))


def wanted_free(result: Fit) -> dict[int, int]:
    """GPU -> MiB that must be free on it before the engine starts, so that weights, KV cache and reserve are there.

    SGLang takes its share of what is free at its start, not of what the GPU has: with less, the cache is smaller than
    planned, or the start fails minutes later.
    """
    return {gpu.gpu: int((gpu.memory - HELD_BY_DRIVER) // MIB) for gpu in result.gpus}


def wait_seconds(start_timeout: int) -> int:
    """How long a start waits for GPU memory. systemd gives each command of a start all of start_timeout; ours ends
    before it would be ended, because it says more."""
    return min(WAIT_SECONDS, start_timeout - WAIT_MARGIN_SECONDS)


def problems(
    result: Fit, profile: Profile, context_length: int | None, memory_fraction: float | None = None
) -> list[Problem]:
    """Why a plan does not fit, with its arithmetic. Nothing when it does. memory_fraction: the owner's, if any."""
    wanted = context_length or LEAST_KV_TOKENS
    if result.tokens >= wanted:
        return []
    tightest = min(result.gpus, key=lambda gpu: gpu.tokens)
    return [
        Problem(
            f"memory of profile {profile.name}",
            f"room for {result.tokens} tokens ({result.lines()[tightest.gpu]})",
            f"room for at least {wanted} tokens",
            (f"raise memory_fraction above {memory_fraction:g} or remove it, or " if memory_fraction else "")
            + "choose a profile that spreads weights wider, kv_cache_dtype fp8_e4m3, or a shorter context_length",
        )
    ]
