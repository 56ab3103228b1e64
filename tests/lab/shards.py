"""A repository of shards on the lab's hub, large enough to be interrupted, in place of the tiny model."""

from __future__ import annotations

import random
from pathlib import Path

from node.manifest import File, Manifest
from tests.lab import hub
from tests.lab.settings import Lab
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
