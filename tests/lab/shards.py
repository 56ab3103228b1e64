"""A repository of shards on the lab's hub, large enough to be interrupted, in place of the tiny model.

Machines bring it by tests/lab/weights_only.py, and need nothing else.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from node.layout import WeightsPaths
from node.manifest import File, Manifest
from tests.lab import hub, settings
from tests.lab.settings import Lab
from tests.lab.shell import run
from tests.lab.tiny_model import REPOSITORY

MIB = 1 << 20


def publish(lab: Lab, shards: int, size: int, seed: int) -> tuple[Manifest, Path]:
    """Lay files of `size` bytes each, whole MiB, where the hub of a lab that is up finds them: (manifest, its file)."""
    folder = lab.state / "hub" / REPOSITORY
    folder.mkdir(parents=True)
    source = random.Random(seed)
    for number in range(1, shards + 1):
        with (folder / f"model-{number:05}-of-{shards:06}.safetensors").open("wb") as shard:
            for _ in range(size // MIB):
                shard.write(source.randbytes(MIB))
    (folder / "config.json").write_text("{}")
    revision, listed = hub.Hub([lab.state / "hub"], lab.state / "none.json").listing(folder)
    files = []
    for entry in listed:
        lfs = entry.get("lfs")
        digest = str(lfs["oid"]) if isinstance(lfs, dict) else None
        oid = None if digest else str(entry["oid"])
        files.append(File(str(entry["path"]), (folder / str(entry["path"])).stat().st_size, digest, oid))
    manifest = Manifest(REPOSITORY, revision, tuple(files))
    path = lab.state / "manifest.json"
    path.write_text(manifest.dumps())
    return manifest, path


def carried(lab: Lab) -> int:
    """Bytes that the lab's services have sent to its machines: bodies, and some percent around them.

    The hub's log does not tell of answers that a client broke off.
    """
    shown = json.loads(run("ip", "-n", lab.namespace("services"), "-s", "-j", "link", "show", "host0"))
    return int(shown[0]["stats64"]["tx"]["bytes"])


class Shards:
    """What `publish` laid, for the machines of a lab. environment: that names the lab."""

    def __init__(self, manifest: Manifest, path: Path, environment: Mapping[str, str], directory: str) -> None:
        self.manifest, self.path, self.environment = manifest, path, environment
        self.paths = WeightsPaths(directory, manifest.repository, manifest.revision)

    def start(self, *data: str) -> subprocess.Popen[str]:
        """Begin a deploy of weights and nothing else on every machine. data: KEY=VALUE of the inventory besides."""
        command = [sys.executable, "-m", "pyinfra", "-y", "inventory/lab.py", "tests/lab/weights_only.py"]
        for item in (f"manifest={self.path}", f"revision={self.manifest.revision}", *data):
            command += ["--data", item]
        return subprocess.Popen(
            command,
            cwd=settings.CHECKOUT,
            env=dict(self.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def deploy(self, *data: str) -> tuple[int, str]:
        """The same to its end: (exit code, what it printed)."""
        process = self.start(*data)
        try:
            output, _ = process.communicate(timeout=400)
        except BaseException:
            process.kill()
            raise
        return process.returncode, output
