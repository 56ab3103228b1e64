"""The running machines of the lab as hosts of a pyinfra inventory, with what only this lab knows."""

from __future__ import annotations

import sys
from typing import Any

from node.manifest import loads
from tests.lab import machine, nvidia_repository, settings, tiny_model
from tests.lab.shell import LabError


def hosts() -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of every machine that is up. Ends the program with a line where none is."""
    try:
        return _hosts(settings.read())
    except LabError as error:
        sys.exit(str(error))


def _hosts(lab: settings.Lab) -> list[tuple[str, dict[str, Any]]]:
    """Raises LabError when there is none."""
    up = [name for name in machine.names(lab) if machine.running(lab, name)]
    if not up:
        raise LabError(f"lab {lab.name!r} has no machine that is up", fix="bin/lab up 1")
    fingerprint = nvidia_repository.fingerprint(lab)
    manifest = tiny_model.manifest(lab)
    common = {
        "ssh_port": 22,
        "ssh_user": "root",
        "ssh_key": str(lab.identity),
        "ssh_known_hosts_file": str(lab.known_hosts),
        "ssh_strict_host_key_checking": "yes",
        "cuda_repository_key": nvidia_repository.key_file(fingerprint),
        "cuda_repository_fingerprint": fingerprint,
        "manifest": str(manifest),
        "revision": loads(manifest.read_bytes()).revision,
    }
    return [(name, {"ssh_hostname": lab.address(name), **common}) for name in up]
