"""Several nodes on loopback addresses, with real libtorrent and aria2: one copy crosses the hub's line, nothing wrong
is ever published, whoever dies and whatever a node gives to others."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback_hub import LoopbackHub, loopback_hub
from test_weights_agent import AGENT, MIB, SHARD, SHARDS, Node, repositories, shard, tools_python, wait_until

from files.tools.weights import aria2, receipt

__all__ = ["repositories", "tools_python"]  # fixtures

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("aria2c") is None, reason="wants aria2c (apt-get install aria2)"),
]
TIMES = {"poll": 0.2, "silence": 4.0, "settle": 1.5, "stuck": 20.0, "takeover": 15.0}
NAMES = ("h1", "h2", "h3")
networks = itertools.count(10)


class Member(Node):  # type: ignore[misc]
    """A node with a sharer beside its agent."""

    def __init__(self, folder: Path, hub: LoopbackHub, repository: Path, name: str, net: str, port: int, python: Path):
        folder.mkdir()
        super().__init__(folder, hub, repository)
        self.name, self.python = name, python
        self.address = f"{net}.{NAMES.index(name) + 1}"
        self.sharing = folder / "sharing.json"
        told = {
            "name": name,
            "port": port,
            "members": [[each, f"{net}.{number}"] for number, each in enumerate(NAMES, 1)],
            "socket": str(folder / "s"),
            "tables": str(folder / "tables"),
            "weights": [str(folder / "configuration.json")],
            **TIMES,
        }
        self.sharing.write_text(json.dumps(told))
        self.configure(sharing=str(self.sharing), files_at_once=1, connections_per_file=1)
        self.sharer: subprocess.Popen[bytes] | None = None

    def share(self) -> None:
        log = (self.folder / "sharer.log").open("ab")
        command = [str(self.python), "-sE", str(AGENT), "share", str(self.sharing)]
        self.sharer = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        """As if its power went: agent, aria2 and sharer at once."""
        for process in [*self.running, self.sharer]:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def status_or_nothing(self) -> dict[str, Any]:
        return self.status() if (self.folder / "status.json").exists() else {}

    def said(self) -> str:
        return str((self.folder / "sharer.log").read_text())


@pytest.fixture
def members(tmp_path: Path, repositories: Path, tools_python: Path) -> Iterator[list[Member]]:
    """Three nodes whose sharers run; their agents are the test's to start."""
    net = f"127.77.{next(networks)}"
    with socket.socket() as free:
        free.bind((f"{net}.1", 0))
        port = free.getsockname()[1] & ~1
    with loopback_hub(repositories, tmp_path) as hub:
        made = [
            Member(tmp_path / name, hub, repositories / "lab" / "tiny", name, net, port, tools_python) for name in NAMES
        ]
        try:
            for member in made:
                member.share()
            yield made
        finally:
            for member in made:
                member.kill()
                member.stop()


def end(processes: list[subprocess.Popen[str]], limit: float = 60) -> list[str]:
    """What each said; every one must have ended well."""
    said = []
    for process in processes:
        _, err = process.communicate(timeout=limit)
        assert process.returncode == 0, err
        said.append(err)
    return said


def from_hub(said: list[str]) -> list[bool]:
    return ["this node fetches from the hub for all" in text for text in said]


@pytest.fixture
def slow_hub(members: list[Member]) -> LoopbackHub:
    """Slow enough that something can happen meanwhile."""
    hub = members[0].hub
    hub.control(rate=3 * MIB)
    return hub


def test_one_copy_crosses_the_line_and_one_node_fetches_it(members: list[Member]) -> None:
    total = members[0].manifest.bytes
    said = end([member.start("fetch") for member in members])
    for member in members:
        member.assert_whole()
    assert members[0].hub.sent() == total
    assert sorted(from_hub(said)) == [False, False, True]
    # One node copies what comes while it comes; were it more, the first would have to send as often as there are nodes.
    taken = [member.said().count(".safetensors.kimi-nodes-pieces: ") for member in members]
    assert max(taken) == SHARDS, taken


def test_who_waits_says_so_and_is_alive(members: list[Member], slow_hub: LoopbackHub) -> None:
    """A shard of a slow line takes longer than the watchdog's time: that the others go on is life."""
    first, second, third = members[0].start("fetch"), members[1].start("fetch"), members[2]
    said = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    said.bind(str(third.folder / "n"))
    said.settimeout(2)
    third.environment["NOTIFY_SOCKET"] = str(third.folder / "n")
    waiting = third.start("fetch")
    alive = 0
    while waiting.poll() is None:
        try:
            text = said.recv(4096).decode()
        except TimeoutError:  # it has just ended
            break
        alive += "waiting for a peer" in text and "WATCHDOG=1" in text
    said.close()
    end([first, second, waiting])
    assert alive >= 2


@pytest.mark.parametrize(("what", "point"), [("agent", 0.55), ("node", 0.4)])
def test_a_dead_origin_is_replaced(members: list[Member], slow_hub: LoopbackHub, what: str, point: float) -> None:
    """At any point, in the middle of a shard or just behind one that nobody else has whole."""
    first = members[0].start("fetch")
    wait_until(lambda: members[0].status_or_nothing().get("phase") == "fetching")
    others = [member.start("fetch") for member in members[1:]]
    wait_until(lambda: members[0].status_or_nothing().get("done", 0) > point * members[0].manifest.bytes)
    if what == "agent":
        first.send_signal(signal.SIGKILL)
        first.wait()
    else:
        members[0].kill()
    said = end(others)
    for member in members[1:]:
        member.assert_whole()
    assert sorted(from_hub(said)) == [False, True]
    # The second has copied what the dead one had, but for what came in its last second.
    assert slow_hub.sent() <= members[0].manifest.bytes + SHARD
    print(f"killed at {point}: {slow_hub.sent() - members[0].manifest.bytes} bytes again")
    if what == "node":
        members[0].share()
    slow_hub.stop()  # it comes back, and needs no hub
    end([members[0].start("fetch")])
    members[0].assert_whole()


def spoil_byte(path: Path) -> None:
    with path.open("r+b") as target:
        target.seek(4321)
        byte = target.read(1)
        target.seek(4321)
        target.write(bytes([byte[0] ^ 0xFF]))


def spoil(member: Member, name: str) -> None:
    """A byte is wrong on a node whose receipt says otherwise: what it gives to others is wrong from the root."""
    path = member.snapshot / name
    path.chmod(0o644)
    spoil_byte(path)
    file = member.snapshot / receipt.NAME
    proved = json.loads(file.read_text())
    proved["files"][name].update(receipt.stamps(path.stat()))
    file.chmod(0o644)
    file.write_text(json.dumps(proved))


def test_a_wrong_shard_of_a_peer_is_not_published(members: list[Member]) -> None:
    end([members[0].start("fetch")])
    members[0].kill()
    spoil(members[0], shard(2))
    shutil.rmtree(members[0].folder / "tables")
    members[0].share()
    before = members[0].hub.sent()
    (said,) = end([members[1].start("fetch")])
    assert f"{shard(2)}: found sha256:" in said and "from other nodes" in said
    members[1].assert_whole()
    assert members[0].hub.sent() - before == SHARD  # that one, and only that
    (said,) = end([members[2].start("fetch")])  # two nodes give it now, by different tables: one of them is right
    members[2].assert_whole()
    assert members[0].hub.sent() - before == SHARD


def test_a_peer_that_sends_other_bytes_than_it_offers_is_found_out_by_the_piece(members: list[Member]) -> None:
    """Bytes that go wrong on a peer's disk after it had offered them right."""
    end([members[0].start("fetch")])
    wait_until(lambda: len(list((members[0].folder / "tables").iterdir())) == len(members[0].manifest.files) - 1)
    assert members[0].sharer is not None
    os.kill(members[0].sharer.pid, signal.SIGSTOP)
    spoil(members[0], shard(2))
    os.kill(members[0].sharer.pid, signal.SIGCONT)
    end([members[1].start("fetch")])
    members[1].assert_whole()
    assert "given to nobody" in members[0].said()


def test_wrong_bytes_that_were_copied_on_their_way_are_not_published(
    members: list[Member], slow_hub: LoopbackHub
) -> None:
    """A byte goes wrong on the disk of the node that fetches, before anybody could have hashed the file."""
    first = members[0].start("fetch")
    coming = members[0].staging / shard(1)
    control = Path(f"{coming}{aria2.CONTROL}")
    wait_until(lambda: control.exists() and aria2.Control.parse(control.read_bytes()).has(0))
    spoil_byte(coming)
    said = end([first, members[1].start("fetch")])
    for member in members[:2]:
        member.assert_whole()
    assert f"{shard(1)}: found sha256:" in said[0] and "fetched again by" in said[0]
    assert f"{shard(1)}: " in said[1] and "copied" in said[1]  # and deleted, or not to its end
    assert slow_hub.sent() <= members[0].manifest.bytes + SHARD


def test_a_damaged_shard_is_mended_with_pieces_from_peers(members: list[Member]) -> None:
    end([member.start("fetch") for member in members[:2]])
    before = members[0].hub.sent()
    path = members[1].snapshot / shard(1)
    path.chmod(0o644)
    with path.open("r+b") as target:
        target.write(b"damage")
    members[0].hub.stop()
    end([members[1].start("fetch")])
    members[1].assert_whole()
    assert members[0].hub.sent() == before
    rows = members[1].said().splitlines()
    assert rows[-1] == f"{shard(1)}.kimi-nodes-pieces: {4 * MIB} bytes from others, {SHARD - 4 * MIB} were here"


def test_a_sharer_that_does_not_answer_leaves_every_node_on_its_own(members: list[Member]) -> None:
    members[1].kill()
    (said,) = end([members[1].start("fetch")])
    assert "no answer" in said and "by itself" in said
    members[1].assert_whole()


def test_strangers_get_nothing(members: list[Member]) -> None:
    """Not even where a firewall is missing: neither lists nor a word of the piece protocol."""
    end([members[0].start("fetch")])
    sharing = json.loads(members[0].sharing.read_text())
    handshake = b"\x13BitTorrent protocol" + bytes(8) + bytes(20) + b"-XX0000-abcdefghijkl"
    question = b"GET /state HTTP/1.1\r\nHost: x\r\n\r\n"
    for port, said in ((sharing["port"], handshake), (sharing["port"] + 1, question)):
        answers = {}
        for source in ("127.88.0.1", members[1].address):
            with socket.create_connection((members[0].address, port), 5, (source, 0)) as connection:
                connection.settimeout(5)
                try:
                    connection.sendall(said)
                    answers[source] = connection.recv(100)
                except ConnectionError:
                    answers[source] = b""
        assert answers["127.88.0.1"] == b""
        if port != sharing["port"]:
            assert answers[members[1].address].startswith(b"HTTP/1.1 200")


def test_a_node_that_comes_later_needs_no_hub(members: list[Member]) -> None:
    end([members[0].start("fetch")])
    members[0].hub.stop()
    end([members[1].start("fetch")])
    members[1].assert_whole()
    members[0].kill()
    end([members[2].start("fetch")])
    members[2].assert_whole()
