"""Runs on the host for test_python_release: what the service's user finds when it runs the release as the unit does."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
from typing import Any

from kit import on_host

VERSIONS = (
    "import importlib.metadata as m, json, re\n"
    "print(json.dumps({re.sub('[-_.]+', '-', d.metadata['Name']).lower(): d.version for d in m.distributions()}))"
)


def probe(
    link: str, environment: str, python: str, user: str, variables: dict[str, str], receipt: str
) -> dict[str, Any]:
    """{"current": target | None, "versions": {name: version}, "writable": first path | None, "nvcc_path": str | None,
    "nvcc": text, "torch_cuda": text, "ninja": path | None, "receipt": object | None, "uncompiled": [path]}"""
    if not os.path.isfile(python):
        return {"current": _target(link), "there": False}
    return {
        "current": _target(link),
        "there": True,
        "versions": json.loads(_as(user, {}, [python, "-I", "-c", VERSIONS]) or "{}"),
        "writable": _as(user, {}, ["find", environment, "!", "-type", "l", "-writable", "-print", "-quit"]).strip()
        or None,
        "nvcc_path": shutil.which("nvcc", path=variables["PATH"]),
        "nvcc": _as(user, variables, ["nvcc", "--version"]),
        "torch_cuda": _as(user, variables, [python, "-c", "import torch; print(torch.version.cuda)"]).strip(),
        "ninja": shutil.which("ninja", path=variables["PATH"]),
        "ninja_version": _as(user, variables, ["ninja", "--version"]).strip(),
        "receipt": json.loads(on_host.text(receipt) or "null"),
    }


def _target(link: str) -> str | None:
    return os.readlink(link) if os.path.islink(link) else None


def _as(user: str, variables: dict[str, str], argv: list[str]) -> str:
    """What a program prints as this user with these variables only; "" where there is no such user or program."""
    try:
        account = pwd.getpwnam(user)
        done = subprocess.run(
            argv, user=account.pw_uid, group=account.pw_gid, extra_groups=[], cwd="/", stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=300, env={"PATH": "/usr/bin:/bin", **variables},
        )  # fmt: skip
    except (KeyError, OSError):
        return ""
    return done.stdout if done.returncode == 0 else ""
