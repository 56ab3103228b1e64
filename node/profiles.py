"""Profiles: how the GPUs of a node work together, as data. A new profile is a new entry here and nothing else.

Options are named neutrally (`tensor_parallel`); a release's dialect turns them into flags. Sources: SGLang's own
argument checks and facts measured with it; figures of the profiles are in docs/profiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

SPECULATIVE = ("none", "dflash", "ddtree")


@dataclass(frozen=True)
class Profile:
    """One layout of a model over GPUs.

    gpus = tensor_parallel x pipeline_parallel. expert_parallel divides tensor_parallel: each expert group of
    tensor_parallel / expert_parallel GPUs holds 1 / expert_parallel of the experts, whole. cuda_graphs: decode runs as
    captured graphs, up to the batch that `node.memory` decides. device: of the models that it can serve. options,
    environment: what it adds.
    """

    name: str
    what: str
    tensor_parallel: int
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    speculative: str = "none"
    cuda_graphs: bool = True
    device: str = "cuda"
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Schedulers, each a process: one a GPU where there are any."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def gpus(self) -> int:
        return self.ranks if self.device == "cuda" else 0


def _with_eager(profile: Profile) -> tuple[Profile, Profile]:
    eager = replace(
        profile, name=profile.name + "-eager", what=profile.what + ", without CUDA graphs", cuda_graphs=False
    )
    return profile, eager


_GRAPHS = (
    Profile("tp8", "every layer over all eight GPUs", tensor_parallel=8),
    Profile("pp8", "an eighth of the layers on each GPU", tensor_parallel=1, pipeline_parallel=8),
    Profile(
        "ep8", "attention over eight GPUs, 48 whole experts of each layer on each", tensor_parallel=8, expert_parallel=8
    ),
    Profile("ep4", "experts in four groups of two GPUs", tensor_parallel=8, expert_parallel=4),
    Profile("ep8-dflash", "ep8 with a DFlash drafter", tensor_parallel=8, expert_parallel=8, speculative="dflash"),
)

_CPU = Profile(
    "cpu",
    "no GPU at all: the lab's tiny model on the processor",
    tensor_parallel=1,
    cuda_graphs=False,
    device="cpu",
    options={
        "device": "cpu",
        "attention_backend": "torch_native",
        "grammar_backend": "none",
        "max_total_tokens": 4096,
        "chunked_prefill_size": 128,  # so that the tiny model's long prompt is prefilled in several chunks too
        "sleep_on_idle": True,  # an idle scheduler otherwise spins on a core, and a lab has two
    },
    environment={"SGLANG_USE_CPU_ENGINE": "1"},
)

_CPU_TWO_STAGES = replace(
    _CPU,
    name="cpu-two-stages",
    what="cpu, with half of the layers in each of two processes",
    pipeline_parallel=2,
    # SGLang would make NCCL's communicator between the stages, found or not wanted, and that takes CUDA devices.
    environment={**_CPU.environment, "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so"},
)

PROFILES = {profile.name: profile for pair in map(_with_eager, _GRAPHS) for profile in pair} | {
    profile.name: profile for profile in (_CPU, _CPU_TWO_STAGES)
}


@dataclass(frozen=True)
class Backends:
    """Which kernels serve multi-head latent attention on an architecture.

    attention: SGLang's own default for Kimi K2 there (sm_120: triton; sm_100 and sm_103: trtllm_mla), written out so
    that a new release cannot change it unseen. draft_attention: what DFLASH takes when the target's is none it can use.
    """

    attention: str
    draft_attention: str


BACKENDS = {
    "12.0": Backends(attention="triton", draft_attention="triton"),
    "10.3": Backends(attention="trtllm_mla", draft_attention="flashinfer"),
    "10.0": Backends(attention="trtllm_mla", draft_attention="flashinfer"),
    "9.0": Backends(attention="flashinfer", draft_attention="flashinfer"),
}

# NCCL and CPU settings by how the GPUs are joined: only what has a reason that holds for every such machine. What was
# left out, and who says what of it, is in docs/profiles/README.md. SGLang itself sets CUDA_DEVICE_MAX_CONNECTIONS to 8,
# and NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE to 0 where they are not given (entrypoints/engine.py,
# _set_envs_and_config, 0.5.12.post1 to 0.5.23).
INTERCONNECT_ENVIRONMENT: dict[str, dict[str, str]] = {
    # All GPUs are in one machine: NCCL is not to look for network adapters (NCCL user guide, NCCL_IB_DISABLE; rtx6kpro
    # wiki, optimization/nccl-tuning).
    "pcie": {"NCCL_IB_DISABLE": "1"},
    "nvlink": {"NCCL_IB_DISABLE": "1"},
    "none": {},
}
