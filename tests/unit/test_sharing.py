"""Who is whose peer, from the inventory's data alone."""

from __future__ import annotations

from typing import Any

import pytest

from node import inventory
from node.inventory import KEYS
from node.sharing import Member, Neighbour, make

VALUES = {key.name: key.default for key in KEYS.values()}
THREE = [Neighbour(f"h{number}", f"10.0.0.{number}", {}) for number in (1, 2, 3)]


def changed(number: int, address: str | None = None, **data: Any) -> list[Neighbour]:
    """The three, one of them another."""
    hosts = list(THREE)
    hosts[number - 1] = Neighbour(f"h{number}", address or f"10.0.0.{number}", data)
    return hosts


def test_all_hosts_of_an_inventory_are_peers_in_its_order() -> None:
    sharing, problems = make("h2", VALUES, THREE)
    assert sharing is not None and problems == []
    assert sharing.members == tuple(Member(f"h{number}", f"10.0.0.{number}") for number in (1, 2, 3))
    assert [peer.name for peer in sharing.peers] == ["h1", "h3"]
    assert sharing.ports == (30200, 30201)


@pytest.mark.parametrize("neighbours", [[], THREE[:1], changed(2, weights_sharing="off")[:2]])
def test_a_node_by_itself_shares_with_nobody(neighbours: list[Neighbour]) -> None:
    assert make("h1", VALUES, neighbours) == (None, [])


@pytest.mark.parametrize("values", [{"weights_sharing": "off"}, {"hub": "file:///mnt/{path}"}])
def test_who_does_not_want_to_or_has_a_folder_of_its_own_shares_with_nobody(values: dict[str, str]) -> None:
    assert make("h1", VALUES | values, THREE) == (None, [])


@pytest.mark.parametrize(
    "data",
    [{"model": "lab-tiny"}, {"revision": "ab" * 20}, {"weights_sharing": "off"}, {"weights_port": 31000}],
)
def test_hosts_with_other_weights_are_no_peers(data: dict[str, Any]) -> None:
    sharing, problems = make("h1", VALUES, changed(2, **data))
    assert sharing is not None and problems == []
    assert [peer.name for peer in sharing.peers] == ["h3"]


def test_a_default_that_is_written_out_makes_no_difference() -> None:
    sharing, _ = make("h1", VALUES, changed(2, model="kimi-k2.6", weights_sharing="on"))
    assert sharing is not None and len(sharing.peers) == 2


@pytest.mark.parametrize("address", ["gpu-2.example.net", "127.0.0.1", "0.0.0.0", "fe80::1", "10.0.0.1"])
def test_an_address_that_peers_cannot_use_is_said_with_its_fix(address: str) -> None:
    sharing, (problem,) = make("h1", VALUES, changed(2, address=address))
    assert sharing is None and address in str(problem) and "weights_address" in str(problem)


@pytest.mark.parametrize("address", ["10.0.0.7/24", "node", "::1"])
def test_weights_address_is_an_ipv4_address(address: str) -> None:
    data = {"gpu": "b300", "gpu_count": 8, "weights_directory": "/srv", "weights_address": address}
    (problem,) = inventory.read(data)[1]
    assert "weights_address" in str(problem)
