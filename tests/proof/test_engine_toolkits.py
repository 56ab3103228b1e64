"""FlashInfer's just-in-time compiler before right, old, broken and mixed toolkits: what it says, and what we say of it.

Needs a deployed lab machine. FlashInfer, its environment and CUDA 13.0 are the real ones; 12.8's compiler is the lab's
stand-in, which tells its version, refuses what 12.8 refuses, and compiles nothing. Toolkits are broken in mount
namespaces of the cases' own: no package is touched.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from node.patches import PATCHES
from node.releases import RELEASES
from node.toolkits import TOOLKITS
from tests.proof.conftest import PROJECT
from tests.proof.engine import Engine

NEW, OLD = TOOLKITS["13.0"].prefix, TOOLKITS["12.8"].prefix
HEADERS = "targets/x86_64-linux/include"
PATCH = PATCHES["flashinfer-empty-architectures"]
REFUSAL = "FlashInfer requires GPUs with sm75 or higher"
TOO_OLD = "SM 12.x requires CUDA >= 12.9"

# What the process sees of GPUs: torch reports eight of this capability; none is named in the environment, as on a host
# that is set up by hand.
SEES_120: dict[str, str | None] = {"FLASHINFER_CUDA_ARCH_LIST": None, "SEEN_GPUS": "12.0"}
# What SGLang does when it loads a model on sm_120 (utils/common.py, set_cuda_arch), after FlashInfer was imported.
ENGINE_NAMES_120A: dict[str, str | None] = {"ENGINE_ARCHITECTURES": "12.0a"}


@dataclass(frozen=True)
class Case:
    """One situation. do: "kernel" compiles one, "module" lays out the sampling module. changes: shell, see
    engine_on_node.py. said: texts of its output. named: what diagnose.py makes of the output, None where it works."""

    name: str
    do: str
    said: tuple[str, ...]
    named: str | None
    toolkit: str | None = NEW
    environment: dict[str, str | None] = field(default_factory=dict)
    changes: str = ""
    patched: bool = False
    release: str = "sglang-0.5.17"


CASES = (
    Case("the release's toolkit", "kernel", ("built",), None),
    Case(
        "the release's toolkit, architecture found by FlashInfer itself",
        "module",
        ("laid out", "compute_120f"),
        None,
        environment=SEES_120,
    ),
    Case("12.8, architecture found by FlashInfer itself", "kernel", (TOO_OLD, REFUSAL), "nvcc-too-old", OLD, SEES_120),
    Case(
        "12.8 and the FlashInfer of 0.5.12.post1",
        "kernel",
        (TOO_OLD, REFUSAL),
        "nvcc-too-old",
        OLD,
        SEES_120,
        release="sglang-0.5.12.post1",
    ),
    Case(
        "12.8, architecture named without its letter",
        "kernel",
        (TOO_OLD,),
        "nvcc-too-old",
        OLD,
        {"FLASHINFER_CUDA_ARCH_LIST": "12.0"},
    ),
    Case("12.8, architecture named as by the unit", "kernel", ("compute_120f'",), "nvcc-too-old", OLD),
    Case(
        "12.8 for B300",
        "kernel",
        ("nvcc fatal   : Unsupported gpu architecture 'compute_103a'",),
        "nvcc-too-old",
        OLD,
        {"FLASHINFER_CUDA_ARCH_LIST": "10.3a"},
    ),
    Case(
        "12.8 and the patch, before the engine names the architecture",
        "module",
        (TOO_OLD, REFUSAL),
        "nvcc-too-old",
        OLD,
        SEES_120,
        patched=True,
    ),
    Case(
        "12.8 and the patch, once the engine has named it",
        "module",
        ("laid out", "compute_120a"),
        None,
        OLD,
        {**SEES_120, **ENGINE_NAMES_120A},
        patched=True,
    ),
    Case(
        "no GPU, and none named",
        "module",
        (REFUSAL,),
        "no-gpu-to-compile-for",
        environment={"FLASHINFER_CUDA_ARCH_LIST": None},
    ),
    Case("no compiler", "kernel", (f"{NEW}.gone/bin/nvcc: not found",), "nvcc-missing", toolkit=f"{NEW}.gone"),
    Case(
        "a header missing",
        "kernel",
        ("fatal error: curand.h: No such file or directory",),
        "toolkit-header-missing",
        changes=f"overlay {NEW}/{HEADERS}\nrm {NEW}/{HEADERS}/curand.h",
    ),
    Case(
        "headers of another toolkit",
        "kernel",
        ("CUDA compiler and CUDA toolkit headers are incompatible",),
        "toolkit-mixed",
        changes=f"mount --bind {OLD}/{HEADERS} {NEW}/{HEADERS}",
    ),
    Case(
        "the toolkit that the packages bring",
        "kernel",
        ("cannot find -lcudart",),
        "toolkit-not-linkable",
        toolkit=None,
    ),
)


def patched(engine: Engine) -> str:
    """Shell that applies the patch of the check, for the case alone."""
    file = f"{engine.plan.site_packages}/{PATCH.file}"
    digest = PATCH.digests[engine.plan.release.flashinfer].after
    program = (
        "import hashlib\n"
        f"source = open({file!r}).read().replace({PATCH.old!r}, {PATCH.new!r})\n"
        f"assert hashlib.sha256(source.encode()).hexdigest() == {digest!r}\n"
        f"open({file!r}, 'w').write(source)\n"
    )
    return f"overlay {file.rpartition('/')[0]}\npython3 - <<'END'\n{program}END\n"


@pytest.fixture(scope="module")
def seen(engine: Engine) -> dict[str, dict[str, Any]]:
    """Case -> how it went. Two at a time."""
    gpus = {"FLASHINFER_CUDA_ARCH_LIST": "12.0f", "SGLANG_USE_CPU_ENGINE": None, "MAX_JOBS": "2"}
    prepared = []
    for case in CASES:
        toolkit = case.toolkit or f"{engine.plan.site_packages}/nvidia/cu13"
        variables = {**gpus, "FLASHINFER_WORKSPACE_BASE": "$WORK/home", "CUDA_HOME": toolkit, **case.environment}
        prepared.append(
            {
                "name": case.name,
                "argument": case.do,
                "environment": engine.environment(engine.plan, RELEASES[case.release], **variables),
                "changes": (patched(engine) if case.patched else "") + case.changes,
            }
        )
    found = engine.run("flashinfer_on_node.py", prepared)
    for name, result in found.items():
        print(f"{name}: {result['seconds']} s")
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_flashinfer_says_what_is_known_of_it(seen: dict[str, dict[str, Any]], case: Case) -> None:
    result = seen[case.name]
    assert (result["code"] == 0) == (case.named is None), result["output"][-3000:]
    for text in case.said:
        assert text in result["output"], result["output"][-3000:]


@pytest.mark.parametrize("case", [case for case in CASES if case.named], ids=lambda case: case.name.replace(" ", "-"))
def test_diagnose_names_the_true_cause(seen: dict[str, dict[str, Any]], case: Case) -> None:
    """And no other: FlashInfer's own last line is about a GPU that is too old, where it is the compiler that is."""
    command = [sys.executable, "diagnose.py", "--log", "-", "--json"]
    done = subprocess.run(
        command, cwd=PROJECT, input=seen[case.name]["output"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert {finding["id"] for finding in findings} == {case.named}, done.stdout
    assert all(finding["fix"] for finding in findings)


@pytest.mark.parametrize("patched", [False, True], ids=["as published", "patched"])
def test_the_oldest_release_s_activation_kernel_compiles_with_its_patch_alone(engine: Engine, patched: bool) -> None:
    """By the machine's own g++ 12 behind the release's nvcc, with the lines that SGLang's load_jit adds."""
    patch, release = PATCHES["sglang-activation-return-type"], RELEASES["sglang-0.5.12.post1"]
    site = engine.lay_over(release)
    program = (
        "import pathlib, sys\n"
        f"source = pathlib.Path({site!r}, {patch.file!r}).read_text()\n"
        f"text = source.replace({patch.old!r}, {patch.new!r}) if {patched} else source\n"
        f"assert (text == source) != {patched}\n"
        "exports = [f'TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, (ActivationKernel<bf16_t, true>::{name}));'\n"
        "           for name in ('run_activation', 'run_activation_filtered')]\n"
        "pathlib.Path('kernel.cu').write_text('\\n'.join([text, '#include <tvm/ffi/function.h>', *exports, '']))\n"
    )
    include = f"-I{site}/sglang/jit_kernel/include -I{site}/tvm_ffi/include -I{site}/tvm_ffi/3rdparty/dlpack/include"
    done = engine.node.ssh(
        f"set -e; cd $(mktemp -d); trap 'rm -rf $PWD' EXIT; python3 - <<'END'\n{program}END\n"
        f"{NEW}/bin/nvcc -std=c++20 -O1 --expt-relaxed-constexpr -DSGL_CUDA_ARCH=1200 -arch=compute_120a {include} "
        "-c kernel.cu -o kernel.o 2>&1 && echo compiled",
        check=False,
    )
    if patched:
        assert done.splitlines()[-1] == "compiled", done
    else:
        assert "no matching function for call to" in done and "compiled" not in done, done
