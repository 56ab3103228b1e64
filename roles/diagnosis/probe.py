"""Runs on the host: recent logs and the state of what kimi-nodes laid down. Reads only.

Each part may fail without the others: what could not be read is said in "unread". Nothing that may hang is waited for,
because a program that asks a dead GPU cannot even be killed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kit import on_host

HIDDEN = "[hidden]"
PROPERTIES = ("Id", "LoadState", "ActiveState", "SubState", "Result", "UnitFileState", "NeedDaemonReload", "NRestarts")
PATTERNS = ("sglang-*.service", "kimi-*.service")
ENTRIES = 20_000  # of a unit's journal, before chatter is left out
LINES = 3_000  # of a unit's journal, sent
HEAD, TAIL = 700, 300  # characters kept of a longer line: compilers' command lines have thousands
# A serving engine says little else than these, and they are never a symptom.
CHATTER = ("Decode batch", "Prefill batch", '" 200 OK')
KERNEL_WORDS = (
    "NVRM", "nvidia", "nouveau", "ut of memory", "oom-kill", "AER", "PCIe Bus Error", "pciehp", "DMAR", "AMD-Vi",
    "I/O error", "medium error", "EXT4-fs error", "XFS (", "Surprise",
)  # fmt: skip
GPU_FIELDS = (
    "index", "name", "pci.bus_id", "memory.used", "memory.total", "temperature.gpu", "utilization.gpu", "power.draw",
    "fabric.state",
)  # fmt: skip
NVIDIA_SMI_SECONDS = 60
ANSWER_SECONDS = 25  # SGLang's own limit for /health is 20


def probe(
    hours: float,
    units: list[str],
    secrets: list[str],
    nvcc: str,
    alternative: str,
    current: str,
    receipts: list[str],
    file_systems: list[str],
    health: str | None,
) -> dict[str, Any]:
    """Logs of the last `hours` and state now.

    units: units of others to look at beside our own. secrets: files whose words must not leave the host. nvcc,
    alternative, current: paths of the release's compiler, of the link that NVIDIA's packages move, and of the current
    release's link. receipts: paths. file_systems: folders. health: address that the server answers, without a key.
    Raises Problem for a user who may not read the journal, and where there is no systemd.
    """
    if os.geteuid() != 0:
        raise on_host.Problem(
            f"user: found uid {os.geteuid()}, wanted root, who may read journal and kernel log. "
            "Fix: set ssh_user to root, or _sudo to True, in the inventory"
        )
    states = _units(units)
    parts: dict[str, Callable[[], Any]] = {
        "logs": lambda: {name: _log(name, state, hours) for name, state in states.items() if _speaks(state)},
        "kernel": lambda: _kernel(hours),
        "gpus": _gpus,
        "gpu_processes": lambda: _nvidia_smi(
            "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"
        ),
        "nvcc": lambda: _said([nvcc, "--version"], 20),
        "alternative": lambda: _alternative(alternative),
        "current": lambda: os.readlink(current) if os.path.islink(current) else None,
        "receipts": lambda: {path: _modified(path) for path in receipts},
        "file_systems": lambda: {path: _room(path) for path in [*file_systems, "/dev/shm"]},
        "memory": _memory,
        "segments": _segments,
        "health": lambda: _status(health) if health else None,
        "command_line": lambda: Path("/proc/cmdline").read_text(encoding="utf-8").strip(),
        "system": lambda: {
            "os_release_text": Path("/etc/os-release").read_text(encoding="utf-8"),
            "python_version": platform.python_version(),
            "glibc_version": os.confstr("CS_GNU_LIBC_VERSION") or "",
            "machine": platform.machine(),
        },
    }
    found: dict[str, Any] = {"now": time.time(), "units": states, "unread": {}}
    with ThreadPoolExecutor(len(parts)) as pool:
        asked: dict[str, Future[Any]] = {name: pool.submit(part) for name, part in parts.items()}
    for name, answer in asked.items():
        try:
            found[name] = answer.result()
        except Exception as error:
            found[name] = None
            found["unread"][name] = f"{type(error).__name__}: {error}"
    kept: dict[str, Any] = _without(found, _words(secrets))
    return kept


# --- programs --------------------------------------------------------------------------------------------------------


def _said(argv: Sequence[str], seconds: float) -> dict[str, Any]:
    """As on_host.run, but a program that does not end is left alone: one that waits in the kernel cannot be killed."""
    if shutil.which(argv[0]) is None:
        return {"code": None, "out": "", "err": f"no program {argv[0]}"}
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        threading.Thread(target=process.wait, daemon=True).start()
        return {"code": None, "out": "", "err": f"{argv[0]} did not end within {seconds:g} s"}
    return {"code": process.returncode, "out": out, "err": err}


def _nvidia_smi(*arguments: str) -> dict[str, Any]:
    return _said(["nvidia-smi", *arguments], NVIDIA_SMI_SECONDS)


def _gpus() -> dict[str, Any]:
    """GPU_FIELDS of each GPU. A driver that does not know the last of them answers nothing, and is asked without it."""
    said: dict[str, Any] = {}
    for fields in (GPU_FIELDS, GPU_FIELDS[:-1]):
        said = _nvidia_smi(f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
        if "not a valid field" not in said["out"] + said["err"]:
            break
    return said


# --- units and logs --------------------------------------------------------------------------------------------------


def _units(others: Iterable[str]) -> dict[str, dict[str, str]]:
    """State of all our units that systemd knows a file or a past of, and of those `others` that it does."""
    listed = _said(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", "--type=service", *PATTERNS], 30
    )
    files = _said(["systemctl", "list-unit-files", "--no-legend", "--full", "--type=service", *PATTERNS], 30)
    if listed["code"] != 0:
        raise on_host.Problem(
            f"systemd does not answer: {(listed['err'] or listed['out']).strip()[-300:]}; wanted a host booted with "
            "systemd. Fix: systemctl is-system-running, on that host"
        )
    names = {line.split()[0] for text in (listed["out"], files["out"]) for line in text.splitlines() if line.split()}
    wanted = sorted(name for name in names | set(others) if not name.endswith("@.service"))
    shown = _said(["systemctl", "show", "--property=" + ",".join(PROPERTIES), "--", *wanted], 30)
    states = {}
    for block in shown["out"].strip().split("\n\n"):
        state = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if state.get("Id") and state.get("LoadState") != "not-found":
            states[state.pop("Id")] = state
    return states


def _speaks(state: Mapping[str, str]) -> bool:
    """Whether a unit's last run is worth reading: it runs, or it did not end well."""
    return state.get("ActiveState") != "inactive" or state.get("Result", "success") != "success"


def _log(unit: str, state: Mapping[str, str], hours: float) -> list[list[list[Any]]]:
    """The unit's last runs, oldest first, each as [[seconds, line], ...].

    A unit that works tells of this run only. One that failed, or was started again by itself, also tells of the run
    before: there stands why it ended.
    """
    argv = [
        "journalctl", f"--unit={unit}", f"--since=-{hours:g}h", f"--lines={ENTRIES}", "--output=json", "--all",
        "--quiet", "--no-pager", "--output-fields=MESSAGE,INVOCATION_ID,_SYSTEMD_INVOCATION_ID",
    ]  # fmt: skip
    said = _said(argv, 60)
    if said["code"] != 0 and said["err"].strip():
        raise RuntimeError(f"journalctl: {said['err'].strip()[-200:]}")
    runs: dict[str, list[list[Any]]] = {}
    run = ""
    for text in said["out"].splitlines():
        entry = json.loads(text)
        run = entry.get("INVOCATION_ID") or entry.get("_SYSTEMD_INVOCATION_ID") or run
        seconds = int(entry["__REALTIME_TIMESTAMP"]) / 1e6
        lines = runs.setdefault(run, [])
        for line in _text(entry.get("MESSAGE")).splitlines():
            if not any(word in line for word in CHATTER):
                lines.append([seconds, _short(line)])
    well = state.get("ActiveState") == "active" and state.get("NRestarts", "0") == "0"
    return [lines[-LINES:] for lines in list(runs.values())[-1 if well else -2 :]]


def _text(message: Any) -> str:
    """A journal's MESSAGE: text, or a list of bytes where it is not all text, or several of them."""
    if isinstance(message, list):
        if all(isinstance(part, int) for part in message):
            return bytes(message).decode("utf-8", "replace")
        return "\n".join(_text(part) for part in message)
    return message if isinstance(message, str) else ""


def _short(line: str) -> str:
    return line if len(line) <= HEAD + TAIL else line[:HEAD] + " ... " + line[-TAIL:]


def _kernel(hours: float) -> list[list[Any]]:
    """[[seconds | None, line], ...] of the kernel's log since the start that may mean something to us."""
    said = _said(
        ["journalctl", "--dmesg", "--boot", f"--since=-{hours:g}h", "--output=json", "--all", "--quiet", "--no-pager",
         "--output-fields=MESSAGE"], 60,
    )  # fmt: skip
    lines: list[list[Any]] = []
    if said["code"] == 0:
        for text in said["out"].splitlines():
            entry = json.loads(text)
            lines += [
                [int(entry["__REALTIME_TIMESTAMP"]) / 1e6, line] for line in _text(entry.get("MESSAGE")).splitlines()
            ]
    if not lines:  # journald was told not to keep the kernel's log
        said = _said(["dmesg"], 20)
        if said["code"] != 0:
            raise RuntimeError(f"dmesg: {said['err'].strip()[-200:]}")
        lines = [[None, line] for line in said["out"].splitlines()]
    return [[at, _short(line)] for at, line in lines if any(word in line for word in KERNEL_WORDS)][-LINES:]


# --- state -----------------------------------------------------------------------------------------------------------


def _alternative(path: str) -> dict[str, Any] | None:
    if not os.path.lexists(path):
        return None
    return {"target": os.path.realpath(path), "nvcc": os.access(f"{path}/bin/nvcc", os.X_OK)}


def _modified(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


def _room(path: str) -> dict[str, Any] | None:
    """Of the file system that a folder is on or would be on."""
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    found = os.statvfs(path)
    return {
        "device": os.stat(path).st_dev,
        "bytes": found.f_blocks * found.f_frsize,
        "free": found.f_bavail * found.f_frsize,
        "inodes": found.f_files,
        "free_inodes": found.f_favail,
    }


def _memory() -> dict[str, int]:
    """Bytes by /proc/meminfo's names."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    values = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
    return {name: values[name] for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree") if name in values}


def _segments() -> list[dict[str, Any]]:
    """NCCL's shared memory."""
    found = []
    for path in sorted(Path("/dev/shm").glob("nccl-*")):
        state = path.lstat()
        found.append({"name": path.name, "bytes": state.st_size, "user": on_host.user_name(state.st_uid)})
    return found


def _status(address: str) -> int | str:
    """The status of a GET, or why there is none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=ANSWER_SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return str(getattr(error, "reason", error) or type(error).__name__)


# --- secrets ---------------------------------------------------------------------------------------------------------


def _words(paths: Iterable[str]) -> list[str]:
    """What stands in files of keys, the longest first; short words are names of fields."""
    words: set[str] = set()
    for path in paths:
        for word in (on_host.text(path) or "").replace('"', " ").replace("'", " ").split():
            if len(word) >= 8 and not word.endswith(":"):
                words.add(word)
    return sorted(words, key=len, reverse=True)


def _without(value: Any, words: list[str]) -> Any:
    if isinstance(value, str):
        for word in words:
            value = value.replace(word, HIDDEN)
        return value
    if isinstance(value, dict):
        return {name: _without(part, words) for name, part in value.items()}
    if isinstance(value, list):
        return [_without(part, words) for part in value]
    return value
