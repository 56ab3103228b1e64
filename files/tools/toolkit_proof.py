#!/usr/bin/env python3
"""Prove a CUDA toolkit where it lies: compile a program with its compiler and headers, link it with its libraries, run
it.

    toolkit_proof.py '{"version": "13.0", "prefix": "/usr/local/cuda-13.0", "includes": ["cuda_runtime.h"],
                       "architecture": "12.0f", "needs_nvcc": true, "scratch": "/var/cache/kimi-nodes"}'

architecture: FlashInfer's name of a GPU's, or null for nvcc's own default. needs_nvcc: false lets the host's g++ stand
in where the toolkit has no device compiler (nvvm/bin/cicc) at all: then its headers and libraries are proved, and the
answer says so. scratch: a folder for the program that is built, on the file system where compiled kernels will lie.

Prints one JSON object and exits 0 when proved, 1 when not, 2 when the argument means nothing:
{"proved": true, "version": "13.0", "nvcc": "13.0.88", "compiled_by": "/usr/local/cuda-13.0/bin/nvcc",
 "architecture": "12.0f", "runtime": 13000, "headers": 13000}
or {"proved": false, "version": "13.0", "problem": "found ..., wanted .... Fix: ..."}

No GPU is needed: the program asks the runtime for its version and launches nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

SOURCE = """
#include <cstdio>
%s
#ifdef __CUDACC__
__global__ void twice(int *value) { *value *= 2; }
#endif
int main() {
    int version = 0;
    if (cudaRuntimeGetVersion(&version) != cudaSuccess) return 3;
#ifdef __CUDACC__
    if (version < 0) twice<<<1, 1>>>(nullptr);  // never: the kernel is there to be compiled and linked
#endif
    std::printf("%%d %%d\\n", version, CUDART_VERSION);
    return 0;
}
"""
LIMIT = 240  # seconds for one compilation; it takes 2 to 5
# Only what is here: CPATH, NVCC_APPEND_FLAGS and their like would make a foreign header pass for the toolkit's.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Unproved(Exception):
    """Found, wanted, fix."""


def prove(toolkit: dict[str, Any]) -> dict[str, Any]:
    """The answer as above. Raises Unproved."""
    prefix, version = toolkit["prefix"], toolkit["version"]
    nvcc = f"{prefix}/bin/nvcc"
    exact = nvcc_version(nvcc)
    if not exact.startswith(version + "."):
        raise Unproved(f"{nvcc}: found release {exact}, wanted {version}. Fix: deploy again; it installs its own")
    for header in toolkit["includes"]:
        if not os.access(f"{prefix}/include/{header}", os.R_OK):
            raise Unproved(f"found no {prefix}/include/{header}, wanted it readable. Fix: deploy again; it mends that")
    with tempfile.TemporaryDirectory(prefix="toolkit-proof-", dir=toolkit.get("scratch")) as folder:
        by = compile_and_link(toolkit, folder)
        runtime, headers = run(prefix, f"{folder}/proof")
    major, minor = (int(part) for part in version.split("."))
    wanted = 1000 * major + 10 * minor
    if (runtime, headers) != (wanted, wanted):
        raise Unproved(
            f"{prefix}: a program compiled with it found runtime {runtime} and headers {headers}, wanted {wanted} of "
            f"both. Fix: see which library it takes: ldd, ldconfig -p | grep cudart"
        )
    return {
        "proved": True,
        "version": version,
        "nvcc": exact,
        "compiled_by": by,
        "architecture": toolkit["architecture"] if by == nvcc else None,
        "runtime": runtime,
        "headers": headers,
    }


def nvcc_version(nvcc: str) -> str:
    """13.0.88, as that very nvcc says of itself. Raises Unproved."""
    code, said = call([nvcc, "--version"], "/")
    match = re.search(r"release \d+\.\d+, V(\d+\.\d+\.\d+)", said)
    if code or match is None:
        found = shown(said) or "no answer"
        raise Unproved(f"{nvcc}: found {found}, wanted its version. Fix: deploy again; it installs nvcc")
    return match[1]


def compile_and_link(toolkit: dict[str, Any], folder: str) -> str:
    """Build `proof` in the folder; the compiler that did it. Raises Unproved."""
    prefix = toolkit["prefix"]
    source = f"{folder}/proof.cu"
    with open(source, "w", encoding="ascii") as file:
        file.write(SOURCE % "\n".join(f"#include <{header}>" for header in toolkit["includes"]))
    nvcc = f"{prefix}/bin/nvcc"
    # -lcuda: the stub that every JIT kernel is linked with. --as-needed: the proof runs without a driver.
    linking = [f"-L{prefix}/lib64", f"-L{prefix}/lib64/stubs"]
    if toolkit["needs_nvcc"] or os.path.exists(f"{prefix}/nvvm/bin/cicc"):
        by, argv = nvcc, [nvcc, *gencode(toolkit["architecture"]), "--cudart=shared", "-Xlinker", "--as-needed"]
        argv += ["-o", f"{folder}/proof", source, *linking, "-lcuda"]
    else:
        by = "g++"
        argv = ["g++", "-x", "c++", f"-I{prefix}/include", "-o", f"{folder}/proof", source, "-Wl,--as-needed"]
        argv += [*linking, "-lcudart", "-lcuda"]
    code, said = call(argv, folder)
    if code:
        errors = [line for line in said.splitlines() if re.search(r"error|fatal|cannot find|not found|undefined", line)]
        raise Unproved(
            f"{by} with {prefix}: found {shown(' | '.join(errors) or said)}, wanted a program that includes "
            f"{', '.join(toolkit['includes'])} compiled and linked. Fix: deploy again; it mends missing files"
        )
    return by


def gencode(architecture: str | None) -> list[str]:
    """12.0f -> -gencode=arch=compute_120f,code=sm_120f"""
    if architecture is None:
        return []
    name = architecture.replace(".", "")
    return [f"-gencode=arch=compute_{name},code=sm_{name}"]


def run(prefix: str, program: str) -> tuple[int, int]:
    """(runtime, headers): the versions that the program prints. Raises Unproved."""
    code, said = call([program], "/", {"LD_LIBRARY_PATH": f"{prefix}/lib64"})
    words = said.split()
    if code or len(words) != 2 or not all(word.isdigit() for word in words):
        forbidden = "Permission denied" in said
        fix = "mount that file system without noexec" if forbidden else "deploy again, then look at ldd of it"
        found = shown(said) or "nothing"
        raise Unproved(f"{program}: exit {code}, found {found}, wanted the runtime's version. Fix: {fix}")
    return int(words[0]), int(words[1])


def call(argv: list[str], folder: str, more: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and both outputs of a program; 127 where it cannot be started."""
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env={"PATH": PATH, "LC_ALL": "C", "TMPDIR": folder if folder != "/" else "/tmp", **(more or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT,
        )
    except OSError as error:
        return 127, f"{argv[0]}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return 124, f"{argv[0]} did not end within {LIMIT} s"
    return done.returncode, done.stdout


def shown(text: str) -> str:
    return " ".join(text.split())[:400]


def main(arguments: list[str]) -> int:
    try:
        (text,) = arguments
        toolkit = json.loads(text)
        needed = {"version", "prefix", "includes", "architecture", "needs_nvcc"}
        if missing := needed - toolkit.keys():
            raise ValueError(f"no {', '.join(sorted(missing))}")
    except (ValueError, AttributeError) as error:
        print(f"toolkit_proof.py: {error}; wanted one JSON object. Fix: see the head of this file", file=sys.stderr)
        return 2
    try:
        answer = prove(toolkit)
    except Unproved as problem:
        answer = {"proved": False, "version": toolkit["version"], "problem": str(problem)}
    print(json.dumps(answer))
    return 0 if answer["proved"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
