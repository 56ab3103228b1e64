"""Where a lab keeps its things and what it is called: decided by environment variables, read once, passed along."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.lab.shell import LabError

CHECKOUT = Path(__file__).resolve().parents[2]
STAND_INS = Path(__file__).resolve().parent / "stand_ins"
SUITES = {"bookworm": "debian12", "trixie": "debian13"}
SERVED_NAMES = ("developer.download.nvidia.com", "huggingface.co", "cdn-lfs.huggingface.co")
"""Names that lead to the lab's own services inside a lab machine, and to the real sites everywhere else."""
RUNTIME = Path("/run/kimi-nodes-lab")
"""Gone after a reboot, as are the processes and namespaces that it speaks of."""


@dataclass(frozen=True)
class Lab:
    """One lab: its name, its network and its folders.

    name: 1 to 8 characters [a-z0-9], a letter first; it is in the name of every interface, namespace and cgroup.
    network: the first three numbers of a /24, such as "10.77.0".
    cache: the project's cache folder; what is built there is shared by all labs of this user.
    """

    name: str
    network: str
    cache: Path

    @property
    def parts(self) -> Path:
        """Built things: templates, the NVIDIA repository, wheels, the tiny model."""
        return self.cache / "lab"

    @property
    def keys(self) -> Path:
        return self.parts / "keys"

    @property
    def identity(self) -> Path:
        """The private ssh key that opens every machine of every lab."""
        return self.keys / "id_ed25519"

    @property
    def state(self) -> Path:
        return self.parts / "labs" / self.name

    @property
    def machines(self) -> Path:
        return self.state / "machines"

    @property
    def ssh_config(self) -> Path:
        return self.state / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.state / "known_hosts"

    @property
    def runtime(self) -> Path:
        """Control sockets of ssh; its presence says that this lab has something up."""
        return RUNTIME / self.name

    @property
    def uv_cache(self) -> Path:
        return self.cache / "uv"

    @property
    def bridge(self) -> str:
        return f"{self.name}-br"

    @property
    def gateway(self) -> str:
        return f"{self.network}.1"

    @property
    def services_address(self) -> str:
        return f"{self.network}.2"

    def namespace(self, member: str) -> str:
        """The network namespace of a machine, or of "services"."""
        return f"kimi-lab-{self.name}-{member}"

    def interface(self, member: str) -> str:
        """The end of the member's cable that is plugged into the bridge (Linux allows 15 characters)."""
        return f"{self.name}-{'svc' if member == 'services' else member}"

    def address(self, machine: str) -> str:
        return f"{self.network}.{10 + machine_number(machine)}"


def machine_number(name: str) -> int:
    """h1 -> 1. Raises LabError for any other form."""
    found = re.fullmatch(r"h([1-9]\d{0,2})", name)
    if not found or int(found[1]) > 240:
        raise LabError(f"{name!r} is no machine name; wanted h1 to h240", fix="bin/lab ls")
    return int(found[1])


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    return Path(environment.get("KIMI_NODES_CACHE") or Path.home() / ".cache" / "kimi-nodes").absolute()


def read(environment: Mapping[str, str] = os.environ) -> Lab:
    """The lab that the environment names: KIMI_NODES_LAB (lab), KIMI_NODES_LAB_NETWORK (10.77.0), KIMI_NODES_CACHE."""
    name = environment.get("KIMI_NODES_LAB") or "lab"
    if not re.fullmatch(r"[a-z][a-z0-9]{0,7}", name):
        raise LabError(
            f"KIMI_NODES_LAB is {name!r}; wanted 1 to 8 characters a-z 0-9, a letter first",
            fix="KIMI_NODES_LAB=lab2 bin/lab ...",
        )
    network = environment.get("KIMI_NODES_LAB_NETWORK") or "10.77.0"
    if not re.fullmatch(r"(\d{1,3}\.){2}\d{1,3}", network) or any(int(part) > 255 for part in network.split(".")):
        raise LabError(
            f"KIMI_NODES_LAB_NETWORK is {network!r}; wanted the first three numbers of a /24",
            fix="KIMI_NODES_LAB_NETWORK=10.78.0 bin/lab ...",
        )
    return Lab(name, network, cache_folder(environment))
