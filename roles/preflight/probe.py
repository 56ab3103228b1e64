"""Runs on the host: what it is, in the words of its own programs. Reads only."""

from __future__ import annotations

import os
import platform
import shutil
import stat
from pathlib import Path

from kit import on_host


def probe(query_fields: list[str], weights_directory: str | None) -> dict[str, object]:
    """Raw texts for node.systems and node.hardware, and what the host is at all: {"system": ..., "hardware": ...}."""
    smi = "nvidia-smi"
    query = _said(smi, f"--query-gpu={','.join(query_fields)}", "--format=csv")
    return {
        "uid": os.geteuid(),
        "systemd": Path("/run/systemd/system").is_dir(),
        "system": {
            "os_release_text": Path("/etc/os-release").read_text(encoding="utf-8"),
            "python_version": platform.python_version(),
            "glibc_version": os.confstr("CS_GNU_LIBC_VERSION") or "",
            "machine": platform.machine(),
        },
        "hardware": {
            "query": query,
            "topology": _said(smi, "topo", "-m"),
            # Older drivers do not know every field of the query, and then answer none of it.
            "smi_q": "" if query.startswith(query_fields[0]) else _said(smi, "-q"),
            "nvlink": _said(smi, "nvlink", "-s"),
            "lspci": _said("lspci", "-nn") or _bus(),
        },
        "weights_file_system": _file_system(weights_directory) if weights_directory else None,
        "weights_behind": closed(weights_directory) if weights_directory else None,
    }


def _said(*command: str) -> str:
    """What a program printed, its complaint included; nothing where there is no such program."""
    if shutil.which(command[0]) is None:
        return ""
    found = on_host.run(command, timeout=120)
    return str(found["out"] if found["code"] == 0 else found["out"] + found["err"])


def _bus() -> str:
    """NVIDIA's display devices as `lspci -n` would list them, from sysfs: a bare machine has no lspci."""
    lines = []
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        read = {name: (device / name).read_text().strip().removeprefix("0x") for name in ("vendor", "device", "class")}
        if read["vendor"] == "10de" and read["class"].startswith("03"):
            lines.append(f"{device.name} {read['class'][:4]}: {read['vendor']}:{read['device']}")
    return "\n".join(lines)


def closed(path: str) -> str | None:
    """The first folder on the way to a path, itself included, that not every user may go through: "/root, mode 700"."""
    real = Path(os.path.realpath(path))
    for folder in (*reversed(real.parents), real):
        if folder.is_dir() and not folder.stat().st_mode & stat.S_IXOTH:
            return f"{folder}, mode {stat.S_IMODE(folder.stat().st_mode):o}"
    return None


def _file_system(path: str) -> str:
    """The kind of the file system that a directory is on or would be made on: "ext4", "nfs4", ..."""
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split()[4].replace("\\040", " ")
        if (real + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind
