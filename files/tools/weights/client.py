"""The hub's own client (huggingface_hub, in the tools' environment): the second transport.

It fetches by other code, and where the hub offers that from another store (Xet), than aria2 did. It runs as a child,
because it can hang, and its bytes are hashed here like all others: it does not compare them itself.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from threading import Event

from . import disk
from .errors import Stopped
from .manifest import RESERVED

FOLDER = f"{RESERVED}-client-"
STALL_SECONDS = 60.0
_PROGRAM = """
import sys
from huggingface_hub import hf_hub_download
repository, revision, path, folder = sys.argv[1:]
hf_hub_download(repository, path, revision=revision, local_dir=folder)
"""


class ClientFailed(Exception):
    """It brought nothing; the plain connection is left."""


def download(
    python: str,
    hub: str,
    token_path: str | None,
    repository: str,
    revision: str,
    path: str,
    staging: str,
    moved: Callable[[int], None],
    stopping: Event,
) -> None:
    """Write a file's content to its place in staging. Raises ClientFailed, Stopped, and OSError of the disk.

    token_path: of a file with the token, which the client sends to the hub only.
    """
    folder = os.path.join(staging, FOLDER + hashlib.sha256(path.encode()).hexdigest()[:16])
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub,
        "HF_HOME": os.path.join(folder, "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_TOKEN_PATH": token_path or os.path.join(folder, "no-token"),
    }
    files = os.path.join(folder, "files")
    command = [python, "-I", "-c", _PROGRAM, repository, revision, path, files]
    complaints = os.path.join(folder, "complaints")
    try:
        with open(complaints, "wb") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment
            )
        try:
            _watch(process, folder, moved, stopping)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode != 0:
            with open(complaints, encoding="utf-8", errors="replace") as said:
                last = said.read().strip().splitlines()[-1:] or ["nothing"]
            raise ClientFailed(f"exit code {process.returncode}: {last[0][:300]}")
        target = os.path.join(staging, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(os.path.join(files, path), target)
    except FileNotFoundError as error:
        raise ClientFailed(f"{error.filename}: {error.strerror}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _watch(process: subprocess.Popen[bytes], folder: str, moved: Callable[[int], None], stopping: Event) -> None:
    """Wait for its end, and tell of bytes as they reach the disk. Raises ClientFailed where none do for long."""
    seen, last = 0, time.monotonic()
    while process.poll() is None:
        if stopping.wait(0.2):
            raise Stopped("stopped while fetching")
        size = sum(disk.allocated(os.path.join(place, name)) for place, _, names in os.walk(folder) for name in names)
        if size > seen:
            moved(size - seen)
            seen, last = size, time.monotonic()
        elif time.monotonic() - last > STALL_SECONDS:
            raise ClientFailed(f"no byte for {STALL_SECONDS:.0f} s")
