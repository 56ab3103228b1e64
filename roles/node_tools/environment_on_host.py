"""Runs on the host: build the tools' virtual environment under its digest, complete or not at all.

The receipt inside it is written last; an environment without one is removed and built anew.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from kit import on_host
from kit.on_host import Problem


def act(
    environment: str,
    link: str,
    python: str,
    lock: str,
    site_packages: str,
    distributions: Mapping[str, str],
    receipt: str,
    uv: str,
    machine_environment: str,
) -> None:
    """Nothing is done where the receipt and the program `uv` are there. Raises Problem with pip's words.

    machine_environment: of variables that hold for pip too, as for units: a login by sudo may not have read it.
    """
    os.umask(0o022)
    parent = os.path.dirname(environment)
    os.makedirs(parent, exist_ok=True)
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # a run whose connection was lost may still be at it
        if os.path.exists(receipt) and os.access(uv, os.X_OK):
            return
        in_use = os.path.basename(os.path.realpath(link))
        for name in os.listdir(parent):
            if name != in_use or name == os.path.basename(environment):
                shutil.rmtree(os.path.join(parent, name))
        try:
            _build(environment, python, lock, on_host.variables(machine_environment))
            if wrong := differences(versions(site_packages), distributions):
                raise Problem(f"{environment}: {wrong}. Fix: deploy again; if it stays, remove that folder first")
        except BaseException:
            shutil.rmtree(environment, ignore_errors=True)
            raise
        subprocess.run(["sync", "-f", environment], check=True)
        content = json.dumps({"distributions": dict(distributions), "python": python}, indent=1, sort_keys=True)
        on_host.replace(receipt, content.encode(), 0o644)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def versions(site_packages: str) -> dict[str, str]:
    """Distribution -> version of what lies in a site-packages folder."""
    return {
        re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower(): found.version
        for found in importlib.metadata.distributions(path=[site_packages])
    }


def differences(found: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """What is not as wanted, "" if all is."""
    return ", ".join(
        f"{name} found {found.get(name) or 'nothing'}, wanted {version}"
        for name, version in wanted.items()
        if found.get(name) != version
    )


def _build(environment: str, python: str, lock: str, told: Mapping[str, str]) -> None:
    _run(
        [python, "-m", "venv", environment],
        "make a virtual environment",
        "apt-get install python3-venv, on that host",
        told,
    )
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(lock)
        file.flush()
        # The addresses and authorities of packages are the machine's own (pip.conf): nothing is said of them here.
        _run(
            [f"{environment}/bin/python", "-m", "pip", "install", "--require-hashes", "--no-deps",
             "--only-binary=:all:",
             "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--requirement", file.name],
            "install the tools' lock",
            "see that this host reaches its package index: python3 -m pip download uv, and pip config list",
            told,
        )  # fmt: skip


def _run(argv: list[str], purpose: str, fix: str, told: Mapping[str, str]) -> None:
    code, said = on_host.output(argv, told)
    sys.stdout.write(said)
    if code:
        raise Problem(f"{argv[0]} exited {code}: {said.strip()[-800:]}; wanted to {purpose}. Fix: {fix}")
