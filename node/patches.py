"""Source patches: what each cures, which files it may touch, and how it is known whether a release needs it.

A patch is one exact edit of one file of one distribution. It is applied only to a file whose sha256 is the known
original of a known version, and only where it bears load; a file that is neither the known original nor the known
result stops the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from node.layout import RELEASES

Action = Literal["apply", "already", "not needed", "conflict"]


@dataclass(frozen=True)
class Digests:
    """sha256, 64 hex digits, of a file as its wheel brings it and as the patch leaves it."""

    before: str
    after: str


@dataclass(frozen=True)
class Patch:
    """One edit.

    id: as releases name it. package, file: the distribution, and the path below its site-packages. versions: PEP 440,
    those that have the fault. nvcc_below: the fault shows only with a compiler older than this, or None when it does
    not depend on it. digests: version -> sha256 before and after. upstream: version -> sha256 of the file once the
    project itself has mended it. old, new: the edit; old stands in the file exactly once. retired_by: the upstream
    change that makes it needless. shows: what a user sees without it. source: who found what. loaded_with: words of the
    server's arguments that make each of its schedulers load the file; none where they always do.
    """

    id: str
    title: str
    package: str
    file: str
    versions: str
    nvcc_below: str | None
    digests: Mapping[str, Digests]
    upstream: Mapping[str, str]
    old: str
    new: str
    retired_by: str
    shows: str
    source: str
    loaded_with: tuple[str, ...] = ()

    @property
    def module(self) -> str | None:
        """The file as Python imports it; None for a source of kernels, which a compiler reads."""
        return self.file.removesuffix(".py").replace("/", ".") if self.file.endswith(".py") else None


@dataclass(frozen=True)
class Evidence:
    """What a host shows about a patch's file. version: of the package, None where it is not installed. digest: sha256
    of the file, None where there is none. nvcc: release of the toolkit's compiler, "13.0", None where it does not run.
    """

    version: str | None
    digest: str | None
    nvcc: str | None


@dataclass(frozen=True)
class Decision:
    """What to do with a patch, and why."""

    action: Action
    reason: str


def apply(patch: Patch, source: bytes) -> bytes:
    """The file with the edit. Raises ValueError where the text to replace is not there exactly once."""
    old = patch.old.encode()
    if source.count(old) != 1:
        raise ValueError(f"{patch.file}: found the text of patch {patch.id} {source.count(old)} times, wanted it once")
    return source.replace(old, patch.new.encode())


def bears_load(patch: Patch, version: str, nvcc: str | None) -> tuple[bool, str]:
    """Whether the fault is there, by version and compiler, and the reason.

    nvcc: release of the compiler that CUDA_HOME names, "13.0". Without one (None) a fault that depends on it is taken
    to be there; `decide` does not act on that.
    """
    if not SpecifierSet(patch.versions).contains(Version(version), prereleases=True):
        return False, f"{patch.package} {version} is not {patch.versions}: {patch.retired_by}"
    if patch.nvcc_below is None:
        return True, f"{patch.package} {version} is {patch.versions}"
    if nvcc is not None and Version(nvcc) >= Version(patch.nvcc_below):
        return False, f"nvcc {nvcc} is not older than {patch.nvcc_below}, so the fault cannot show"
    return True, f"nvcc {nvcc or 'unknown'} is older than {patch.nvcc_below}"


def decide(patch: Patch, evidence: Evidence) -> Decision:
    """What the host's evidence asks for.

    apply: the file is the known original and the fault is there. already: the file is the known result. not needed:
    the fault is not there, and the file is as its wheel brought it. conflict: anything else; the reason names what was
    found and wanted and ends with a fix, and nothing may be changed.
    """
    version = evidence.version
    if version is None:
        return Decision(
            "conflict",
            f"{patch.package}: found none installed, wanted one. Fix: run deploy.py, which installs the release",
        )
    needed, reason = bears_load(patch, version, evidence.nvcc)
    if needed and patch.nvcc_below is not None and evidence.nvcc is None:
        return Decision(
            "conflict",
            f"patch {patch.id}: found no compiler that runs at CUDA_HOME, wanted one to tell whether it is older than "
            f"{patch.nvcc_below}. Fix: run deploy.py, which installs the toolkit before it patches",
        )
    known = _known(patch, version)
    if known is None:
        if not needed:
            return Decision("not needed", reason)
        return Decision(
            "conflict",
            f"{patch.file}: found {patch.package} {version}, whose digests are not known, wanted a known one, since it "
            f"needs patch {patch.id}: {reason}. Fix: add its digests to node/patches.py, as docs/patches.md tells",
        )
    if evidence.digest == known.before:
        return Decision("apply", reason) if needed else Decision("not needed", reason)
    if evidence.digest == known.after:
        return Decision("already", reason if needed else f"{reason}; the patch is in all the same")
    wanted = f"the original {known.before}"
    if known.after != known.before:
        wanted += f" or the patched {known.after}"
    return Decision(
        "conflict",
        f"{patch.file}: found sha256 {evidence.digest or 'of no file'}, wanted {wanted} of "
        f"{patch.package} {version}. Fix: remove the edited release's directory below {RELEASES} and run deploy.py",
    )


def _known(patch: Patch, version: str) -> Digests | None:
    """The digests of the patch's file in this version; before and after are one where the project has mended it."""
    if version in patch.upstream:
        return Digests(patch.upstream[version], patch.upstream[version])
    return patch.digests.get(version)


def wanted_digest(patch: Patch, version: str, nvcc: str | None) -> str | None:
    """sha256 that the patch's file should have in the end; None where nothing is known of this version."""
    known = _known(patch, version)
    if known is None:
        return None
    return known.after if bears_load(patch, version, nvcc)[0] else known.before


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


PATCHES = {
    patch.id: patch
    for patch in (
        Patch(
            id="sglang-pipeline-first-layer",
            title="a pipeline stage asks for its own first layer, not for layer 0",
            package="sglang",
            file="sglang/srt/layers/attention/triton_backend.py",
            versions=">=0.5.10.post1,<0.5.18",
            nvcc_below=None,
            digests={
                "0.5.12.post1": Digests(
                    before="7ad7257d34d406c0bc396050aac81d2777c5c324779b159100e6d286becaa060",
                    after="ef13953c075d8d7913a2a223cd52e5dddcb5061d0adf4958327297a71e61482c",
                ),
                "0.5.17": Digests(
                    before="5b60f958359d03d742776c29bbb3cf412661a6b6cf0feec6da4886d922092fbe",
                    after="71dff641472a27884473d59f76ab81a7d025b0097aa18de84d95442198031a00",
                ),
            },
            upstream={"0.5.23": "2e095cfafcd30ad0e720fd1ecd70c92f1a83f47a86a28da0ab739ab5717100aa"},
            old=(
                "            self.v_head_dim = model_runner.token_to_kv_pool.get_value_buffer(0).shape[\n"
                "                -1\n"
                "            ]\n"
            ),
            new=(
                "            self.v_head_dim = model_runner.token_to_kv_pool.get_value_buffer(\n"
                "                model_runner.token_to_kv_pool.start_layer\n"
                "            ).shape[-1]\n"
            ),
            retired_by="sglang 0.5.18 (sgl-project/sglang pull request 30340)",
            shows="pp8 dies after a minute: IndexError: list index out of range, triton_backend.py, stages 2 to 7",
            source="sglang/srt/mem_cache/memory_pool.py: get_value_buffer indexes by layer_id - start_layer",
            loaded_with=("--attention-backend", "triton"),
        ),
        Patch(
            id="flashinfer-empty-architectures",
            title="the architecture check looks again when the first look found no GPU it could name",
            package="flashinfer-python",
            file="flashinfer/jit/core.py",
            versions=">=0.6.7,<0.7.1",
            nvcc_below="12.9",
            digests={
                "0.6.11.post1": Digests(
                    before="9879a6f02b6be03654a8f2107ae28d64418658619a31f10cad6960596a1b9596",
                    after="b620f1af73af7f62524295f2dbdb85f9046db9d3ce185edb5d0942f62f1d12c8",
                ),
                "0.6.15.post1": Digests(
                    before="836f04a87bca0a36e86c04219aac2aabbe28d87c91a577584e81f8c59e4c7a7c",
                    after="85582c79f4fcb036b5bc838bc66ba11bf80a8b2013f665e97c42b63c632fb721",
                ),
            },
            upstream={"0.7.2": "f56ff6bf9561834362303d4c5b7a80018466babbfdf2f8f73775b1af0746b687"},
            old="    for major, minor in current_compilation_context.TARGET_CUDA_ARCHS:\n        if major >= 8:\n",
            new=(
                "    for major, minor in (\n"
                "        current_compilation_context.TARGET_CUDA_ARCHS\n"
                "        or CompilationContext().TARGET_CUDA_ARCHS\n"
                "    ):\n"
                "        if major >= 8:\n"
            ),
            retired_by="flashinfer 0.7.1, which takes nvcc 12.8 for sm_120 and looks again",
            shows="RuntimeError: FlashInfer requires GPUs with sm75 or higher, on a Blackwell GPU",
            source=(
                "flashinfer/compilation_context.py: SM 12.x requires CUDA >= 12.9, swallowed into an empty set; "
                "flashinfer-ai/flashinfer issues 3674 and 3675"
            ),
        ),
        Patch(
            id="sglang-activation-return-type",
            title="a function of the activation kernel's launcher says its type in words that g++ 12 understands",
            package="sglang",
            file="sglang/jit_kernel/csrc/elementwise/activation.cuh",
            versions="==0.5.12.post1",
            nvcc_below=None,
            digests={
                "0.5.12.post1": Digests(
                    before="57620f7e5421694cafa63cc3c828573efd2364b2bce4693e118b5fd54412c0d1",
                    after="bd4e0404e57d5bf2edd3d3defc9257d120d91cc8eed243f45a50f805a995a405",
                ),
            },
            upstream={},
            old="      -> decltype(activation_kernel<ActivationKind::kSiLU, kFilterExpert>) {\n",
            new=("      -> decltype(&act_and_mul_kernel<T, ActivationKind::kSiLU, kUsePDL, kFilterExpert>) {\n"),
            retired_by="a later release: sglang 0.5.17 names the type in that file",
            shows="activation.cuh: no matching function for call to select_kernel<true>, on Debian 12",
            source="nvcc 13.0 with g++ 12.2 refuses the file, with g++ 11 takes it; the edited one both take (run)",
        ),
    )
}
