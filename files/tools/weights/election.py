"""Which node fetches from the hub: one at a time, the first of the inventory, and after it the one that has most.

Every node decides for itself by what it sees of the others. Two that claim at once, because neither had seen the other
yet, see each other within SETTLE: the later one in the inventory gives way, before the first byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Peer:
    """What a node sees of another.

    rank: its place in the inventory. silent: seconds since it answered, or since it was first asked where it never
    did; answered: whether it ever did. have: digest -> name of the table of pieces, of files that it gives to others;
    soon: digests of those that it will give as soon as their table is made.
    wants: an agent there needs the hub. claims: it fetches from there, or is about to. bytes: that it has of these
    weights, with those of files that it follows; done: with those of all files on their way; idle: seconds since `done`
    moved. partial: digests of files on their way to it from the hub;
    brought: of those that are complete there, being hashed or right, and not given yet.
    """

    name: str
    rank: int
    silent: float
    answered: bool
    have: dict[str, str]
    soon: list[str]
    wants: bool
    claims: bool
    bytes: int
    done: int
    idle: float
    partial: list[str] = field(default_factory=list)
    brought: list[str] = field(default_factory=list)
    verified: int = 0


@dataclass(frozen=True)
class Times:
    """Seconds. silence: until a node that does not answer counts as gone. settle: from a claim to the first byte.
    stuck: of a claim without a byte, until it counts no more. takeover: without any claim that counts, until a node
    that needs the hub claims whoever has more."""

    silence: float
    settle: float
    stuck: float
    takeover: float


def alive(peer: Peer, times: Times) -> bool:
    return peer.answered and peer.silent < times.silence


def claim(rank: int, claiming: bool, own_bytes: int, peers: Sequence[Peer], unclaimed: float, times: Times) -> bool:
    """Whether this node, which needs the hub, is to fetch from there.

    unclaimed: seconds for which no claim that counts was seen.
    """
    present = [peer for peer in peers if alive(peer, times)]
    claimants = [peer for peer in present if peer.claims and peer.idle < times.stuck]
    if claiming:
        return not any(peer.rank < rank for peer in claimants)
    if claimants:
        return False
    if unclaimed > times.takeover:
        return True
    if any(not peer.answered and peer.silent < times.silence for peer in peers):
        return False  # it may be about to answer
    wanting = [(-peer.bytes, peer.rank) for peer in present if peer.wants]
    return all((-own_bytes, rank) < other for other in wanting)


def leader(rank: int, peers: Sequence[Peer], times: Times) -> Peer | None:
    """Whom this node follows: it copies what the one that fetches brings, as it comes, and goes on from there when that
    one is gone. The first of the inventory that waits does; the others take whole files."""
    present = [peer for peer in peers if alive(peer, times)]
    fetching = [peer for peer in present if peer.claims and peer.idle < times.stuck]
    waiting = [peer for peer in present if peer not in fetching and peer.wants]
    if len(fetching) != 1 or any(peer.rank < rank for peer in waiting):
        return None
    return fetching[0]
