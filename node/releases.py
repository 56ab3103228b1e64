"""Releases: named, pinned sets of software, as data. A new release is one entry here, one lock file and one option
list.

Sources: the metadata and the sources of each release's wheels; `files/locks/<name>.options.txt` is what the release's
own argument parser prints, and the tests hold every flag of a dialect against it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from node import toolkits

Option = str | int | float | bool | None | Sequence[str | int]

DIGEST_LENGTH = 16


@dataclass(frozen=True)
class Advisory:
    """A published vulnerability that a release still has, and what keeps it out of reach on our nodes."""

    id: str
    what: str
    answer: str


@dataclass(frozen=True)
class Release:
    """One set of software that is installed as a whole.

    sglang ... triton: exact versions, also to be found in the lock. cuda_toolkit: key of `node.toolkits.TOOLKITS`,
    whose nvcc and headers every just-in-time compiler of the release uses. minimum_nvcc: below it the release cannot
    compile for sm_120 unpatched. driver_floor: the oldest NVIDIA driver that runs the wheels' CUDA; under
    driver_recommended a warning is due. pythons: minor versions that its wheels are made for. patches: ids in
    `node.patches.PATCHES` that are considered for it. dialect: our neutral option names -> this release's flags.
    cache_environment: environment variable -> folder below the release's own cache, one for everything that the release
    compiles. cubins_in_lock: the kernels that NVIDIA ships compiled (trtllm-gen, needed on sm_100 and sm_103) are part
    of the lock; otherwise they are fetched at first use unless they were laid down before. pipeline_fault: the Triton
    backend asks each pipeline stage for layer 0. speculative: algorithms that the release takes. moe_runner_marlin:
    `marlin` may be named. wheel_nvcc_directories: where the release's wheels put a compiler of their own below the
    environment. It has no lib64, so it must never be the one in use; `{python}` is the minor version. Empty where they
    bring none.
    """

    name: str
    what: str
    sglang: str
    torch: str
    flashinfer: str
    sglang_kernel: str
    transformers: str
    triton: str
    cuda_toolkit: str
    minimum_nvcc: str
    driver_floor: str
    driver_recommended: str
    pythons: tuple[str, ...]
    resolved: str
    patches: tuple[str, ...]
    dialect: Mapping[str, str]
    cache_environment: Mapping[str, str]
    cubins_in_lock: bool
    pipeline_fault: bool
    speculative: tuple[str, ...]
    moe_runner_marlin: bool
    wheel_nvcc_directories: tuple[str, ...]
    advisories: tuple[Advisory, ...]

    @property
    def lock(self) -> str:
        """The lock file, relative to the project."""
        return f"files/locks/{self.name}.txt"

    @property
    def options_file(self) -> str:
        """Every option of the release's own argument parser, one a line, relative to the project."""
        return f"files/locks/{self.name}.options.txt"

    @property
    def toolkit(self) -> toolkits.Toolkit:
        return toolkits.TOOLKITS[self.cuda_toolkit]

    @property
    def pins(self) -> Mapping[str, str]:
        """Distribution name as in the lock -> version."""
        return {
            "sglang": self.sglang,
            "torch": self.torch,
            "flashinfer-python": self.flashinfer,
            "sglang-kernel": self.sglang_kernel,
            "transformers": self.transformers,
            "triton": self.triton,
        }

    def wheel_nvcc(self, python: str) -> tuple[str, ...]:
        """The compilers that the wheels bring, relative to the environment. python: "3.12"."""
        return tuple(directory.format(python=python) + "/nvcc" for directory in self.wheel_nvcc_directories)

    def flag(self, option: str) -> str:
        """This release's flag for a neutral option. Raises UnknownOption."""
        try:
            return self.dialect[option]
        except KeyError:
            raise UnknownOption(self, option) from None

    def arguments(self, options: Mapping[str, Option]) -> list[str]:
        """The argument vector for these options, in their order.

        True gives the bare flag, False and None nothing, a sequence the flag and its values. Raises UnknownOption.
        """
        vector: list[str] = []
        for option, value in options.items():
            flag = self.flag(option)
            if value is None or value is False:
                continue
            vector.append(flag)
            if value is True:
                continue
            if isinstance(value, (str, int, float)):
                vector.append(str(value))
            else:
                vector.extend(str(item) for item in value)
        return vector


class UnknownOption(KeyError):
    """A release has no flag for an option."""

    def __init__(self, release: Release, option: str) -> None:
        self.release, self.option = release.name, option
        super().__init__(option)

    def __str__(self) -> str:
        return (
            f"option {self.option}: found no flag for it in release {self.release}, wanted one of its dialect. "
            f"Fix: name one of the options in node/releases.py, or give the flag itself as an extra argument"
        )


# What all three releases call the same. Neutral name -> flag.
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "model_path": "--model-path",
        "revision": "--revision",
        "served_model_name": "--served-model-name",
        "trust_remote_code": "--trust-remote-code",
        "load_format": "--load-format",
        "context_length": "--context-length",
        "tool_call_parser": "--tool-call-parser",
        "reasoning_parser": "--reasoning-parser",
        "chat_template": "--chat-template",
        "host": "--host",
        "port": "--port",
        "nccl_port": "--nccl-port",
        "device": "--device",
        "random_seed": "--random-seed",
        "tensor_parallel": "--tp-size",
        "pipeline_parallel": "--pp-size",
        "expert_parallel": "--ep-size",
        "data_parallel": "--dp-size",
        "moe_runner_backend": "--moe-runner-backend",
        "moe_a2a_backend": "--moe-a2a-backend",
        "attention_backend": "--attention-backend",
        "sampling_backend": "--sampling-backend",
        "grammar_backend": "--grammar-backend",
        "kv_cache_dtype": "--kv-cache-dtype",
        "memory_fraction": "--mem-fraction-static",
        "max_running_requests": "--max-running-requests",
        "max_total_tokens": "--max-total-tokens",
        "chunked_prefill_size": "--chunked-prefill-size",
        "schedule_policy": "--schedule-policy",
        "page_size": "--page-size",
        "disable_radix_cache": "--disable-radix-cache",
        "sleep_on_idle": "--sleep-on-idle",
        "disable_custom_all_reduce": "--disable-custom-all-reduce",
        "disable_overlap_schedule": "--disable-overlap-schedule",
        "disable_cuda_graph": "--disable-cuda-graph",
        "cuda_graph_max_bs": "--cuda-graph-max-bs",
        "cuda_graph_bs": "--cuda-graph-bs",
        "speculative_algorithm": "--speculative-algorithm",
        "speculative_draft_model_path": "--speculative-draft-model-path",
        "speculative_num_draft_tokens": "--speculative-num-draft-tokens",
        "speculative_dflash_block_size": "--speculative-dflash-block-size",
        "speculative_draft_attention_backend": "--speculative-draft-attention-backend",
        "enable_metrics": "--enable-metrics",
        "enable_cache_report": "--enable-cache-report",
        "log_level": "--log-level",
        "log_requests": "--log-requests",
        "watchdog_timeout": "--watchdog-timeout",
        "distributed_address": "--dist-init-addr",
        "skip_server_warmup": "--skip-server-warmup",
        "decode_log_interval": "--decode-log-interval",
    }
)

# 0.5.14 named the limits after the phase they bound; 0.5.23 no longer knows which of the two an abbreviated flag means.
_FLAGS_BY_PHASE: Mapping[str, str] = MappingProxyType(
    {
        **_FLAGS,
        "cuda_graph_max_bs": "--cuda-graph-max-bs-decode",
        "cuda_graph_bs": "--cuda-graph-bs-decode",
    }
)

# Each name is read by the release or by something it compiles with (grep of the wheels). FlashInfer adds
# .cache/flashinfer/<version>/<architecture> to its base by itself.
_CACHES: Mapping[str, str] = MappingProxyType(
    {
        "SGLANG_CACHE_DIR": "sglang",
        "SGLANG_DG_CACHE_DIR": "deep_gemm",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
        "TVM_FFI_CACHE_DIR": "tvm-ffi",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUDA_CACHE_PATH": "nv",
    }
)

# Options that every release has and no plan may ask for, with the reason. No dialect has a name for them.
FORBIDDEN: Mapping[str, str] = MappingProxyType(
    {
        "--api-key": "arguments are readable by every user of the machine: keys come by --config",
        "--admin-api-key": "arguments are readable by every user of the machine: keys come by --config",
        "--ssl-keyfile-password": "arguments are readable by every user of the machine",
        "--enable-custom-logit-processor": "CVE-2026-7304: runs pickled code out of a request",
        "--enable-lora": "CVE-2026-15969: the routes for LoRA unpickle what they are sent",
        "--lora-paths": "CVE-2026-15969: the routes for LoRA unpickle what they are sent",
        "--custom-weight-loader": "imports whatever module it names",
    }
)

_LOGIT_PROCESSOR = Advisory(
    "CVE-2026-7304",
    "--enable-custom-logit-processor runs pickled code out of a request (custom_logit_processor.py, dill.loads)",
    "the flag is off by default and is never part of a plan",
)
_LORA_FROM_TENSORS = Advisory(
    "CVE-2026-15969",
    "/load_lora_adapter_from_tensors unpickles what it is sent, without asking for the admin key",
    "the server listens on loopback only; let no path but those that clients need through to it",
)

_DRIVER_FLOOR = "580.65.06"  # CUDA 13.0's release notes; any newer one runs 13.x by minor-version compatibility
_DRIVER_RECOMMENDED = "580.95.05"  # the driver that 13.0 Update 2 came with
_FOUR_PYTHONS = ("3.10", "3.11", "3.12", "3.13")
_WHEEL_NVCC = "lib/python{python}/site-packages/nvidia/cu13/bin"

RELEASES: dict[str, Release] = {
    release.name: release
    for release in (
        Release(
            name="sglang-0.5.12.post1",
            what="the story as told: both faults are in it",
            sglang="0.5.12.post1",
            torch="2.11.0",
            flashinfer="0.6.11.post1",
            sglang_kernel="0.4.2.post2",
            transformers="5.6.0",
            triton="3.6.0",
            cuda_toolkit="13.0",
            minimum_nvcc="12.9",
            driver_floor=_DRIVER_FLOOR,
            driver_recommended=_DRIVER_RECOMMENDED,
            pythons=_FOUR_PYTHONS,
            resolved="2026-06-06T00:00:00Z",
            patches=("sglang-pipeline-first-layer", "flashinfer-empty-architectures", "sglang-activation-return-type"),
            dialect=_FLAGS,
            cache_environment=_CACHES,
            cubins_in_lock=True,
            pipeline_fault=True,
            speculative=("dflash",),
            moe_runner_marlin=True,
            wheel_nvcc_directories=(),
            advisories=(_LOGIT_PROCESSOR, _LORA_FROM_TENSORS),
        ),
        Release(
            name="sglang-0.5.17",
            what="the default: newest on torch 2.11.0, the pipeline fault still in it",
            sglang="0.5.17",
            torch="2.11.0",
            flashinfer="0.6.15.post1",
            sglang_kernel="0.4.5",
            transformers="5.12.1",
            triton="3.6.0",
            cuda_toolkit="13.0",
            minimum_nvcc="12.9",
            driver_floor=_DRIVER_FLOOR,
            driver_recommended=_DRIVER_RECOMMENDED,
            pythons=_FOUR_PYTHONS,
            resolved="2026-08-22T00:00:00Z",
            patches=("sglang-pipeline-first-layer", "flashinfer-empty-architectures"),
            dialect=_FLAGS,
            cache_environment={**_CACHES, "HUMMING_CACHE_DIR": "humming", "FLASHINFER_CUBIN_DIR": "cubins"},
            cubins_in_lock=False,
            pipeline_fault=True,
            speculative=("dflash",),
            moe_runner_marlin=True,
            wheel_nvcc_directories=(_WHEEL_NVCC,),
            advisories=(_LOGIT_PROCESSOR, _LORA_FROM_TENSORS),
        ),
        Release(
            name="sglang-0.5.23",
            what="newest: no patch is needed, some flags have new names, wants Python 3.11",
            sglang="0.5.23",
            torch="2.14.1",
            flashinfer="0.7.2",
            sglang_kernel="0.4.10",
            transformers="5.19.0",
            triton="3.8.0",
            cuda_toolkit="13.0",
            minimum_nvcc="12.8",
            driver_floor=_DRIVER_FLOOR,
            driver_recommended=_DRIVER_RECOMMENDED,
            pythons=_FOUR_PYTHONS[1:],
            resolved="2026-11-13T00:00:00Z",
            patches=("sglang-pipeline-first-layer", "flashinfer-empty-architectures"),
            dialect=_FLAGS_BY_PHASE,
            cache_environment={
                **_CACHES,
                "HUMMING_CACHE_DIR": "humming",
                "TILELANG_CACHE_DIR": "tilelang",
                "FLASHINFER_CUBIN_DIR": "cubins",
            },
            cubins_in_lock=False,
            pipeline_fault=False,
            speculative=("dflash",),
            moe_runner_marlin=True,
            wheel_nvcc_directories=(_WHEEL_NVCC,),
            advisories=(_LOGIT_PROCESSOR,),
        ),
    )
}

DEFAULT_RELEASE = "sglang-0.5.17"


def digest(release: Release, lock_bytes: bytes, patched: Iterable[tuple[str, str]], toolkit: str, python: str) -> str:
    """The name of the directory that a release is installed in: 16 hex digits that change with anything that goes into
    it.

    lock_bytes: the lock file as it is. patched: (patch id, sha256 of the patched file) for each patch that is applied;
    their order does not matter. toolkit: "13.0". python: minor version, "3.12".
    """
    content = {
        "lock": hashlib.sha256(lock_bytes).hexdigest(),
        "patches": sorted([id, result] for id, result in patched),
        "python": python,
        "release": release.name,
        "toolkit": toolkit,
    }
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(canonical).hexdigest()[:DIGEST_LENGTH]
