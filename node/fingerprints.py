"""What goes wrong on a node, as data: how it shows, why it happens, what to do, and who found it out.

`diagnose.py` matches logs and states against FINGERPRINTS, and docs/troubleshooting.md shows the same table
(`python -m node.fingerprints`), so that the two cannot disagree. Order matters: a line counts for the first fingerprint
that it matches, so the specific ones stand before the general ones.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from node.layout import (
    CACHE,
    CONFIGURATION,
    CURRENT,
    RECEIPTS,
    SERVICE_USER,
    SHARING_FIREWALL,
    SHARING_UNIT,
    TOOLS,
    WEIGHTS_AGENT,
)
from node.problems import excerpt
from node.releases import DEFAULT_RELEASE, RELEASES

Severity = Literal["error", "warning"]

_RELEASE = RELEASES[DEFAULT_RELEASE]
_TOOLKIT = _RELEASE.toolkit
_DEPLOY = "pyinfra INVENTORY deploy.py"
_SETTINGS = f"{CONFIGURATION}/sglang-PROFILE.env"
_REBUILD = f'systemctl stop UNIT; rm -r "$(readlink -f {CURRENT})"; {_DEPLOY} builds it anew'
_VERIFY = f"/usr/bin/python3 {WEIGHTS_AGENT} verify --deep"

ANYTHING = ("*",)
"""As `explained_by`: a consequence, told only where nothing else was found that could be its cause."""

WINDOW = 40
"""How many lines back `after` is looked for: no traceback of SGLang's is longer from the frame to its last line."""

SEEN_CHARACTERS = 200
LONGEST_LINE = 4000
"""What is looked at of a line: ninja prints whole command lines, and says what is wrong in lines of their own."""


@dataclass(frozen=True)
class Fingerprint:
    """One way to fail.

    id: its name in reports and on the page. section: the page's heading. seen: how it shows; where there are patterns,
    real log lines that match them (a seen text of several lines needs all of them). patterns: regular expressions,
    searched in single lines; none where only a host's state shows it. A pattern may have groups "cause" and "fix",
    which then stand for the fields. after: a pattern that one of the WINDOW lines before must match as well.
    explained_by: ids that, once found, are the true cause, so that this one is not told. cause, fix: one line each; in
    a fix INVENTORY, HOST and UNIT stand for what the finding is about. source: who found it out.
    """

    id: str
    section: str
    seen: tuple[str, ...]
    patterns: tuple[str, ...]
    cause: str
    fix: str
    source: str
    severity: Severity = "error"
    after: str | None = None
    explained_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """A fingerprint found in one log.

    text: the line it was last seen in, secrets not yet hidden. times: in how many lines. last: Unix time of the last
    one, where the log has times. cause, fix: the fingerprint's, or the line's own.
    """

    fingerprint: Fingerprint
    text: str
    times: int
    last: float | None
    cause: str
    fix: str


@dataclass(frozen=True)
class Line:
    """One line of a log. time: Unix time, None where the log does not say."""

    text: str
    time: float | None = None


_JIT, _APT, _GPU, _NCCL = "Just-in-time compilers", "apt and the toolkits", "GPUs and drivers", "NCCL and the fabric"
_SERVER, _UNIT, _DISK, _REACH = "The server", "Units and releases", "Weights, memory and disks", "Reaching the host"

HOST_WIDE = (_GPU, _NCCL, _DISK)

FINGERPRINTS: tuple[Fingerprint, ...] = (
    # --- just-in-time compilers --------------------------------------------------------------------------------------
    Fingerprint(
        "nvcc-too-old",
        _JIT,
        seen=(
            "Failed to get device capability: SM 12.x requires CUDA >= 12.9.",
            "RuntimeError: SM 12.x requires CUDA >= 12.9",
            "nvcc fatal   : Unsupported gpu architecture 'compute_120f'",
            "ptxas fatal   : Value 'sm_120f' is not defined for option 'gpu-name'",
        ),
        patterns=(
            r"SM 12\.x requires CUDA >= 12\.9",
            r"SM 12\.1\+ requires CUDA >= 12\.9",
            r"SM 120 requires CUDA >= 12\.8",
            r"nvcc fatal\s*: Unsupported gpu architecture 'compute_1\d\d[af]?'",
            r"ptxas fatal\s*: Value 'sm_1\d\d[af]?' is not defined for option 'gpu-name'",
            r"nvrtc: error: invalid value for --gpu-architecture",
        ),
        cause="the nvcc that was found is older than CUDA 12.9, the first that compiles for sm_120f and sm_103",
        fix=f"grep CUDA_HOME {_SETTINGS}: no other than {_TOOLKIT.prefix} may stand there; then {_TOOLKIT.nvcc_path} "
        f"--version must say {_TOOLKIT.nvcc}; {_DEPLOY} brings both about",
        source="run with nvcc 12.4 and with a stand-in for 12.8; flashinfer/compilation_context.py, flashinfer issue "
        "3674",
    ),
    Fingerprint(
        "no-gpu-to-compile-for",
        _JIT,
        seen=("RuntimeError: FlashInfer requires GPUs with sm75 or higher",),
        patterns=(
            r"FlashInfer requires GPUs with sm75 or higher",
            r"No supported CUDA architectures found for major versions",
        ),
        cause="FlashInfer has no architecture to compile for: no GPU is visible to the process and "
        "FLASHINFER_CUDA_ARCH_LIST is not set (with the warning 'SM 12.x requires CUDA' before it, the cause is an "
        "old nvcc instead)",
        fix=f"nvidia-smi -L must list the GPUs; {_SETTINGS} must name FLASHINFER_CUDA_ARCH_LIST; systemctl show -p "
        "DeviceAllow UNIT must name the nvidia devices",
        source="run without a GPU; check_cuda_arch in flashinfer/jit/core.py refuses an empty set, never a new GPU",
        explained_by=("nvcc-too-old", "driver-not-loaded", "driver-library-mismatch", "gpus-missing"),
    ),
    Fingerprint(
        "toolkit-header-missing",
        _JIT,
        seen=("sampling.cuh:20:10: fatal error: curand.h: No such file or directory",),
        patterns=(
            r"fatal error: (?:cu(?:rand|blas|sparse|solver|fft|da)\w*|nvrtc|(?:nvtx3|crt|cub|thrust)/\S+)\.\w+: "
            r"No such file or directory",
        ),
        cause="the CUDA toolkit is only partly there; apt-get remove libcurand-dev-13-0, for one, also takes "
        f"{_TOOLKIT.package} with it",
        fix=f"{_DEPLOY} puts the whole {_TOOLKIT.package} back; never link headers of another toolkit into it",
        source="run with libcurand-dev-13-0 removed; flashinfer issue 4410",
    ),
    Fingerprint(
        "python-header-missing",
        _JIT,
        seen=("main.c:5:10: fatal error: Python.h: No such file or directory",),
        patterns=(r"fatal error: Python\.h: No such file or directory",),
        cause="Triton compiles its launchers against the system's Python headers, and python3-dev is not installed",
        fix=f"{_DEPLOY} installs python3-dev",
        source="triton/runtime/build.py",
    ),
    Fingerprint(
        "host-compiler-missing",
        _JIT,
        seen=(
            "nvcc fatal   : Failed to preprocess host compiler properties.",
            "RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set "
            "triton.knobs.build.impl.",
        ),
        patterns=(
            r"nvcc fatal\s*: Failed to preprocess host compiler properties",
            r"Failed to find C compiler\. Please specify via CC",
            r"(?:c\+\+|g\+\+|gcc): (?:command )?not found",
            r"No such file or directory: '(?:c\+\+|g\+\+|gcc|cc)'",
        ),
        cause="there is no gcc or g++ on the unit's PATH: nvcc and Triton both hand part of each compilation to it",
        fix=f"{_DEPLOY} installs build-essential; PATH in {_SETTINGS} must have /usr/bin",
        source="run: nvcc 13.0 with a PATH without gcc; triton/runtime/build.py",
    ),
    Fingerprint(
        "toolkit-mixed",
        _JIT,
        seen=(
            'cuda_toolkit.h:41:8: error: #error "CUDA compiler and CUDA toolkit headers are incompatible, please '
            "check your "
            'include paths"',
        ),
        patterns=(r"CUDA compiler and CUDA toolkit headers are incompatible",),
        cause="nvcc and the headers it found are of different versions; the release's own wheels bring such a pair in "
        "site-packages/nvidia/cu13",
        fix=f"CUDA_HOME in {_SETTINGS} must be {_TOOLKIT.prefix} and never lie in the environment; {_DEPLOY} sets it "
        "and refuses headers that are links into another toolkit",
        source="run with CUDA_HOME in site-packages: nvcc 13.2 over the runtime's headers 13.0",
    ),
    Fingerprint(
        "toolkit-not-linkable",
        _JIT,
        seen=("/usr/bin/ld: cannot find -lcudart: No such file or directory",),
        patterns=(r"cannot find -lcuda(?:rt)?\b", r"cannot find -l(?:curand|cublas(?:Lt)?|nvrtc)\b"),
        cause="CUDA_HOME has no lib64 with the toolkit's libraries and stubs, as site-packages/nvidia/cu13 has none",
        fix=f"CUDA_HOME in {_SETTINGS} must be {_TOOLKIT.prefix}; ls {_TOOLKIT.prefix}/lib64/libcudart.so; {_DEPLOY} "
        "mends both",
        source="run with CUDA_HOME in site-packages",
    ),
    Fingerprint(
        "nvcc-missing",
        _JIT,
        seen=(
            "/bin/sh: 1: /usr/local/cuda/bin/nvcc: not found",
            "RuntimeError: nvcc not found and PyTorch is not built with CUDA support. Could not determine CUDA "
            "version.",
            "RuntimeError: Could not find CUDA installation. Please set CUDA_HOME environment variable.",
        ),
        patterns=(
            r"\bnvcc: (?:command )?not found",
            r"nvcc not found and PyTorch is not built with CUDA",
            r"Could not find nvcc and default cuda_home",
            r"Could not find CUDA installation\. Please set CUDA_HOME",
            r"No such file or directory: '[^']*\bnvcc'",
        ),
        cause="no compiler where CUDA_HOME points, or no CUDA_HOME: then /usr/local/cuda is taken, a link that any "
        "runtime package may move to a tree without a compiler",
        fix=f"{_TOOLKIT.nvcc_path} --version; {_SETTINGS} must name CUDA_HOME={_TOOLKIT.prefix}; {_DEPLOY} mends both",
        source="run without nvcc; flashinfer/jit/cpp_ext.py, tvm_ffi/cpp/extension.py; flashinfer issue 1781",
    ),
    Fingerprint(
        "ninja-missing",
        _JIT,
        seen=("FileNotFoundError: [Errno 2] No such file or directory: 'ninja'",),
        patterns=(
            r"No such file or directory: '(?:\S*/)?ninja'",
            r"\bninja: (?:command )?not found",
            r"Ninja is required to load C\+\+ extensions",
        ),
        cause="ninja lies in the release's environment, and that environment's bin is not on the PATH of the process",
        fix=f"start the server by its unit, never by hand; PATH in {_SETTINGS} must begin with the release's bin; "
        f"{_DEPLOY} sets it",
        source="flashinfer pull request 3386",
    ),
    Fingerprint(
        "toolkit-and-glibc",
        _JIT,
        seen=(
            'mathcalls.h(83): error: exception specification is incompatible with that of previous function "cospi"',
        ),
        patterns=(
            r"exception specification is incompatible with that of previous function \"(?:cospi|sinpi|rsqrt)f?\"",
        ),
        cause="the system's glibc is newer than this toolkit's headers know: 12.8 fails from glibc 2.41, 13.0 from "
        "2.42",
        fix="use a system of README.md's table; in the inventory take the toolkit out of toolkits_beside, or, where "
        f"UNIT uses it, set CUDA_HOME to {_TOOLKIT.prefix}",
        source="1Cat-vLLM issue 215, opencv issue 27111, NixOS issue 512796",
    ),
    Fingerprint(
        "compiler-out-of-memory",
        _JIT,
        seen=(
            "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
            "Out of memory: Killed process 4711 (cicc) total-vm:3145728kB",
        ),
        patterns=(
            r"died due to signal 9\b",
            r"fatal error: Killed signal terminated program cc1plus",
            r"[Oo]ut of memory: Killed process \d+ \((?:cicc|ptxas|cudafe\+\+|nvcc|cc1plus|nvlink|ninja)\)",
        ),
        cause="the kernel killed a compiler: more compile jobs ran at once than the free memory bears",
        fix="stop what else takes memory (free -h), then start the warm-up by its unit, which bounds its jobs by free "
        "memory: systemctl start kimi-warmup-PROFILE",
        source="flashinfer issues 3634, 3030",
    ),
    Fingerprint(
        "flashinfer-parts-differ",
        _JIT,
        seen=(
            "RuntimeError: flashinfer-cubin version (0.6.12) does not match flashinfer version (0.6.15.post1). Please "
            "install the same version of both packages.",
        ),
        patterns=(r"flashinfer-(?:cubin|jit-cache) version \(.*\) does not match flashinfer version",),
        cause="somebody installed into the release: its lock holds versions that belong together",
        fix=f"a release is never changed, only built: {_REBUILD}",
        source="flashinfer/jit/env.py",
    ),
    Fingerprint(
        "cubins-not-fetched",
        _JIT,
        seen=(
            "https://mirror.example/cubins/158f6fa1/fmha/trtllm-gen/checksums.txt: found status 404, wanted the file. "
            "Fix: see that this host reaches that address",
            "https://mirror.example/a.cubin: found SHA-256 0123456789abcdef in 2 tries, wanted fedcba9876543210",
            "RuntimeError: Artifact not found locally: 158f6fa1/fmha/trtllm-gen/checksums.txt (looked at /x). "
            "FLASHINFER_NO_DOWNLOAD is set",
        ),
        patterns=(
            r"(?:checksums\.txt|\.cubin|\.h): found (?:status \d+|no answer|a transfer that breaks off|SHA-256)",
            r"Artifact not found locally: .*FLASHINFER_NO_DOWNLOAD",
        ),
        cause="the kernels that NVIDIA ships compiled for B200 and B300 could not be fetched: no way to the "
        "repository, or what came is not what FlashInfer pins",
        fix="mend the way there (a proxy stands in /etc/environment) or set cubins_repository in the inventory to a "
        f"mirror; then {_DEPLOY}; journalctl -u kimi-cubins says which file",
        source="files/tools/cubins.py; flashinfer/jit/cubin_loader.py",
    ),
    Fingerprint(
        "two-cuda-runtimes",
        _JIT,
        seen=(
            "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
            "RuntimeError: Multiple libcudart libraries found: libcudart.so.12 and libcudart.so.13",
        ),
        patterns=(
            r"Multiple libcudart libraries found",
            r"lib(?:cudart|nvrtc|cublas|cublasLt|cusparse|curand)\.so\.1[123]: cannot open shared object file",
        ),
        cause="a package built for another major version of CUDA than the release's torch",
        fix=f"the lock brings one CUDA only: {_REBUILD}; for cuDNN's complaint also look at "
        "/etc/ld.so.conf.d/988_cuda-12.conf",
        source="sglang pull request 22833, cuDNN frontend reports",
    ),
    Fingerprint(
        "compiled-file-cut-short",
        _JIT,
        seen=("OSError: /var/cache/kimi-nodes/5527e80eb0724d2a/.cache/flashinfer/sampling.so: file too short",),
        patterns=(r"\.so(?:\.\d+)*: (?:file too short|invalid ELF header)",),
        cause="a compiled library was cut off while it was written: the disk was full, or the compiler's parent was "
        "killed",
        fix=f"df -h {CACHE}; systemctl stop UNIT; remove the file's folder below {CACHE}; {_DEPLOY} compiles it anew",
        source="ld.so's own text; flashinfer pull request 4490 on stale caches",
    ),
    Fingerprint(
        "cache-not-ours",
        _JIT,
        seen=(
            "PermissionError: [Errno 13] Permission denied: '/var/cache/kimi-nodes/5527e80eb0724d2a/.cache/flashinfer'",
        ),
        patterns=(rf"Permission denied: '{re.escape(CACHE)}/",),
        cause="files in the release's cache belong to another user: somebody ran the engine or the warm-up by hand, "
        "as root",
        fix=f"chown -R {SERVICE_USER}: the folder that is named; then start programs by their units only",
        source="files and folders below the cache are laid down by the role inference_service",
    ),
    Fingerprint(
        "shared-memory-of-gpu",
        _JIT,
        seen=(
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: "
            "101376. Reducing block sizes or `num_stages` may help.",
        ),
        patterns=(r"out of resource: shared memory, Required: \d+, Hardware limit: \d+",),
        cause="a Triton kernel's tile was chosen for a GPU with more shared memory; sm_120 has 101,376 bytes a block",
        fix="use an attention backend of the profile (node/profiles.py), not one given by hand; else report it with "
        "the release",
        source="ktransformers issue 1570; triton/runtime/errors.py",
    ),
    Fingerprint(
        "no-kernel-for-this-gpu",
        _JIT,
        seen=("RuntimeError: CUDA error: no kernel image is available for execution on the device",),
        patterns=(r"no kernel image is available for execution on the device",),
        cause="compiled code without this GPU's architecture: a cache or a wheel made for another kind of GPU",
        fix=f"the inventory's gpu must be what nvidia-smi -L says; then remove the release's folder below {CACHE} and "
        f"run {_DEPLOY}",
        source="CUDA runtime API, cudaErrorNoKernelImageForDevice",
    ),
    # --- apt and the toolkits ----------------------------------------------------------------------------------------
    Fingerprint(
        "apt-key",
        _APT,
        seen=(
            "W: GPG error: https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64  InRelease: The "
            "following signatures couldn't be verified because the public key is not available: NO_PUBKEY "
            "A4B469963BF863CC",
        ),
        patterns=(r"\bNO_PUBKEY\b", r"\bEXPKEYSIG\b", r"^\W*W: (?:GPG error|.*is not signed)"),
        cause="the repository's list could not be verified and the old one is used; apt-get update exits 0 all the "
        "same",
        fix=f"apt-get update 2>&1 | grep ^W: must be empty; {_DEPLOY} fetches the key and checks its fingerprint",
        source="run with a wrong key",
    ),
    Fingerprint(
        "apt-signed-by",
        _APT,
        seen=(
            "E: Conflicting values set for option Signed-By regarding source "
            "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/",
        ),
        patterns=(r"Conflicting values set for option Signed-By",),
        cause="two source lines name the same repository with different keys",
        fix="grep -r developer.download.nvidia.com /etc/apt/sources.list.d; remove the line that kimi-nodes did not "
        "write",
        source="run with the package cuda-keyring beside our own source",
    ),
    Fingerprint(
        "apt-lock",
        _APT,
        seen=("E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 4711 (unattended-upgr)",),
        patterns=(r"Could not get lock /var/lib/(?:dpkg|apt)/",),
        cause="another apt is at work, mostly unattended-upgrades or cloud-init after a start",
        fix=f"wait until it has ended (ps -C apt-get,dpkg,unattended-upgr), then {_DEPLOY}, which waits ten minutes "
        "by itself",
        source="apt's own text",
        severity="warning",
    ),
    Fingerprint(
        "apt-interrupted",
        _APT,
        seen=("E: dpkg was interrupted, you must manually run 'dpkg --configure -a' to correct the problem.",),
        patterns=(r"dpkg was interrupted, you must manually run",),
        cause="an installation was cut off, by a reboot or a kill",
        fix=f"{_DEPLOY} finishes it first; by hand: dpkg --configure -a",
        source="dpkg's own text",
    ),
    Fingerprint(
        "apt-held-back",
        _APT,
        seen=("E: Unable to correct problems, you have held broken packages.",),
        patterns=(r"you have held broken packages",),
        cause="a hold or a pin keeps a package at a version that what is to be installed cannot stand",
        fix="apt-mark showhold; grep -r . /etc/apt/preferences.d; lift what the NVIDIA packages need, deploy, hold it "
        "again",
        source="NVIDIA ansible-role-nvidia-driver pull requests 11, 28, 33",
    ),
    Fingerprint(
        "apt-version-gone",
        _APT,
        seen=("E: Version '13.0.2-1' for 'cuda-toolkit-13-0' was not found",),
        patterns=(
            r"E: Version '[^']+' for 'cuda-\S+' was not found",
            r"E: Unable to locate package cuda-\S+",
            r"E: The repository '.*cuda.*' (?:no longer has|does not have) a Release file",
        ),
        cause="the repository does not have that package or version: the wrong folder for this system, or a mirror "
        "that is behind",
        fix="apt-cache policy "
        + _TOOLKIT.package
        + "; the inventory key cuda_repository must lead to NVIDIA's folders",
        source="run with an unknown version",
    ),
    Fingerprint(
        "cuda-link",
        _APT,
        seen=("/usr/local/cuda leads to a folder without bin/nvcc",),
        patterns=(),
        cause="a runtime package alone, such as cuda-cudart-13-0, moves the alternative to its tree, which has no "
        "compiler; nothing of kimi-nodes uses that link, others may",
        fix="update-alternatives --set cuda /usr/local/cuda-VERSION, one that has bin/nvcc",
        source="run: cuda-cudart-13-0 installed alone; owl-project issue 191",
        severity="warning",
    ),
    Fingerprint(
        "toolkit-missing",
        _APT,
        seen=("no nvcc where the release's toolkit belongs, or one of another version",),
        patterns=(),
        cause="the release's CUDA toolkit was removed, replaced or never finished installing",
        fix=f"{_DEPLOY} installs {_TOOLKIT.package} at its exact version and proves it by compiling",
        source="nvcc --version, asked at the toolkit's own path",
    ),
    # --- GPUs and drivers --------------------------------------------------------------------------------------------
    Fingerprint(
        "gpu-fell-off",
        _GPU,
        seen=(
            "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "Unable to determine the device handle for GPU0000:41:00.0: Unknown Error",
        ),
        patterns=(
            r"NVRM: Xid \([^)]*\): 79\b",
            r"GPU has fallen off the bus",
            r"Unable to determine the device handle for (?:GPU|gpu)",
        ),
        cause="a GPU no longer answers on PCIe: power, heat, the riser or the card itself",
        fix="nvidia-smi -L and lspci -nn -d 10de: show which; reboot; if it comes back, look at power and "
        "temperature, else reseat it",
        source="NVIDIA's Xid catalogue, 79: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html",
    ),
    Fingerprint(
        "gpu-memory-errors",
        _GPU,
        seen=("NVRM: Xid (PCI:0000:41:00): 94, pid=4711, name=python3, Contained: SM (0x1). RST: No, D-RST: No",),
        patterns=(r"NVRM: Xid \([^)]*\): (?:48|63|64|94|95|140),",),
        cause="uncorrectable errors in a GPU's memory; a row that is marked for remapping is replaced at the next "
        "reset only",
        fix="nvidia-smi -q -d ECC,ROW_REMAPPER; stop UNIT, reboot; if a remap failed or errors come back, the card is "
        "to be replaced",
        source="NVIDIA's Xid catalogue, 48, 63, 64, 94, 95, 140: https://docs.nvidia.com/deploy/xid-errors/",
    ),
    Fingerprint(
        "nvlink-errors",
        _GPU,
        seen=(
            "NVRM: Xid (PCI:0000:41:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 3",
        ),
        patterns=(r"NVRM: Xid \([^)]*\): (?:74|14[4-9]|150),",),
        cause="an NVLink failed; what runs over it stops or hangs",
        fix="nvidia-smi nvlink -s and -e; journalctl -u nvidia-fabricmanager; reboot; if one link stays bad, its "
        "board is to be replaced",
        source="NVIDIA's Xid catalogue, 74, 144 to 150: https://docs.nvidia.com/deploy/xid-errors/",
    ),
    Fingerprint(
        "gpu-firmware-silent",
        _GPU,
        seen=(
            "NVRM: Xid (PCI:0000:41:00): 119, pid=4711, name=python3, Timeout after 45s of waiting for RPC response "
            "from GPU0 GSP!",
        ),
        patterns=(r"NVRM: Xid \([^)]*\): (?:119|120|62|109),",),
        cause="the GPU's own firmware (GSP) stopped answering the driver",
        fix="stop UNIT; reboot (nvidia-smi --gpu-reset seldom suffices); if it comes back, take a newer driver of the "
        "same branch",
        source="NVIDIA's Xid catalogue, 62, 109, 119, 120: https://docs.nvidia.com/deploy/xid-errors/",
    ),
    Fingerprint(
        "kernel-on-gpu-failed",
        _GPU,
        seen=(
            "NVRM: Xid (PCI:0000:41:00): 31, pid=4711, name=sglang::schedul, Ch 0000000b, MMU Fault: ENGINE GRAPHICS",
        ),
        patterns=(r"NVRM: Xid \([^)]*\): (?:13|31|43),",),
        cause="a kernel of the engine touched memory it does not own: a fault of software, seldom of the GPU",
        fix="see what ran in journalctl -u UNIT at that time; the same profile without CUDA graphs (profile "
        "NAME-eager) tells more; if other processes die of it too, test the card",
        source="NVIDIA's Xid catalogue, 13, 31, 43: https://docs.nvidia.com/deploy/xid-errors/",
        severity="warning",
    ),
    Fingerprint(
        "gpu-other-xid",
        _GPU,
        seen=("NVRM: Xid (PCI:0000:41:00): 69, pid=4711, name=python3, Class Error: ChId 0005",),
        patterns=(r"NVRM: Xid \([^)]*\): (?!45\b)\d+",),  # 45 only says that a process with work on the GPU was killed
        cause="the driver reports a fault of a GPU under the number after the address",
        fix="look the number up: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html",
        source="NVIDIA's Xid catalogue",
        severity="warning",
        explained_by=("gpu-fell-off", "gpu-memory-errors", "nvlink-errors", "gpu-firmware-silent"),
    ),
    Fingerprint(
        "driver-library-mismatch",
        _GPU,
        seen=(
            "Failed to initialize NVML: Driver/library version mismatch",
            "NVRM: API mismatch: the client has the version 580.126.20, but this kernel module has the version "
            "580.95.05.",
        ),
        patterns=(r"Driver/library version mismatch", r"NVRM: API mismatch"),
        cause="the driver's libraries were upgraded under a running kernel module, mostly by unattended-upgrades",
        fix="reboot, or stop UNIT and reload the modules; then apt-mark hold the driver's packages",
        source="pando85/homelab pull request 4110; Debian bug 889669",
    ),
    Fingerprint(
        "driver-needs-open-modules",
        _GPU,
        seen=("NVRM: installed in this system requires use of the NVIDIA open kernel modules.",),
        patterns=(r"requires use of the NVIDIA open kernel modules",),
        cause="the proprietary kernel modules are installed; Blackwell GPUs run with the open ones only",
        fix="install nvidia-open of the same branch instead of cuda-drivers, then reboot; modinfo -F license nvidia "
        "must say Dual MIT/GPL",
        source="NVIDIA's driver installation guide",
    ),
    Fingerprint(
        "driver-not-loaded",
        _GPU,
        seen=(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.",
        ),
        patterns=(
            r"couldn't communicate with the NVIDIA driver",
            r"NVML: (?:Driver Not Loaded|ERROR_DRIVER_NOT_LOADED)",
            r"obtained ownership of the NVIDIA device",
        ),
        cause="no NVIDIA kernel module for the running kernel: a new kernel without its module, or nouveau holds the "
        "cards",
        fix="dkms status; install the running kernel's headers (linux-headers-$(uname -r)), dkms autoinstall, "
        "modprobe nvidia",
        source="GoogleCloudPlatform/ops-agent pull request 2426",
        explained_by=("driver-needs-open-modules",),
    ),
    Fingerprint(
        "driver-missing",
        _GPU,
        seen=(
            "no program nvidia-smi, or no libcuda.so.1, on the host",
            "ImportError: libcuda.so.1: cannot open shared object file",
        ),
        patterns=(
            r"libcuda\.so(?:\.1)?(?:: cannot open shared object file| cannot found!)",
            r"\bFailed to open libcuda\.so\.1",
            r"no program nvidia-smi",
        ),
        cause="the NVIDIA driver is not installed, or not all of it: this toolkit checks the driver and never "
        "installs it",
        fix=f"install nvidia-open {_RELEASE.driver_floor} or newer and its libraries, reboot; nvidia-smi -L must list "
        "the GPUs",
        source="README.md, what it runs on",
    ),
    Fingerprint(
        "driver-too-old",
        _GPU,
        seen=(
            "RuntimeError: The NVIDIA driver on your system is too old (found version 12080).",
            "CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        ),
        patterns=(
            r"NVIDIA driver on your system is too old",
            r"CUDA driver version is insufficient for CUDA runtime version",
            r"the provided PTX was compiled with an unsupported toolchain",
        ),
        cause=f"the driver is older than CUDA 13.0 needs, {_RELEASE.driver_floor}",
        fix="cat /proc/driver/nvidia/version; install a driver of the 580 branch or newer, reboot",
        source="CUDA 13.0 release notes, table of minimum drivers",
    ),
    Fingerprint(
        "gpus-missing",
        _GPU,
        seen=("nvidia-smi lists fewer GPUs than the inventory says", "No devices were found"),
        patterns=(r"^\W*No devices were found", r"RuntimeError: No CUDA GPUs are available"),
        cause="a GPU fell off the bus or was never initialised, while every service may look well",
        fix="nvidia-smi -L; lspci -nn -d 10de:; journalctl -k -g NVRM says why; mostly a reboot brings it back",
        source="an 8-GPU host seen with 7 GPUs and every service green",
        explained_by=("driver-needs-open-modules", "driver-not-loaded", "driver-library-mismatch", "gpu-fell-off"),
    ),
    Fingerprint(
        "nvidia-smi-hangs",
        _GPU,
        seen=("nvidia-smi did not end within 60 s",),
        patterns=(r"nvidia-smi did not end within",),
        cause="the driver waits for a GPU that does not answer; whatever asks it now hangs as well",
        fix="journalctl -k -g NVRM; reboot, by the machine's management controller where a shutdown hangs too",
        source="a process in state D cannot be killed",
    ),
    Fingerprint(
        "uvm-device-missing",
        _GPU,
        seen=(
            "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing "
            "env variable CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero.",
        ),
        patterns=(r"CUDA unknown error - this may be due to an incorrectly set up environment",),
        cause="/dev/nvidia-uvm was not there when the unit's allowed devices were worked out, or the unit may not "
        "open it",
        fix="ls -l /dev/nvidia*; nvidia-modprobe -u -c 0; systemctl restart UNIT",
        source="systemd.resource-control(5): a group that /proc/devices does not have is skipped",
    ),
    Fingerprint(
        "gpu-busy",
        _GPU,
        seen=("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",),
        patterns=(r"CUDA-capable device\(s\) is/are busy or unavailable",),
        cause="a GPU is in exclusive mode and another process has it, or it is waiting for a reset",
        fix="nvidia-smi -q -d COMPUTE must say Default; nvidia-smi pmon -c 1 shows who has it",
        source="CUDA runtime API, cudaErrorDevicesUnavailable",
    ),
    Fingerprint(
        "pcie-errors",
        _GPU,
        seen=("pcieport 0000:40:01.1: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",),
        patterns=(
            r"PCIe Bus Error: severity=Uncorrect",
            r"AER: .*Uncorrect(?:ed|able)",
            r"Surprise (?:Link )?Down",
            r"pciehp: Slot\(\S+\): Link Down",
        ),
        cause="a PCIe link failed: power saving of links (ASPM), the riser, the slot or the card",
        fix="find the card behind the port (lspci -tv); try pcie_aspm=off pcie_port_pm=off on the kernel's command "
        "line; else reseat",
        source="rtx6kpro wiki, common issues",
    ),
    Fingerprint(
        "iommu-faults",
        _GPU,
        seen=(
            "nvidia 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x000e address=0x20000000 flags=0x0030]",
            "DMAR: [DMA Write NO_PASID] Request device [41:00.0] fault addr 0xfe000000",
        ),
        patterns=(r"AMD-Vi: Event logged \[IO_PAGE_FAULT", r"DMAR: \[DMA (?:Read|Write)"),
        cause="the IOMMU translates and refuses what a device sends; peer-to-peer between GPUs then hangs or corrupts",
        fix="if the address is a GPU's: iommu=pt on the kernel's command line, ACS redirection off in the firmware; "
        "reboot; nvidia-smi topo -p2p p must say OK",
        source="NVIDIA/nccl issue 2079, rtx6kpro issue 15",
        severity="warning",
    ),
    # --- NCCL and the fabric -----------------------------------------------------------------------------------------
    Fingerprint(
        "fabric-manager-version",
        _NCCL,
        seen=(
            "fabric manager NVIDIA GPU driver interface version 580.178.04 don't match with driver version "
            "580.173.02. Please update with matching NVIDIA driver package.",
        ),
        patterns=(r"driver interface version \S+ don't match with driver version",),
        cause="the fabric manager must be of exactly the driver's version; one of the two was upgraded alone",
        fix="install nvidia-fabricmanager of the version that cat /proc/driver/nvidia/version says, hold both, reboot",
        source="nv-fabricmanager's own text; NVIDIA's fabric manager guide",
    ),
    Fingerprint(
        "ib-umad-missing",
        _NCCL,
        seen=(
            "Kernel module ib_umad has not been loaded, fabric manager cannot be started",
            "umad_init: can't read ABI version from /sys/class/infiniband_mad/abi_version (No such file or "
            "directory): is ib_umad module loaded?",
        ),
        patterns=(r"ib_umad has not been loaded", r"is ib_umad module loaded\?"),
        cause="the fabric manager of NVLink 5 machines (B200, B300) talks to the switches through ib_umad, which is "
        "not loaded",
        fix="modprobe ib_umad; echo ib_umad > /etc/modules-load.d/ib_umad.conf; systemctl restart "
        "nvidia-fabricmanager; where there is no such module, install linux-modules-extra-$(uname -r)",
        source="spectrocloud/CanvOS pull request 700, siderolabs/docs pull request 581",
    ),
    Fingerprint(
        "subnet-manager-missing",
        _NCCL,
        seen=("failed to initialize NVSwitch fabric, error: NV_WARN_NOTHING_TO_DO",),
        patterns=(r"NV_WARN_NOTHING_TO_DO",),
        cause="the fabric manager finds no switches: on B200 and B300 the NVLink subnet manager (package nvlsm) or "
        "mlx5_ib is missing, in a virtual machine the host has them",
        fix="dpkg -l nvlsm nvidia-fabricmanager; lsmod | grep -e mlx5_ib -e ib_umad; install what is missing, restart "
        "nvidia-fabricmanager",
        source="siderolabs/extensions pull request 717, NVIDIA/gpu-operator issue 2781",
        explained_by=("ib-umad-missing",),
    ),
    Fingerprint(
        "fabric-not-up",
        _NCCL,
        seen=("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",),
        patterns=(r"system not yet initialized", r"CUDA_ERROR_SYSTEM_NOT_READY", r"cudaErrorSystemNotReady"),
        cause="the NVSwitch fabric is not up: the GPUs have not been registered by the fabric manager",
        fix="nvidia-smi -q | grep -A3 Fabric must say Completed; systemctl status nvidia-fabricmanager says why it "
        "does not",
        source="NVIDIA/gpu-operator issue 2781",
        explained_by=("fabric-manager-version", "ib-umad-missing", "subnet-manager-missing"),
    ),
    Fingerprint(
        "shm-full",
        _NCCL,
        seen=(
            "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216), error: No "
            "space left on device (28)",
        ),
        patterns=(
            r"Error while creating shared memory segment",
            r"failed to extend /dev/shm",
            r"/dev/shm/\S+.*No space left on device",
        ),
        cause="/dev/shm is full, mostly of nccl-* segments that killed servers left behind",
        fix="with the server stopped: find /dev/shm -maxdepth 1 -name 'nccl-*' -delete; df -h /dev/shm",
        source="llm-d issue 352; the unit removes them before each start",
    ),
    Fingerprint(
        "nccl-segments-left",
        _NCCL,
        seen=("nccl-* segments in /dev/shm while no engine runs",),
        patterns=(),
        cause="a killed server left its segments behind; over a crash loop they fill /dev/shm",
        fix="find /dev/shm -maxdepth 1 -name 'nccl-*' -delete; the unit also does it before each start",
        source="llm-d issue 352",
        severity="warning",
    ),
    Fingerprint(
        "collective-hangs",
        _NCCL,
        seen=(
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE) ran for 600012 "
            "milliseconds",
            "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
        ),
        patterns=(r"caught collective operation timeout", r"\bwatchdog timeout \(self\.watchdog_timeout="),
        cause="work on the GPUs never ended: a collective that hangs, over PCIe because of IOMMU or ACS (all GPUs "
        "then say 100 percent at a quarter of their power), or kernels still being compiled by the first request",
        fix="nvidia-smi topo -p2p p must say OK; iommu=pt on the kernel's command line; pytest tests/host says "
        "whether the cache is warm",
        source="NVIDIA/nccl issues 1999, 2079, rtx6kpro issue 15; sglang/srt/utils/watchdog.py",
        explained_by=("gpu-fell-off", "nvlink-errors", "gpu-firmware-silent", "gpu-memory-errors"),
    ),
    # --- the server --------------------------------------------------------------------------------------------------
    Fingerprint(
        "pipeline-layer-zero",
        _SERVER,
        seen=(
            '  File "/x/sglang/srt/layers/attention/triton_backend.py", line 208, in __init__\n'
            "    self.v_head_dim = model_runner.token_to_kv_pool.get_value_buffer(0).shape[\n"
            "IndexError: list index out of range",
        ),
        patterns=(r"IndexError: list index out of range",),
        after=r"triton_backend\.py|get_value_buffer\(0\)",
        cause="a pipeline stage asks for layer 0, which it does not hold: the source patch of this fault is not in "
        "the engine",
        fix=f"{_DEPLOY} patches the release before it becomes current; pytest tests/host says whether the patch is "
        "in; docs/patches.md",
        source="run: sglang 0.5.11 to 0.5.17 with --pp-size 4; sglang pull request 30340",
    ),
    Fingerprint(
        "gpu-memory-held",
        _SERVER,
        seen=(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "94.97 GiB of which 1.19 GiB is free. Process 4711 has 70.00 GiB memory in use. Including non-PyTorch "
            "memory, this process has 23.00 GiB memory in use.",
            "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
            "GPU memory: GPU 5: found 7252 of 97887 MiB free, wanted 95839; held by 4711 python3 (user ml) 90000 MiB. "
            "Fix: stop process 4711 (python3), which is not this service's, and start again",
        ),
        patterns=(
            r"^GPU memory: (?P<cause>GPU \d+: found .+ held by .+)\. Fix: (?P<fix>.+)",
            r"CUDA out of memory\..*\bProcess \d+ has [\d.]+ [GM]iB memory in use",
            r"memory capacity is unbalanced\. Some GPUs may be occupied by other processes",
        ),
        cause="other processes hold GPU memory, mostly those of a predecessor that was killed",
        fix="nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv; systemctl stop their unit, or "
        "kill them by id",
        source="torch/csrc CUDACachingAllocator; sglang/srt/distributed/bootstrap.py; files/tools/gpu_memory_free.py",
    ),
    Fingerprint(
        "media-refused",
        _SERVER,
        seen=(
            "ValueError: Error while loading data https://example.org/cat.png: HTTPSConnectionPool(host='example.org', "
            'port=443): Max retries exceeded with url: /cat.png (Caused by NameResolutionError("HTTPSConnection('
            "host='example.org', port=443): Failed to resolve 'example.org' ([Errno -3] Temporary failure in name "
            'resolution)"))',
            "ValueError: Error while loading data http://10.0.0.7/a.png: HTTPConnectionPool(host='10.0.0.7', port=80): "
            "Max retries exceeded with url: /a.png (Caused by NewConnectionError(\"HTTPConnection(host='10.0.0.7', "
            'port=80): Failed to establish a new connection: [Errno 111] Connection refused"))',
        ),
        patterns=(
            r"Error while loading data https?://.+ HTTPS?ConnectionPool\(.+(?:Failed to resolve|Connection refused)",
        ),
        cause="a client names a picture by address, and the firewall lets the server fetch none, or only public ones "
        "(fetch_media)",
        fix='clients send pictures as data:image/...;base64, or set fetch_media = "public" in the group data, then '
        + _DEPLOY,
        source="run: sglang 0.5.17's load_image as the server's user",
        severity="warning",
    ),
    Fingerprint(
        "gpu-out-of-memory",
        _SERVER,
        seen=(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "94.97 GiB",
        ),
        patterns=(
            r"CUDA out of memory\.",
            r"CUDA error: out of memory",
            r"cudaErrorMemoryAllocation",
            r"CUBLAS_STATUS_ALLOC_FAILED",
        ),
        cause="the engine wants more GPU memory than there is: memory_fraction leaves too little beside weights and "
        "KV cache, or max_running_requests asks for too large graphs",
        fix="leave memory_fraction out of the inventory, so that the plan works it out; python -m node.render "
        "INVENTORY shows the sum",
        source="0.90 failed and 0.85 held on 8x RTX PRO 6000 (soulmachine/skills, REFERENCE.md)",
    ),
    Fingerprint(
        "no-room-for-kv-cache",
        _SERVER,
        seen=(
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
            "mem_fraction_static=0.7",
        ),
        patterns=(r"Not enough memory\. Please try to increase --mem-fraction-static",),
        cause="the weights alone take what memory_fraction allows, so that nothing is left for the KV cache",
        fix="leave memory_fraction out of the inventory, or raise it; python -m node.render INVENTORY shows the sum "
        "for each GPU",
        source="sglang/srt/model_executor/pool_configurator.py",
    ),
    Fingerprint(
        "sharing-address",
        _DISK,
        seen=(
            "cannot listen on 10.1.0.4:30201 (Cannot assign requested address), wanted this node's address among the "
            "others. Fix: x",
        ),
        patterns=(r"cannot listen on \S+:\d+,? (?:\(.+\), )?wanted this node's address",),
        cause="the sharer of weights cannot listen on this node's address among the others: it is another's, or the "
        "port is taken; this node fetches all of its weights from the hub, and gives none",
        fix="ip -brief address; ss -ltnp; set weights_address of HOST, or weights_port for all, in the inventory; then "
        + _DEPLOY,
        source="files/tools/weights/share.py",
    ),
    Fingerprint(
        "sharing-firewall",
        _DISK,
        seen=(f"{SHARING_FIREWALL}:4:7-13: Error: Could not process rule: Operation not supported",),
        patterns=(rf"^{re.escape(SHARING_FIREWALL)}:\d+:.*Error:", r"Error: cache initialization failed"),
        cause="the kernel does not take the rules that keep strangers from the ports of weights, and without them the "
        "sharer does not start",
        fix=f"/usr/sbin/nft --file {SHARING_FIREWALL} says why (mostly a kernel without nf_tables); or set "
        'weights_sharing = "off" for HOST',
        source="nft(8)",
    ),
    Fingerprint(
        "weights-changed",
        _DISK,
        seen=("/srv/w/model-1.safetensors: is not what it was when it was verified, and is given to nobody. Fix: x",),
        patterns=(r"is not what it was when it was verified",),
        cause="bytes of a weights file have changed on the disk since it was verified: the disk, or somebody",
        fix=f"{_VERIFY} names the files, then {_DEPLOY} mends them, with pieces of other nodes first; look at the disk "
        "(dmesg, smartctl -a)",
        source="libtorrent hashes what it reads before it sends it for the first time",
    ),
    Fingerprint(
        "sharing-silent",
        _DISK,
        seen=("/run/kimi-share/agents.sock: no answer for 20 s, so this node fetches by itself",),
        patterns=(r"no answer for \d+ s, so this node fetches by itself",),
        cause="the node's sharer did not answer its agent, which then fetched from the hub what other nodes have",
        fix=f"systemctl status {SHARING_UNIT}; journalctl -u {SHARING_UNIT} -n 50; {_DEPLOY} starts it again",
        source="files/tools/weights/sharing.py",
        severity="warning",
        explained_by=("sharing-address", "sharing-firewall", "sharing-stopped"),
    ),
    Fingerprint(
        "sharing-stopped",
        _DISK,
        seen=("the unit that gives weights to other nodes does not run",),
        patterns=(),
        cause="somebody stopped it: other nodes cannot have this node's weights, nor it theirs",
        fix=f'{_DEPLOY} starts it; to leave it so, set weights_sharing = "off" for HOST',
        source=f"{SHARING_UNIT}'s own state",
        severity="warning",
    ),
    Fingerprint(
        "port-taken",
        _SERVER,
        seen=(
            "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in "
            "use",
            "ValueError: nccl_port at 30100 is not available in 60 seconds.",
        ),
        patterns=(
            r"[Aa]ddress already in use",
            r"\bEADDRINUSE\b",
            r"\bport \d+ is in use\b",
            r"_port at \d+ is not available in \d+ seconds",
            r"Port is already in use\.",
        ),
        cause="another process listens on the server's port or on its NCCL port",
        fix="ss -ltnp names it; stop it, or change port or nccl_port in the inventory",
        source="sglang/srt/utils/network.py",
    ),
    Fingerprint(
        "weights-not-local",
        _SERVER,
        seen=(
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder for "
            "the specified revision on the local disk",
        ),
        patterns=(
            r"LocalEntryNotFoundError",
            r"OfflineModeIsEnabled",
            r"Cannot (?:find an appropriate cached snapshot|reach \S+: offline mode is enabled)",
            r"couldn't connect to 'https://\S+' to load the files",
        ),
        cause="the engine looks for a file on the hub, which a node never does while it serves: the snapshot is not "
        "whole, or the model's path is not the snapshot",
        fix=f"{_VERIFY} on HOST; systemctl cat UNIT: --model-path must be the snapshot; {_DEPLOY}",
        source="huggingface_hub with HF_HUB_OFFLINE=1",
    ),
    Fingerprint(
        "weights-damaged",
        _SERVER,
        seen=(
            "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully "
            "covered",
        ),
        patterns=(
            r"Error while deserializing header",
            r"\b(?:HeaderTooLarge|InvalidHeaderDeserialization|MetadataIncompleteBuffer|HeaderTooSmall)\b",
        ),
        cause="a weights file is cut short, or a pointer stands where the file belongs",
        fix=f"{_VERIFY} names the file; {_DEPLOY} fetches it anew",
        source="safetensors' own errors",
    ),
    Fingerprint(
        "remote-code-not-trusted",
        _SERVER,
        seen=(
            "ValueError: The repository contains custom code. Please pass the argument `trust_remote_code=True` to "
            "allow it.",
        ),
        patterns=(r"[Pp]lease pass the argument `?trust_remote_code=True`?",),
        cause="the model's own code is needed and was not allowed, so that the server was not started by its unit",
        fix=f"systemctl cat UNIT must have --trust-remote-code; {_DEPLOY} writes it, with the revision pinned",
        source="transformers/dynamic_module_utils.py",
    ),
    Fingerprint(
        "algorithm-unknown",
        _SERVER,
        seen=("ValueError: Unknown speculative algorithm name: DDTREE",),
        patterns=(r"Unknown speculative algorithm name", r"argument --speculative-algorithm: invalid choice"),
        cause="no release has that drafting algorithm; DDTree is in none up to 0.5.23",
        fix="set speculative in the inventory to dflash or none",
        source="run: sglang 0.5.11, 0.5.17, 0.5.23; sglang pull request 29907 is open",
    ),
    Fingerprint(
        "flags-of-another-release",
        _SERVER,
        seen=("launch_server.py: error: unrecognized arguments: --disable-piecewise-cuda-graph",),
        patterns=(r"\berror: (?:unrecognized arguments|ambiguous option|argument --\S+: (?:invalid|expected))",),
        cause="the unit's flags are not those of the release that runs: the unit was edited, or belongs to another "
        "release",
        fix=f"{_DEPLOY} writes the unit for the release; flags are data of node/releases.py",
        source="the argument parsers of 0.5.11, 0.5.17, 0.5.23",
    ),
    Fingerprint(
        "wrong-answer",
        _SERVER,
        seen=(
            "not ready: sampled answer: asked 'What is 17 times 23?', found the answer 'foss foss foss' (ended by "
            "length), wanted '391' in it. Fix: x",
        ),
        patterns=(r"not ready: [^:]+: asked .+, found the answer .+, wanted .+ in it\. Fix: ",),
        cause="a healthy server answers nonsense: wrong weights, or kernels that compute wrongly on this GPU",
        fix=f"{_VERIFY} on HOST; then pytest tests/host --inventory INVENTORY proves release, patches and toolkit",
        source="sglang issue 23264, vllm issue 42426",
    ),
    Fingerprint(
        "cached-prefix-wrong",
        _SERVER,
        seen=(
            "not ready: long prefix, again: the same text was answered right the first time; now, with 16960 of its "
            "17031 tokens from the prefix cache, asked 'Two drawers hold a word. Which words?', found the answer "
            "'!!!!!!' (ended by length), wanted 'heron' and 'maple' in it. Fix: x",
        ),
        patterns=(r"not ready: [^:]+: the same text was answered right the first time; now, ",),
        cause="what the server computes is right and what it reads back from its prefix cache is not: the attention "
        "kernels of this profile and release are wrong for cached prefixes on this GPU",
        fix=f"{_DEPLOY} --data profile=ANOTHER, or --data release=ANOTHER: every later message of a chat would be "
        "answered wrong",
        source="vllm-ascend issue 5269; MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark issue 36",
    ),
    Fingerprint(
        "cached-prefix-wrong-once",
        _SERVER,
        seen=(
            "attempt 1 of 3: long prefix, again: the same text was answered right the first time; now, with 16960 of "
            "its 17031 tokens from the prefix cache, asked 'Two drawers hold a word. Which words?', found the answer "
            "'heron' (ended by stop), wanted 'heron' and 'maple' in it. Fix: x (84 s after the start)",
        ),
        patterns=(r"attempt \d of \d: [^:]+: the same text was answered right the first time; now, ",),
        cause="a text was answered wrong when it came from the prefix cache, and right at a later attempt: an unlucky "
        "sample, or kernels that are wrong now and then",
        fix=f"python3 {TOOLS}/ready_probe.py {CONFIGURATION}/sglang-PROFILE.readiness.json --now, some times, on HOST "
        "as root: where it is wrong again, another profile or release is to serve",
        source="files/tools/ready_probe.py",
        severity="warning",
        explained_by=("cached-prefix-wrong",),
    ),
    Fingerprint(
        "tool-call-unparsed",
        _SERVER,
        seen=(
            "not ready: tool call: asked 'Call multiply with a = 17', found a call left unparsed, "
            "'<|tool_calls_section_begin|>' (ended by stop), wanted multiply with {} in tool_calls. Fix: x",
        ),
        patterns=(r"not ready: [^:]+: asked .+, found a call (?:left unparsed|of \S+ with .+, which is no JSON), ",),
        cause="the model calls functions in another form than the server's parser reads: --tool-call-parser is not "
        "the model's, or the answer's tokens ended within the call",
        fix=f"{_DEPLOY} gives the server the parser that node/models.py names for the model",
        source="files/tools/ready_probe.py",
    ),
    Fingerprint(
        "key-refused",
        _SERVER,
        seen=(
            "not ready: sampled answer: the server refused the question: 401 "
            '\'{"error":"Unauthorized"}\'. Fix: see the server\'s log',
        ),
        patterns=(r"the server refused the question: 40[13]",),
        cause="the server runs with another API key than the one laid down now",
        fix=f"systemctl restart UNIT, which reads the key anew; {_DEPLOY} does it when the key changes",
        source="files/tools/ready_probe.py",
    ),
    Fingerprint(
        "memory-execution-denied",
        _SERVER,
        seen=("PermissionError: cannot allocate executable memory", "RuntimeError: could not create a primitive"),
        patterns=(r"cannot allocate executable memory", r"could not create a primitive\b"),
        cause="MemoryDenyWriteExecute= was set on the unit: numba, oneDNN and the CUTLASS compiler make code while "
        "they run",
        fix=f"systemctl cat UNIT: remove the drop-in that sets it; {_DEPLOY} writes the unit without",
        source="run under systemd's filter and under prctl(PR_SET_MDWE)",
    ),
    Fingerprint(
        "no-answer",
        _SERVER,
        seen=("the unit is active and /health does not answer",),
        patterns=(),
        cause="the server's processes live and do not serve: a hang, or a very long prefill",
        fix=f"python3 {TOOLS}/ready_probe.py {CONFIGURATION}/sglang-PROFILE.readiness.json --now asks what "
        "readiness asks, on HOST as root; without an answer: journalctl -u UNIT -n 200, then systemctl restart UNIT",
        source="sglang issues 6624, 22511, 35884",
        severity="warning",
        explained_by=("collective-hangs", "gpu-fell-off", "nvidia-smi-hangs", "gpu-firmware-silent", "nvlink-errors"),
    ),
    # --- weights, memory and disks -----------------------------------------------------------------------------------
    Fingerprint(
        "host-out-of-memory",
        _DISK,
        seen=(
            "Out of memory: Killed process 4711 (sglang::schedul) total-vm:94371840kB",
            "sglang-tp8.service: A process of this unit has been killed by the OOM killer.",
        ),
        patterns=(
            r"[Oo]ut of memory: Killed process \d+",
            r"has been killed by the OOM killer",
            r"Failed with result 'oom-kill'",
        ),
        cause="the machine's own memory ran out, and the kernel killed the largest process",
        fix="free -h; journalctl -k -g 'Out of memory' names who was killed; stop what else runs here, or add memory",
        source="sglang pull requests 21898, 38567",
        explained_by=("compiler-out-of-memory",),
    ),
    Fingerprint(
        "memory-low",
        _DISK,
        seen=("less than 2 GiB of memory are available",),
        patterns=(),
        cause="something takes the machine's memory; one compiler job of the warm-up alone takes about 2 GiB",
        fix="ps --sort -rss -eo rss,pid,comm | head shows who",
        source="measured: nvcc 13.0 takes 1.0 GiB for the sampling module's largest file",
        severity="warning",
    ),
    Fingerprint(
        "disk-full",
        _DISK,
        seen=(
            "OSError: [Errno 28] No space left on device",
            "less than 1 GB is free on a file system that the node writes to",
        ),
        patterns=(r"No space left on device", r"\bENOSPC\b", r"Disk quota exceeded"),
        cause="a file system is full",
        fix=f"df -h; df -i; old releases and caches may go: see {CURRENT}, then remove other folders beside its "
        f"target and in {CACHE}",
        source="errno 28",
    ),
    Fingerprint(
        "disk-fails",
        _DISK,
        seen=("I/O error, dev nvme1n1, sector 12345678 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2",),
        patterns=(
            r"\bI/O error, dev (?!fd|sr|loop)\w+",
            r"critical medium error",
            r"EXT4-fs error",
            r"XFS \(\S+\): (?:Corruption|Metadata corruption|Metadata I/O [Ee]rror)",
        ),
        cause="a disk or its file system returns errors",
        fix="smartctl -a or nvme smart-log of that disk; mend or replace it; then " + _VERIFY,
        source="the kernel's own texts",
    ),
    Fingerprint(
        "hub-refuses",
        _DISK,
        seen=(
            "https://huggingface.co: answers 401 (GatedRepo) for z-lab/Kimi-K2.6-DFlash with no token, wanted to be "
            "let in. Fix: x",
        ),
        patterns=(
            r"answers 40[13] \(\w+.*\) for \S+ with (?:its|no) token",
            r"\bGatedRepoError\b",
            r"401 Client Error",
        ),
        cause="the repository is gated and its owners have not let this token in, or no token was given",
        fix="ask for access on the repository's page on the hub, then set hub_token_file in the inventory",
        source="z-lab/Kimi-K2.6-DFlash answers 401 without a token",
    ),
    # --- units and releases ------------------------------------------------------------------------------------------
    Fingerprint(
        "credentials-missing",
        _UNIT,
        seen=("sglang-tp8.service: Failed to set up credentials: No such file or directory",),
        patterns=(r"Failed to set up credentials", r"status=243/CREDENTIALS"),
        cause="the API key's file that the unit hands to the server is not there",
        fix=f"{_DEPLOY} lays the key down again",
        source="systemd.exec(5), exit status 243",
    ),
    Fingerprint(
        "mount-missing",
        _UNIT,
        seen=(
            "sglang-tp8.service: Failed to set up mount namespacing: /srv/weights/moonshotai/Kimi-K2.6: No such file "
            "or directory",
        ),
        patterns=(r"Failed to set up mount namespacing", r"status=226/NAMESPACE"),
        cause="a folder that the unit is to see is not there: mostly the weights' disk is not mounted",
        fix=f"systemctl cat UNIT | grep Paths; findmnt; mount the disk (and put it into /etc/fstab), then {_DEPLOY}",
        source="systemd.exec(5), exit status 226",
    ),
    Fingerprint(
        "program-missing",
        _UNIT,
        seen=(
            "sglang-tp8.service: Failed at step EXEC spawning /opt/kimi-nodes/releases/0/bin/python: No such file or "
            "directory",
        ),
        patterns=(r"Failed at step EXEC spawning", r"Failed to locate executable", r"status=203/EXEC"),
        cause="the release or a program that the unit starts was removed",
        fix=f"ls {CURRENT}/bin/python {TOOLS}; {_DEPLOY} builds again what is missing",
        source="systemd.exec(5), exit status 203",
    ),
    Fingerprint(
        "unit-edited",
        _UNIT,
        seen=("a unit's file was changed after systemd read it",),
        patterns=(),
        cause="somebody edited the unit; what runs is not what lies on the disk",
        fix=f"{_DEPLOY} writes the unit as planned and loads it",
        source="systemctl show -p NeedDaemonReload",
        severity="warning",
    ),
    Fingerprint(
        "no-plan",
        _UNIT,
        seen=("the inventory's values, or a lock or manifest of this checkout, give no plan for the host",),
        patterns=(),
        cause="what was found and what is wanted, for each value",
        fix="python -m node.render INVENTORY says the same, with each value's own fix",
        source="node/plan.py",
    ),
    Fingerprint(
        "not-deployed",
        _UNIT,
        seen=("no unit of kimi-nodes and no current release on the host",),
        patterns=(),
        cause="this host was never deployed to, or was reinstalled since, or no deploy has come that far",
        fix=_DEPLOY,
        source="the host's own state",
    ),
    Fingerprint(
        "service-stopped",
        _UNIT,
        seen=("the profile's unit is there and does not run, nor has it failed",),
        patterns=(),
        cause="somebody stopped it, or the last deploy ended before it was started",
        fix="systemctl start UNIT, or " + _DEPLOY,
        source="the host's own state",
    ),
    Fingerprint(
        "other-profile",
        _UNIT,
        seen=("another profile's unit runs than the inventory asks for",),
        patterns=(),
        cause="the inventory was changed without a deploy, or somebody started another profile by hand",
        fix=_DEPLOY + " switches to the inventory's profile",
        source="the host's own state",
        severity="warning",
    ),
    Fingerprint(
        "other-release",
        _UNIT,
        seen=("the current release is not the one that the inventory and this checkout ask for",),
        patterns=(),
        cause="the inventory or the checkout was changed without a deploy, or a deploy ended early",
        fix=_DEPLOY,
        source="the link to the current release, compared with the plan's digest",
        severity="warning",
    ),
    Fingerprint(
        "receipt-missing",
        _UNIT,
        seen=("the current release has no receipt that it was built, or patched",),
        patterns=(),
        cause=f"{RECEIPTS} was emptied, or the release became current by hand",
        fix=f"{_DEPLOY} looks at the release again and writes what it finds",
        source="the host's own state",
        severity="warning",
    ),
    # --- reaching the host -------------------------------------------------------------------------------------------
    Fingerprint(
        "host-key",
        _REACH,
        seen=("Host key verification failed.", "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!"),
        patterns=(r"REMOTE HOST IDENTIFICATION HAS CHANGED", r"Host key verification failed"),
        cause="the machine's host key is unknown or another one: it was reinstalled, or it is not that machine",
        fix="compare the key with the machine's own (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub there); then "
        "ssh-keygen -R HOST and accept the new one",
        source="ssh's own text",
    ),
    Fingerprint(
        "ssh-refuses",
        _REACH,
        seen=("root@10.0.0.1: Permission denied (publickey).",),
        patterns=(
            r"Permission denied \((?:publickey|password|keyboard-interactive|gssapi)[^)]*\)",
            r"Too many authentication failures",
        ),
        cause="the host does not know the key of ssh_user",
        fix="set ssh_user and ssh_key in the inventory, or ssh-copy-id to HOST",
        source="ssh's own text",
    ),
    Fingerprint(
        "host-unreachable",
        _REACH,
        seen=("ssh: connect to host 10.0.0.1 port 22: Connection timed out",),
        patterns=(
            r"connect to host \S+ port \d+: (?:Connection (?:timed out|refused)|No route|Network is unreachable)",
            r"Could not resolve hostname",
            r"Connection (?:timed out during banner exchange|closed by \S+ port \d+|reset by \S+ port \d+)",
            r"kex_exchange_identification:",
        ),
        cause="no ssh server answers there: the machine is off or starting, or the address is wrong",
        fix="ssh HOST true; look at the machine's management console; ssh_hostname and ssh_port in the inventory",
        source="ssh's own text",
    ),
    Fingerprint(
        "sudo-asks",
        _REACH,
        seen=("sudo: a password is required",),
        patterns=(
            r"sudo: a (?:password|terminal) is required",
            r"is not in the sudoers file",
            r"is not allowed to (?:run|execute)",
        ),
        cause="ssh_user may not become root without a password",
        fix="a line in /etc/sudoers.d on HOST, 'USER ALL=(ALL) NOPASSWD: ALL', or ssh_user = 'root' in the inventory",
        source="sudo's own text",
    ),
    Fingerprint(
        "no-host-matched",
        _REACH,
        seen=("No host matches found, --limit pattern: pro6000-9",),
        patterns=(r"No host matches found",),
        cause="--limit matches no host; pyinfra only warns, does nothing and exits 0",
        fix="pyinfra INVENTORY debug-inventory lists the names",
        source="pyinfra's own text",
    ),
    # --- consequences: told only where no cause was found ------------------------------------------------------------
    Fingerprint(
        "own-words",
        _UNIT,
        seen=(
            "https://huggingface.co: no answer (timed out), wanted moonshotai/Kimi-K2.6. Fix: see whether this node "
            "reaches it",
        ),
        patterns=(r"^(?P<cause>.{8,}?)[.,;:]? Fix: (?!none here)(?P<fix>\S.*)",),
        cause="a program of kimi-nodes says itself what it found, what it wanted and how to mend it",
        fix="what stands after 'Fix:'",
        source="every program of kimi-nodes ends its errors so",
        explained_by=ANYTHING,
    ),
    Fingerprint(
        "illegal-access",
        _SERVER,
        seen=("RuntimeError: CUDA error: an illegal memory access was encountered",),
        patterns=(
            r"CUDA error: (?:an illegal memory access was encountered|misaligned address|unspecified launch failure)",
            r"CUDA error: device-side assert triggered",
        ),
        cause="a kernel touched memory that it does not own; the traceback shows where that was noticed, not where it "
        "happened",
        fix="the same profile without CUDA graphs (profile NAME-eager) tells more; report it with the release and the "
        "request",
        source="NVIDIA/nccl issue 2418 is one case of it",
        explained_by=(
            "kernel-on-gpu-failed",
            "gpu-memory-errors",
            "gpu-fell-off",
            "nvlink-errors",
            "gpu-firmware-silent",
        ),
    ),
    Fingerprint(
        "graph-capture-failed",
        _SERVER,
        seen=("Exception: Capture cuda graph failed: CUDA error: operation not permitted when stream is capturing",),
        patterns=(r"Capture cuda graph failed:",),
        cause="an operation failed while CUDA graphs were captured; the text after the colon is the operation's own "
        "error",
        fix="deploy the same profile without CUDA graphs (profile NAME-eager): if that serves, report the operation",
        source="sglang/srt/model_executor/runner/decode_cuda_graph_runner.py",
        explained_by=ANYTHING,
    ),
    Fingerprint(
        "collective-failed",
        _NCCL,
        seen=("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error",),
        patterns=(r"DistBackendError: NCCL error", r"ncclUnhandledCudaError|ncclSystemError|ncclRemoteError"),
        cause="NCCL could not work between the GPUs; mostly one of its processes had died before",
        fix="journalctl -u UNIT -g 'NCCL WARN' has NCCL's own reason; if there is none, the process that died first "
        "says it",
        source="NCCL's troubleshooting guide",
        explained_by=ANYTHING,
    ),
    Fingerprint(
        "compile-failed",
        _JIT,
        seen=("RuntimeError: Ninja build failed. Ninja output:",),
        patterns=(r"Ninja build failed", r"ninja: build stopped: subcommand failed"),
        cause="a compilation failed for a reason that is not in this table",
        fix="the first line with 'error' after 'FAILED:' in journalctl -u UNIT says which",
        source="flashinfer/jit/cpp_ext.py",
        explained_by=ANYTHING,
    ),
    Fingerprint(
        "start-timed-out",
        _SERVER,
        seen=("sglang-tp8.service: start-post operation timed out. Terminating.",),
        patterns=(r"start(?:-pre|-post)? operation timed out", r"Failed with result 'timeout'"),
        cause="the server was not ready within start_timeout: weights load slowly, or it waits for something",
        fix="journalctl -u UNIT says how far it came; a slow disk wants a larger start_timeout in the inventory",
        source="systemd.service(5), TimeoutStartSec=",
        explained_by=ANYTHING,
    ),
    Fingerprint(
        "scheduler-died",
        _SERVER,
        seen=(
            "Received sigquit from a child process. It usually means the child failed.",
            "Scheduler hit an exception: Traceback",
        ),
        patterns=(
            r"Received sigquit from a child process",
            r"SIGQUIT received\..*It usually means one child failed",
            r"\b(?:Scheduler|DetokenizerManager|TokenizerManager|DataParallelController) hit an exception",
        ),
        cause="a process of the engine ended by an error that is not in this table",
        fix="journalctl -u UNIT: the last line of the first traceback is the error",
        source="sglang/srt/entrypoints/engine.py",
        explained_by=ANYTHING,
    ),
    Fingerprint(
        "start-limit",
        _UNIT,
        seen=("sglang-tp8.service: Start request repeated too quickly.",),
        patterns=(r"Start request repeated too quickly", r"start-limit-hit"),
        cause="three starts failed and systemd gave up, which keeps a crash loop from leaking GPU memory",
        fix="journalctl -u UNIT has the first failure; mend it, then " + _DEPLOY,
        source="systemd.unit(5), StartLimitBurst=",
        explained_by=ANYTHING,
    ),
    Fingerprint(
        "unit-failed",
        _UNIT,
        seen=("a unit of kimi-nodes has failed or is being restarted again and again",),
        patterns=(),
        cause="it ended by an error that is not in this table",
        fix="systemctl status UNIT; journalctl -u UNIT -n 100",
        source="the host's own state",
        explained_by=ANYTHING,
    ),
)

BY_ID: Mapping[str, Fingerprint] = {fingerprint.id: fingerprint for fingerprint in FINGERPRINTS}

# Said by healthy servers: optional models and parsers that cannot be imported are skipped, whatever the reason is.
_HARMLESS = re.compile(r"Ignore import error when loading|server_args=ServerArgs\(")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SYSLOG = re.compile(
    r"^(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+|\d+\.\d+) \S+ [^\s:]+(?:\[\d+\])?: "
)
_COMPILED = tuple(
    (fingerprint, tuple(re.compile(pattern) for pattern in fingerprint.patterns))
    for fingerprint in FINGERPRINTS
    if fingerprint.patterns
)
_AFTER = {fingerprint.id: re.compile(fingerprint.after) for fingerprint in FINGERPRINTS if fingerprint.after}


def match(lines: Iterable[Line]) -> list[Match]:
    """What one log shows, each fingerprint once, without those that another one found here explains; in table order.

    One log is one run of one program; `causes` tells what other logs of the host explain.
    """
    found: dict[str, Match] = {}
    before: deque[str] = deque(maxlen=WINDOW)
    for line in lines:
        text = _SYSLOG.sub("", _COLOURS.sub("", line.text[:LONGEST_LINE])).rstrip()
        hit = None if _HARMLESS.search(text) else _first(text, before)
        before.append(text)
        if hit is None:
            continue
        fingerprint, where = hit
        groups = where.groupdict()
        earlier = found.get(fingerprint.id)
        found[fingerprint.id] = Match(
            fingerprint,
            excerpt(groups["cause"], 80) if groups.get("cause") else _around(text, where),
            times=earlier.times + 1 if earlier else 1,
            last=line.time if line.time is not None or earlier is None else earlier.last,
            cause=groups.get("cause") or fingerprint.cause,
            fix=groups.get("fix") or fingerprint.fix,
        )
    return [found[fingerprint.id] for fingerprint in causes(one.fingerprint for one in found.values())]


def _first(text: str, before: deque[str]) -> tuple[Fingerprint, re.Match[str]] | None:
    for fingerprint, patterns in _COMPILED:
        after = _AFTER.get(fingerprint.id)
        for pattern in patterns:
            where = pattern.search(text)
            if where and (after is None or any(after.search(earlier) for earlier in before)):
                return fingerprint, where
    return None


def _around(text: str, where: re.Match[str]) -> str:
    """The line, or its part around what was found where it is long."""
    if len(text) <= SEEN_CHARACTERS:
        return text.strip()
    start = max(0, min(where.start() - SEEN_CHARACTERS // 4, len(text) - SEEN_CHARACTERS))
    return ("..." if start else "") + text[start : start + SEEN_CHARACTERS].strip()


def causes(found: Iterable[Fingerprint], elsewhere: Iterable[str] = ()) -> list[Fingerprint]:
    """Those of one log's that nothing explains, in table order.

    elsewhere: ids found elsewhere on the host. They explain what names them; a consequence they explain where they
    concern the whole host.
    """
    here = list(found)
    beside = [BY_ID[one] for one in elsewhere]
    ids = {one.id for one in (*here, *beside)}
    host_wide = [one for one in beside if one.section in HOST_WIDE and one.severity == "error"]
    explained = any(one.explained_by != ANYTHING for one in (*here, *host_wide))
    kept = []
    for fingerprint in sorted(here, key=FINGERPRINTS.index):
        if fingerprint.explained_by == ANYTHING:
            if not explained:
                kept.append(fingerprint)
                explained = True  # of several consequences the first in the table says most
        elif not ids & set(fingerprint.explained_by):
            kept.append(fingerprint)
    return kept


# --- secrets ---------------------------------------------------------------------------------------------------------

HIDDEN = "[hidden]"
_NAMES = (
    r"[\w-]*(?:(?:api|admin|access|secret|private|hub|hf|auth)[-_ ]?key"
    r"|token|passw(?:or)?d|secret|signature|credential)"
)
_SECRETS = (
    re.compile(r"\b(?:hf|sk|ghp|gho|glpat|nvapi|xox[abp])[-_][A-Za-z0-9_-]{8,}"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"),
    re.compile(r"(?i)(?P<keep>\bbearer )[^\s'\",;]+"),
    re.compile(r"(?i)(?P<keep>\bbasic )[A-Za-z0-9+/=]{8,}"),
    re.compile(r"(?P<keep>://)[^/\s:@]*:[^/\s@]+(?=@)"),
    re.compile(rf"(?i)(?P<keep>--{_NAMES}\s+[\"']?)[^\s\"']+"),
    # A bare number is a count ("token: 128"), None is no secret, and what is in brackets has been hidden already.
    re.compile(
        rf"(?i)(?P<keep>\b{_NAMES}[\"']?\s*[=:]\s*[\"']?)"
        rf"(?!\[|(?:None|True|False|null|\d{{1,12}}(?:\.\d+)?)(?:[\s,;)}}\"'\]]|$))[^\s\"',;)&}}\]]{{4,}}"
    ),
)


def redact(text: str) -> str:
    """The text without what looks like an API key, a token or a password."""
    for pattern in _SECRETS:
        text = pattern.sub(_hide, text)
    return text


def _hide(found: re.Match[str]) -> str:
    return (found.groupdict().get("keep") or "") + HIDDEN


# --- the page --------------------------------------------------------------------------------------------------------


def sections() -> dict[str, str]:
    """Heading -> table in Markdown, in the order of docs/troubleshooting.md."""
    tables: dict[str, str] = {}
    for section in (_JIT, _APT, _GPU, _NCCL, _SERVER, _UNIT, _DISK, _REACH):
        rows = ["| what is seen | cause | fix | name, and who found it |", "| --- | --- | --- | --- |"]
        for fingerprint in FINGERPRINTS:
            if fingerprint.section == section:
                rows.append("| " + " | ".join(_row(fingerprint)) + " |")
        tables[section] = "\n".join(rows)
    return tables


def _row(fingerprint: Fingerprint) -> tuple[str, str, str, str]:
    seen = []
    for text in fingerprint.seen:
        flat = excerpt(" ... ".join(part.strip() for part in text.splitlines()))
        logged = any(re.search(pattern, text) for pattern in fingerprint.patterns)
        seen.append(f"`{cell(flat.replace('`', ''))}`" if logged else cell(flat))
    return (
        " or ".join(seen),
        cell(fingerprint.cause),
        cell(fingerprint.fix),
        f"**{fingerprint.id}**: {cell(fingerprint.source)}",
    )


def cell(text: str) -> str:
    """Text as a cell of a table: a bar would end it."""
    return text.replace("|", "\\|")


def page() -> str:
    """All tables with their headings."""
    return "\n\n".join(f"## {heading}\n\n{table}" for heading, table in sections().items())


if __name__ == "__main__":
    print(page())
