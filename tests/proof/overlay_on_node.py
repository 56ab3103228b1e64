"""Runs on the node for the proofs of the engine: packages of another release, laid over the environment of this one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from kit import on_host


def probe(folder: str, uv: str, python: str, requirements: str) -> None:
    """Unpack exactly these packages into a folder; what is there already is not fetched again. requirements: lines of a
    lock, with their hashes. Raises Problem."""
    place = Path(folder)
    complete = place / "complete"
    if complete.exists() and complete.read_text() == requirements:
        return
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    listed = place / "requirements.txt"
    listed.write_text(requirements)
    done = subprocess.run(
        [
            *(uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"),
            *("--link-mode", "copy", "--python", python, "--target", folder, "--requirement", str(listed)),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise on_host.Problem(f"uv exited {done.returncode}: {done.stderr.strip()[-600:]}")
    complete.write_text(requirements)
