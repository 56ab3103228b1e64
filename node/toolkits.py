"""CUDA toolkits as NVIDIA's apt repository has them, as data.

Package names, versions and what `cuda-toolkit-X-Y` brings: NVIDIA's release tables and public `dpkg -l` listings.
"""

from __future__ import annotations

from dataclasses import dataclass

from node import layout

ALTERNATIVE = "/usr/local/cuda"  # the link that NVIDIA's packages move; nothing of ours reads it
KEYRING = "/usr/share/keyrings/kimi-nodes-cuda.gpg"
SOURCE_LIST = "/etc/apt/sources.list.d/kimi-nodes-cuda.sources"
PREFERENCES = "/etc/apt/preferences.d/kimi-nodes-cuda"  # keeps the release's toolkit at the versions that were proved
RECEIPT = f"{layout.RECEIPTS}/cuda-toolkit.json"
PROOF = f"{layout.TOOLS}/toolkit_proof.py"
DEFAULT_REPOSITORY = "https://developer.download.nvidia.com/compute/cuda/repos"


@dataclass(frozen=True)
class RepositoryKey:
    """The key that signs one distribution's part of NVIDIA's repository.

    file: its name there. fingerprint: all 40 hex digits, upper case, of the primary key.
    """

    file: str
    fingerprint: str


_CUDATOOLS = RepositoryKey("3bf863cc.pub", "EB693B3035CD5710E231E123A4B469963BF863CC")
_KITMAKER_DEBIAN13 = RepositoryKey("8793F200.pub", "02182E60104FCDC26EAE1B8597A5D4CB8793F200")

REPOSITORY_KEYS = {
    "ubuntu2204": _CUDATOOLS,
    "ubuntu2404": _CUDATOOLS,
    "debian12": _CUDATOOLS,
    "debian13": _KITMAKER_DEBIAN13,
}


@dataclass(frozen=True)
class Toolkit:
    """One CUDA toolkit.

    version: "13.0"; nvcc: what `nvcc --version` says after "release"; package, apt_version: the metapackage, exactly;
    headers: what must be readable under include/ for the engine's compilers; libraries: what must be linkable;
    max_glibc: the newest glibc whose headers it compiles against, or None when no limit is known.
    """

    version: str
    nvcc: str
    package: str
    apt_version: str
    headers: tuple[str, ...]
    libraries: tuple[str, ...]
    compiles_with: tuple[str, ...]
    max_glibc: str | None

    @property
    def prefix(self) -> str:
        return f"/usr/local/cuda-{self.version}"

    @property
    def nvcc_path(self) -> str:
        return f"{self.prefix}/bin/nvcc"

    @property
    def suffix(self) -> str:
        """As in package names: "13-0"."""
        return self.version.replace(".", "-")


TOOLKITS = {
    toolkit.version: toolkit
    for toolkit in (
        Toolkit(
            version="13.0",
            nvcc="13.0",
            package="cuda-toolkit-13-0",
            apt_version="13.0.2-1",
            # FlashInfer's sampling sources include these (facts: flashinfer 0.6.12, csrc/sampling.cu and what it
            # includes)
            headers=("cuda.h", "cuda_runtime.h", "curand.h", "curand_kernel.h", "curand_philox4x32_x.h"),
            libraries=("libcudart.so", "stubs/libcuda.so"),
            compiles_with=("cuda_runtime.h", "curand.h"),
            max_glibc="2.41",  # glibc 2.42 declares rsqrt(), crt/math_functions.h declares it otherwise (NixOS 512796)
        ),
        Toolkit(
            version="12.8",
            nvcc="12.8",
            package="cuda-toolkit-12-8",
            apt_version="12.8.1-1",
            headers=("cuda.h", "cuda_runtime.h"),
            libraries=("libcudart.so", "stubs/libcuda.so"),
            compiles_with=("cuda_runtime.h",),
            max_glibc="2.40",  # glibc 2.41 declares cospi() and sinpi() (1Cat-vLLM 215, colibri 630)
        ),
    )
}
