"""Weights between the nodes of one inventory: who is whose peer, and where. Nodes that are no peers cannot connect."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from node.inventory import KEYS
from node.problems import Problem

POLL_SECONDS = 1.0
SILENCE_SECONDS = 20.0  # until a node that does not answer counts as gone
SETTLE_SECONDS = 1.5  # between the claim to fetch from the hub and the first byte: a claim is seen within 0.5 s
STUCK_SECONDS = 180.0  # of a claim without a byte, until it counts no more
TAKEOVER_SECONDS = 60.0  # without any claim, until a node claims whoever has more


@dataclass(frozen=True)
class Neighbour:
    """A host of the same inventory. address: an IP address, or a name for which the controller knows none."""

    name: str
    address: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Member:
    """One node that shares. address: IPv4."""

    name: str
    address: str


@dataclass(frozen=True)
class Sharing:
    """members: in the inventory's order, the host itself among them. port: of pieces; the next one is that of lists."""

    name: str
    members: tuple[Member, ...]
    port: int

    @property
    def ports(self) -> tuple[int, int]:
        return self.port, self.port + 1

    @property
    def peers(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.name != self.name)


def make(host: str, values: Mapping[str, Any], neighbours: Sequence[Neighbour]) -> tuple[Sharing | None, list[Problem]]:
    """With whom a host shares; None where it is alone, does not want to, or has a folder of its own as hub.

    neighbours: every host of the inventory in its order, this one among them.
    """
    if values["weights_sharing"] == "off" or values["hub"].startswith("file://"):
        return None, []
    alike = [neighbour for neighbour in neighbours if neighbour.name == host or _kind(neighbour.data) == _kind(values)]
    if len(alike) < 2 or host not in [neighbour.name for neighbour in alike]:
        return None, []
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for neighbour in alike:
        if not _usable(neighbour.address):
            problems.append(
                Problem(
                    f"address of {neighbour.name} for weights between nodes",
                    neighbour.address,
                    "an IPv4 address that its peers reach (nodes do not share over IPv6)",
                    'set weights_address for that host, or weights_sharing = "off" for all',
                )
            )
        elif neighbour.address in seen:
            problems.append(
                Problem(
                    f"address of {neighbour.name} for weights between nodes",
                    f"{neighbour.address}, which is that of {seen[neighbour.address]} too",
                    "an address of its own",
                    "set weights_address for both hosts",
                )
            )
        seen[neighbour.address] = neighbour.name
    members = tuple(Member(neighbour.name, neighbour.address) for neighbour in alike)
    return (None if problems else Sharing(host, members, values["weights_port"])), problems


def _kind(data: Mapping[str, Any]) -> tuple[Any, ...]:
    """What must be the same for two hosts to be peers, defaults filled in."""
    keys = ("model", "revision", "weights_sharing", "weights_port")
    return tuple(KEYS[key].default if data.get(key) is None else data[key] for key in keys)


def _usable(address: str) -> bool:
    try:
        found = ipaddress.IPv4Address(address)
    except ValueError:
        return False
    return not (found.is_loopback or found.is_unspecified or found.is_multicast)
