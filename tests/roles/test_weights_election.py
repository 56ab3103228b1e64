"""Who fetches from the hub, decided by each node from what it sees; and the pieces of a file."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from files.tools.weights import pieces
from files.tools.weights.election import Peer, Times, claim, leader

TIMES = Times(silence=15.0, settle=3.0, stuck=180.0, takeover=60.0)
FIRST, SECOND, THIRD = (
    Peer(name, rank, silent=0.5, answered=True, have={}, soon=[], wants=True, claims=False, bytes=0, done=0, idle=0.0)
    for rank, name in enumerate(("h1", "h2", "h3"))
)


def claims(rank: int, *peers: Peer, claiming: bool = False, own: int = 0, unclaimed: float = 0.0) -> bool:
    return claim(rank, claiming, own, peers, unclaimed, TIMES)


def test_the_first_of_the_inventory_begins() -> None:
    assert claims(0, SECOND, THIRD)
    assert not claims(1, FIRST, THIRD) and not claims(2, FIRST, SECOND)


def test_the_first_that_wants_begins() -> None:
    """One that has all, or whose agent does not run, is passed over."""
    assert claims(1, replace(FIRST, wants=False, bytes=10), THIRD)


def test_one_that_has_more_goes_before_the_order() -> None:
    assert claims(2, FIRST, SECOND, own=5) and not claims(0, SECOND, replace(THIRD, bytes=5))


def test_who_fetches_goes_on_whoever_has_more() -> None:
    fetching = replace(SECOND, claims=True)
    assert not claims(0, fetching, THIRD, own=100)
    assert claims(1, FIRST, replace(THIRD, bytes=100), claiming=True)


def test_a_node_that_may_yet_answer_is_waited_for_and_a_silent_one_is_not() -> None:
    starting = replace(FIRST, answered=False, silent=3.0)
    assert not claims(1, starting, THIRD)
    assert claims(1, replace(starting, silent=15.0), THIRD)
    assert claims(1, replace(FIRST, claims=True, silent=15.0), THIRD)
    assert not claims(1, replace(FIRST, claims=True, silent=14.0), THIRD)


def test_two_claims_at_once_leave_the_first() -> None:
    assert claims(0, replace(SECOND, claims=True), claiming=True)
    assert not claims(1, replace(FIRST, claims=True), claiming=True)


def test_a_claim_that_brings_nothing_ends() -> None:
    stuck = replace(FIRST, claims=True, wants=False, idle=180.0)
    assert claims(1, stuck, THIRD) and not claims(1, replace(stuck, idle=179.0), THIRD)


def test_the_first_that_waits_follows_the_one_that_fetches() -> None:
    fetching = replace(FIRST, claims=True)
    assert leader(1, [fetching, THIRD], TIMES) is fetching
    assert leader(2, [fetching, SECOND], TIMES) is None
    assert leader(2, [fetching, replace(SECOND, wants=False)], TIMES) is fetching, "one that has all does not"
    assert leader(2, [fetching, replace(SECOND, silent=15.0)], TIMES) is fetching, "nor one that is gone"


def test_nobody_follows_where_it_is_not_clear_who_fetches() -> None:
    fetching = replace(FIRST, claims=True)
    assert leader(1, [FIRST, THIRD], TIMES) is None
    assert leader(2, [fetching, replace(SECOND, claims=True)], TIMES) is None
    assert leader(1, [replace(fetching, idle=180.0), THIRD], TIMES) is None


def test_nobody_waits_for_ever_for_one_that_should_claim_and_does_not() -> None:
    assert not claims(1, FIRST, unclaimed=60.0) and claims(1, FIRST, unclaimed=61.0)


@pytest.mark.parametrize("views", [[(0, 1, 2)], [(0, 2), (1,)]])
def test_in_each_part_of_a_divided_network_one_fetches(views: list[tuple[int, ...]]) -> None:
    everyone = {0: FIRST, 1: SECOND, 2: THIRD}
    for part in views:
        said = [
            claims(
                rank,
                *(
                    peer if peer.rank in part else replace(peer, silent=20.0)
                    for peer in everyone.values()
                    if peer.rank != rank
                ),
            )
            for rank in part
        ]
        assert sum(said) == 1


def test_the_table_of_pieces_is_the_sha1_of_each(tmp_path: Path) -> None:
    content = bytes(range(256)) * (9 << 12)  # 9 MiB: three pieces, the last a short one
    path = tmp_path / "shard"
    path.write_bytes(content)
    size = 4 << 20
    wanted = b"".join(hashlib.sha1(content[at : at + size]).digest() for at in range(0, len(content), size))
    assert pieces.table(str(path), len(content), Event()) == wanted
    with pytest.raises(ValueError, match="wanted 5"):
        pieces.table(str(path), 5, Event())


@pytest.mark.parametrize(
    ("file_bytes", "mib"), [(1, 4), (949_000_000, 4), (5 << 30, 8), (9_800_000_000, 16), (1 << 40, 16)]
)
def test_pieces_of_4_to_16_mib(file_bytes: int, mib: int) -> None:
    assert pieces.size(file_bytes) == mib << 20
