"""Compile, before the server starts, what it would compile in front of its first users: parts of FlashInfer and SGLang.

    PYTHON jit_warmup.py CONFIGURATION            compile what is not there; noop where the receipt holds
    PYTHON jit_warmup.py CONFIGURATION --check    say why it is not warm (exit 3), change nothing

PYTHON is the release's own, and the environment is the server's (EnvironmentFile of its unit): a cache is hit only by a
process that computes the same folder, the same flags and the same tool paths. CONFIGURATION is JSON:

    {"release": digest, "architecture": "12.0f", "environment": {names that decide what is compiled: values},
     "modules": [{"source": Python module, "function": name, "arguments": [...], "cubins": wanted for it}],
     "library": folder in the cache, "receipt": path, "nvcc": "13.0",
     "cubins": null, or {"receipt": path, "problem": path, "lock": path, "status": path, "unit": name} of cubins.py}

Which modules a node needs is decided in node/kernels.py. Those of FlashInfer's that include headers of the kernels that
NVIDIA ships compiled come last, after waiting for the unit that fetches these.

Which cache does the engine use? Read in sglang 0.5.12.post1, 0.5.17, 0.5.23 and flashinfer 0.6.11.post1, 0.6.15.post1:

1. Every scheduler process imports flashinfer with the unit's FLASHINFER_CUDA_ARCH_LIST ("12.0f"); the *folder* is fixed
   at that import: $FLASHINFER_WORKSPACE_BASE/.cache/flashinfer/<version>/120f/cached_ops (flashinfer/jit/env.py).
2. ModelRunner.load_model calls set_cuda_arch (sglang/srt/utils/common.py), which sets the variable to "12.0a".
3. The first request that samples with top_p calls gen_sampling_module().build_and_load(). The *flags* are made then,
   from the variable as it is then (flashinfer/jit/cpp_ext.py, build_cuda_cflags): compute_120a, in the folder 120f.
4. build() rewrites build.ninja where it differs and runs ninja, which compiles again what has another command line.

So a module compiled the obvious way, under "12.0f" all along, is compiled a second time in front of the first user
(measured: three nvcc runs; compiled this way none, and the module is loaded in 0.05 s). Here the same steps are done in
the same order, with the release's own functions: import, set_cuda_arch (told the capability that the plan declares, for
there may be no GPU yet), build_and_load; then ninja is asked whether it would do anything at all.

SGLang's own modules (load_jit of sglang/jit_kernel/utils.py, later sglang/kernels/jit/utils/compile.py) go through
TVM-FFI to $TVM_FFI_CACHE_DIR. Flags and folder follow from the device's capability, which we tell as above, and from
nvcc's version. 0.5.12.post1 runs ninja each time; later releases load the library if it is there. Which library that
is, is read from this process's own maps once the release has loaded it.

FLASHINFER_JIT_VERBOSE and FLASHINFER_JIT_DEBUG must not be set: they change flags (-O0 -g). MAX_JOBS changes none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FORMAT = 2
NOT_WARM = 3
# The largest of the sampling module's three compilations took 1.0 GiB (measured, nvcc 13.0); twice that, to be safe.
BYTES_PER_JOB = 2 * 1024**3
LAUNCHER_BYTES_PER_JOB = 6 * 1024**3  # the same of FlashInfer's launcher of experts for sm_103: 2.8 GiB
ONE_FILE = 1  # see `order`
CUBINS_SECONDS = 3600  # as long as the unit that fetches them may take
CUBINS_GRACE_SECONDS = 60  # within which systemd has started it, and its Python has come to take its lock
FLAG_CHANGING = ("FLASHINFER_JIT_VERBOSE", "FLASHINFER_JIT_DEBUG")


class Problem(Exception):
    """What was found and wanted; the text ends with `Fix: ...`."""


def main(arguments: list[str]) -> int:
    """0: warm. 1: could not be warmed, the reason is the last line. 3: --check, and it is not warm."""
    if len(arguments) not in (1, 2) or arguments[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        asked = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
        if arguments[1:]:
            reasons = why_not_warm(asked)
            print("\n".join(reasons) or "warm")
            return NOT_WARM if reasons else 0
        warm(asked)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def warm(asked: Mapping[str, Any]) -> None:
    """Compile unless the receipt holds, and write the receipt. Raises Problem."""
    folder = Path(asked["receipt"]).parent
    if not os.access(folder, os.W_OK):
        raise Problem(f"{folder}: found no folder to write to, wanted the release's cache. Fix: deploy again")
    with locked(folder / ".warmup.lock"):
        reasons = why_not_warm(asked)
        if not reasons:
            print(f"warm: {asked['receipt']} holds, nothing to compile", flush=True)
            return
        for reason in reasons:
            print(f"not warm: {reason}", flush=True)
        forget_changed(Path(asked["receipt"]))
        began = time.monotonic()
        modules = compile_modules(asked)
        receipt = {
            "format": FORMAT,
            "asked": dict(asked),
            "nvcc": nvcc_version(asked),
            "modules": modules,
            "seconds": round(time.monotonic() - began, 1),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(Path(asked["receipt"]), receipt)
        names = ", ".join(module["name"] for module in modules)
        print(f"warm: {names} in {receipt['seconds']:.0f} s", flush=True)


def why_not_warm(asked: Mapping[str, Any]) -> list[str]:
    """What of the receipt does not hold any more, [] if all does. Compiles nothing and imports nothing."""
    path = Path(asked["receipt"])
    try:
        receipt, files = read_receipt(path)
    except FileNotFoundError:
        return [f"{path}: no receipt"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{path}: cannot be read ({error!r})"]
    reasons = []
    if receipt.get("format") != FORMAT:
        reasons.append(f"receipt has format {receipt.get('format')}, this program writes {FORMAT}")
    for name, value in asked.items():
        if receipt["asked"].get(name) != value:
            reasons.append(f"{name} was {receipt.get('asked', {}).get(name)!r}, now {value!r}")
    try:
        nvcc = nvcc_version(asked)
        if receipt.get("nvcc") != nvcc:
            reasons.append(f"nvcc was {receipt.get('nvcc')}, now {nvcc}")
    except Problem as problem:
        reasons.append(str(problem))
    for file, wanted in files.items():
        found = digest(file)
        if found != wanted:
            reasons.append(f"{file}: {'missing' if found is None else 'other content'}")
    return reasons


def forget_changed(receipt: Path) -> None:
    """Remove the folder of every module of which a file is not as it was compiled: to ninja, newer is good."""
    try:
        _, files = read_receipt(receipt)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    for folder in {file.parent for file, wanted in files.items() if digest(file) != wanted}:
        shutil.rmtree(folder, ignore_errors=True)


def read_receipt(path: Path) -> tuple[dict[str, Any], dict[Path, str]]:
    """The receipt, and the SHA-256 of every file in it. Raises OSError, or what malformed JSON leads to."""
    receipt = json.loads(path.read_text(encoding="utf-8"))
    files = {Path(file["path"]): file["sha256"] for module in receipt["modules"] for file in module["files"]}
    receipt["asked"].get("release")
    return receipt, files


def nvcc_version(asked: Mapping[str, Any]) -> str:
    """Version of the toolkit's compiler, "13.0.88". Raises Problem where it is missing or of another release."""
    nvcc = asked["environment"]["CUDA_HOME"] + "/bin/nvcc"
    fix = "Fix: deploy again, which installs the toolkit; pytest tests/host names what is missing"
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Problem(f"{nvcc}: found no compiler that runs ({error}), wanted {asked['nvcc']}. {fix}") from None
    found = re.search(r"release (\d+\.\d+), V(\S+)", text)
    if found is None or found[1] != asked["nvcc"]:
        shown = found[1] if found else text.strip()[-80:]
        raise Problem(f"{nvcc}: found release {shown}, wanted {asked['nvcc']}. {fix}")
    return found[2]


def compile_modules(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Do what the engine does up to its first sampled token, without a GPU. Raises Problem."""
    check_environment(asked)
    architecture = asked["architecture"]
    capability = re.fullmatch(r"(\d+)\.(\d)[af]?", architecture)
    if capability is None:
        raise Problem(f"architecture: found {architecture!r}, wanted one like 12.0f. Fix: mend node/hardware.py")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a server that still runs has its GPUs to itself; no flag depends on them
    os.environ["MAX_JOBS"] = str(jobs())
    say(phase="importing FlashInfer and SGLang")

    # The engine's order: flashinfer is imported under the unit's variable, and only then set_cuda_arch overwrites it.
    import flashinfer.sampling  # noqa: F401
    import torch
    from sglang.srt.utils import common

    torch.cuda.get_device_capability = lambda device=None: (int(capability[1]), int(capability[2]))
    torch.cuda.current_device = lambda: 0  # SGLang asks for it before it asks for the capability
    common.is_flashinfer_available = lambda: True  # it asks for a GPU, which we hide
    common.set_cuda_arch()

    wanted = int(capability[1]) * 10 + int(capability[2])
    modules: list[dict[str, Any]] = []
    calls = sorted(asked["modules"], key=order)
    alone = [call for call in calls if order(call) == ONE_FILE]
    compiled: dict[str, float] = {}  # in children: seconds
    for number, call in enumerate(calls):
        if alone and call is alone[0]:
            compiled = compile_in_children(alone, int(os.environ["MAX_JOBS"]))
        if call["cubins"]:
            wait_for_cubins(asked["cubins"])
            os.environ["MAX_JOBS"] = str(jobs(LAUNCHER_BYTES_PER_JOB))
        name = named(call)
        say(phase=f"compiling {name}", done=number, total=len(calls), unit="modules")
        print(f"compiling {name}", flush=True)
        began = time.monotonic()
        files = compile_module(call, name)
        for library in files:
            found = gpu_architectures(library.read_bytes())
            if found != {wanted}:
                raise Problem(f"{library}: found code for {sorted(found)}, wanted sm_{wanted} alone. Fix: report this")
            if not library.is_relative_to(asked["library"]):
                raise Problem(f"{library}: found it there, wanted it below {asked['library']}. Fix: report this")
            check_nothing_left(library.with_name("build.ninja"))
        modules.append(
            {
                "name": name,
                "seconds": round(compiled.get(name, time.monotonic() - began), 1),
                "jobs": int(os.environ["MAX_JOBS"]),
                "files": [
                    {"path": str(path), "sha256": digest(path)}
                    for library in files
                    for path in (library, library.with_name("build.ninja"))
                ],
            }
        )
    return modules


def named(call: Mapping[str, Any]) -> str:
    """sglang.kernels.ops.moe.moe_wna16_marlin._jit_moe_wna16_marlin_module(torch.bfloat16, False)"""
    return f"{call['source']}.{call['function']}({', '.join(map(str, call['arguments']))})"


def order(call: Mapping[str, Any]) -> int:
    """First FlashInfer's, of several files each, which ninja compiles at once; then SGLang's, of one file each, which
    are compiled at once here; last what waits for another unit."""
    if call["cubins"]:
        return ONE_FILE + 1
    return ONE_FILE if call["source"].startswith("sglang.") else ONE_FILE - 1


def compile_in_children(calls: list[Mapping[str, Any]], jobs: int) -> dict[str, float]:
    """Compile these, `jobs` at a time, one compiler each. What fails is told by who comes to load it afterwards.

    -> name: seconds that its child took.
    """
    print(f"compiling {len(calls)} modules of one file each, {jobs} at a time", flush=True)
    waiting, children, seconds = list(calls), dict[int, tuple[str, float]](), dict[str, float]()
    while waiting or children:
        if waiting and len(children) < jobs:
            call = waiting.pop()  # the largest, of experts, come last in the table and first here
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.environ["MAX_JOBS"] = "1"
                    compile_module(call, named(call))
                    code = 0
                finally:
                    os._exit(code)
            children[child] = named(call), time.monotonic()
            continue
        done = len(calls) - len(waiting) - len(children)
        say(phase="compiling SGLang's kernels", done=done, total=len(calls), unit="modules")
        name, began = children.pop(os.wait()[0], ("", 0.0))
        if name:
            seconds[name] = time.monotonic() - began
    return seconds


def compile_module(call: Mapping[str, Any], name: str) -> list[Path]:
    """Build and load one module by the release's own function. -> its libraries. Raises Problem."""
    import torch

    arguments = [
        getattr(torch, argument.removeprefix("torch."))
        if isinstance(argument, str) and argument.startswith("torch.")
        else argument
        for argument in call["arguments"]
    ]
    before = loaded_libraries()
    try:
        made = getattr(importlib.import_module(call["source"]), call["function"])(*arguments)
        if hasattr(made, "build_and_load"):  # FlashInfer's say what to build; SGLang's have built it
            made.build(verbose=True)
            made.build_and_load()  # the engine's own call: nothing is compiled now
    except Exception as error:
        print(error, file=sys.stderr, flush=True)
        raise Problem(
            f"{name}: found that it cannot be compiled ({str(error).strip().splitlines()[:1]}), wanted it compiled and "
            "loaded. Fix: see the first 'error' above; a missing header is an incomplete toolkit, and deploying again "
            "mends it"
        ) from None
    libraries = sorted(loaded_libraries() - before)
    built = [library for library in libraries if library.with_name("build.ninja").exists()]
    if not built:
        raise Problem(f"{name}: found no library loaded for it, wanted one in the cache. Fix: report this")
    return built


def loaded_libraries() -> set[Path]:
    """Shared libraries in this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return {Path(path) for path in paths if path.endswith(".so")}


def wait_for_cubins(cubins: Mapping[str, str]) -> None:
    """Until the unit that fetches them is done. Raises Problem with its own words, or where it is not at work."""
    began = time.monotonic()
    started = time.time()
    while not Path(cubins["receipt"]).exists() or held(cubins["lock"]):
        waited = time.monotonic() - began
        problem = Path(cubins["problem"])
        with contextlib.suppress(OSError):
            if not held(cubins["lock"]) and (problem.stat().st_mtime >= started or waited > CUBINS_GRACE_SECONDS):
                raise Problem(problem.read_text(encoding="utf-8").strip())
        if waited > CUBINS_SECONDS or (waited > CUBINS_GRACE_SECONDS and not held(cubins["lock"])):
            raise Problem(
                f"{cubins['receipt']}: found no receipt after {waited:.0f} s, wanted the kernels that NVIDIA ships "
                f"compiled fetched by {cubins['unit']}. Fix: journalctl -u {cubins['unit']}, then deploy again"
            )
        with contextlib.suppress(OSError, ValueError):
            say(**json.loads(Path(cubins["status"]).read_text(encoding="utf-8")))
        time.sleep(1)


def held(lock: str) -> bool:
    """Whether a process holds this lock."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def check_environment(asked: Mapping[str, Any]) -> None:
    """The variables that decide what is compiled are those of the server. Raises Problem."""
    for name, value in asked["environment"].items():
        if os.environ.get(name) != value:
            raise Problem(
                f"{name}: found {os.environ.get(name)!r}, wanted {value!r} as the server has it. "
                "Fix: start this program by its unit (systemctl start), not by hand"
            )
    for name in FLAG_CHANGING:
        if os.environ.get(name):
            raise Problem(f"{name}: found it set, wanted it unset: it changes flags. Fix: remove it from the unit")


def check_nothing_left(build_file: Path) -> None:
    """ninja would compile nothing more. Raises Problem."""
    command = ["ninja", "-n", "-C", str(build_file.parent), "-f", str(build_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or "no work to do" not in done.stdout:
        raise Problem(
            f"{build_file}: ninja would still do something ({done.stdout.strip()[-200:]}), wanted nothing left. "
            "Fix: see that the clock of this host does not jump, then remove that folder and start again"
        )


def jobs(bytes_per_job: int = BYTES_PER_JOB) -> int:
    """Compilers at once: as many as there are cores and as free memory bears, at least one."""
    free = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        if line.startswith("MemAvailable:")
    )
    return max(1, min(len(os.sched_getaffinity(0)), free // bytes_per_job))


def gpu_architectures(library: bytes) -> set[int]:
    """Architectures of the machine code in a library, {120}: read from the headers of its fat binaries.

    A fat binary starts with 0xBA55ED50, a version, the length of its header and of all its entries; an entry with its
    kind (1 PTX, 2 machine code), the length of its header and of its content, and at offset 28 the architecture in
    decimal. NVIDIA documents none of it; read from what nvcc 13.0 writes.
    """
    found = set()
    for start in re.finditer(re.escape(bytes.fromhex("50ed55ba")), library):
        header = int.from_bytes(library[start.start() + 6 : start.start() + 8], "little")
        length = int.from_bytes(library[start.start() + 8 : start.start() + 16], "little")
        at, end = start.start() + header, start.start() + header + length
        while at + 32 <= min(end, len(library)):
            kind = int.from_bytes(library[at : at + 2], "little")
            entry = int.from_bytes(library[at + 4 : at + 8], "little")
            content = int.from_bytes(library[at + 8 : at + 16], "little")
            if kind == 2:
                found.add(int.from_bytes(library[at + 28 : at + 32], "little"))
            if entry < 32:
                break  # not an entry: the magic number was in other data
            at += entry + content
    return found


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One warm-up at a time: the unit of the deploy and the server's own start may meet."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def say(**status: Any) -> None:
    """Status for whoever waits: status.json in the unit's runtime directory, if it has one."""
    folder = os.environ.get("RUNTIME_DIRECTORY")
    if folder:
        write_json(Path(folder) / "status.json", status, mode=0o644)


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """The file appears whole, by a rename."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    beside.chmod(mode)
    beside.rename(path)


def digest(path: Path) -> str | None:
    """SHA-256, 64 hex digits; None where there is no such file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
