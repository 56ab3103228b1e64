"""Packages of the operating system that every node needs, as data: each with the reason why it is there.

All are in the main archives of every system of `node.systems.SYSTEMS` (Ubuntu: main and universe). The CUDA toolkit and
the driver are not here: they come from NVIDIA's repository.
"""

from __future__ import annotations

BASE: dict[str, str] = {
    "ca-certificates": "authorities for every https address: NVIDIA's repository, the hub, the package index",
    "curl": "looking at the server and at the repositories by hand, as docs/troubleshooting.md does",
    "gnupg": "reading the fingerprint of NVIDIA's repository key before it is trusted",
    "python3": "the system's own interpreter; every release is built on it",
    "python3-venv": "virtual environments of the tools and of the release (Debian takes ensurepip out of python3)",
    "python3-dev": "Triton compiles its launchers against Python.h at run time",
    "build-essential": "g++ is the host compiler of nvcc (FlashInfer, TVM-FFI), gcc that of Triton",
    "aria2": "fetches weights, and resumes after any kill",
    "nftables": "keeps the server's ports on the machine: torch's rendezvous store listens on every interface",
    "libnuma1": "sglang-kernel is linked with libnuma.so.1",
    "numactl": "shows and sets the NUMA nodes of processes",
    "pciutils": "lspci tells the GPUs of a machine that has no driver yet",
    "procps": "ps and sysctl, missing in minimal images",
}

APT_CONFIGURATION_FILE = "/etc/apt/apt.conf.d/90kimi-nodes"

APT_CONFIGURATION = """\
// Laid down by kimi-nodes.
// Wait for whoever holds the package lock (unattended-upgrades, cloud-init), seconds, instead of failing at once.
DPkg::Lock::Timeout "600";
// A mirror that drops a connection is asked again.
Acquire::Retries "3";
"""

DEVICE_GROUPS = ("video", "render")
"""Groups that own GPU device nodes where a distribution restricts them; the service user joins those that exist."""
