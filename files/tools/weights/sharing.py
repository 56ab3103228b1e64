"""Weights between nodes, as the role tells of it, and the talk between the agent and the node's own sharer.

The sharer (share.py) is one process a node that outlives every fetch. On its socket, a line of JSON each:

    {"watch": "OWNER/NAME@REVISION"}    then, whenever it changes, what this agent says of itself (see election.Peer);
                                        answered by {"peers": [...]}, about once a second and when something is new
    {"get": {"digest", "bytes", "table", "target"}}    answered by {"done": bytes}... and {"complete": true} or
                                                       {"failed": why}
What a connection asked for ends with the connection.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from . import aria2, disk, election
from .election import Peer, Times
from .errors import Misconfigured, Stopped
from .manifest import File

LINE_BYTES = 16 << 20
RUN_BYTES = 16 << 20  # that are asked for at once of a file that is followed
FOLLOW_SECONDS = 0.3  # between two looks at what has come there
SILENT: dict[str, Any] = {
    "wants": False, "claims": False, "bytes": 0, "done": 0, "partial": [], "brought": [],
    "verified": 0,
}  # fmt: skip
"""What an agent says that has not said anything. verified: how many files it has found right in this run."""
AT_ONCE = ("wants", "claims", "partial", "brought", "verified")  # what of it others are told when it changes


@dataclass(frozen=True)
class Sharing:
    """What the role lays in /etc/kimi-nodes/sharing.json.

    name: this node's, one of `members`: (name, IP address) of every node, in the inventory's order. port: of pieces
    (libtorrent), and the next one of lists (http). socket: for agents of this node. tables: the folder where tables of
    pieces are kept. weights: paths of the configurations whose files are shared. poll, silence, settle, stuck,
    takeover: seconds; see election.Times.
    """

    name: str
    port: int
    members: list[list[str]]
    socket: str
    tables: str
    weights: list[str]
    poll: float
    silence: float
    settle: float
    stuck: float
    takeover: float

    @property
    def rank(self) -> int:
        return [name for name, _ in self.members].index(self.name)

    @property
    def address(self) -> str:
        return self.members[self.rank][1]

    @property
    def peers(self) -> list[tuple[int, str, str]]:
        """(rank, name, address) of the others."""
        return [(rank, name, at) for rank, (name, at) in enumerate(self.members) if name != self.name]

    @property
    def times(self) -> Times:
        return Times(self.silence, self.settle, self.stuck, self.takeover)


def load(path: str) -> Sharing:
    """Raises Misconfigured."""
    try:
        with open(path, encoding="utf-8") as source:
            data = json.load(source)
        if not isinstance(data, dict) or set(data) != {field.name for field in fields(Sharing)}:
            raise ValueError("found other keys")
        sharing = Sharing(**data)
        sharing.rank  # noqa: B018  a name that is none of the members'
    except OSError as error:
        raise Misconfigured(f"configuration {path}: {error.strerror}. Fix: run deploy.py again") from None
    except (ValueError, TypeError) as error:
        raise Misconfigured(f"configuration {path}: {error}. Fix: run deploy.py again") from None
    return sharing


class Unshared(Exception):
    """Peers brought nothing; the text says why."""


class Alone:
    """One node by itself: everything comes from the hub, which is tried before anything is made ready for it."""

    has_peers = False
    hub_allowed = True
    moved = 0

    def start(self) -> None:
        """Nothing to watch."""

    def stop(self) -> None:
        """Nothing to end."""

    def offer(self, file: File) -> str | None:
        """The table of pieces by which others give a file; None where nobody has it."""
        return None

    def coming(self, file: File) -> bool:
        """Whether another node has the file and is about to give it."""
        return False

    def refuse(self, file: File, table: str) -> None:
        """What came by that table was wrong."""

    def follows(self, file: File) -> bool:
        """Whether this node is to copy the file while another one fetches it."""
        return False

    def distrust(self, file: File) -> None:
        """What was copied of it was wrong: it is not followed again."""

    def say(
        self,
        needs_hub: bool,
        has_bytes: int,
        done: int,
        partial: Sequence[str] = (),
        brought: Sequence[str] = (),
        verified: int = 0,
    ) -> None:
        """Tell the others; see election.Peer and SILENT."""

    def download(
        self, file: File, table: str, target: str, moved: Callable[[int], None], stopping: threading.Event
    ) -> None:
        """Bring a file from peers into `target`, going on with what is there. Raises Unshared and Stopped."""
        raise Unshared("there are no peers")

    def follow(self, file: File, target: str, moved: Callable[[int], None], stopping: threading.Event) -> None:
        """Copy a file from the node that fetches it into `target`, as it comes. Raises Unshared and Stopped.

        `target` and its control file are then what aria2 would have left, had it been stopped at this point.
        """
        raise Unshared("there are no peers")


class Company(Alone):
    """One repository among the nodes that share it.

    hub_allowed: this node is the one that fetches from the hub, or the sharer does not answer and every node is on its
    own. moved: counts up whenever the node that fetches goes on.
    """

    has_peers = True

    def __init__(self, sharing: Sharing, repository: str, revision: str, tell: Callable[[str], None]):
        self._sharing, self._key, self._tell = sharing, f"{repository}@{revision}", tell
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._peers: list[Peer] = []
        self._seen = False  # what the peers have has been told at least once
        self._refused: set[tuple[str, str]] = set()
        self._distrusted: set[str] = set()
        self._said = dict(SILENT)
        self._news = threading.Event()  # what is said now should be told at once
        self._heard = time.monotonic()  # the sharer, last
        self._claimed: float | None = None
        self._unclaimed = time.monotonic()
        self._on_our_own = False
        self.hub_allowed = False
        self.moved = 0

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="company").start()

    def stop(self) -> None:
        self._ended.set()

    def offer(self, file: File) -> str | None:
        with self._lock:
            tables = Counter(
                peer.have[file.digest]
                for peer in self._peers
                if file.digest in peer.have and election.alive(peer, self._sharing.times)
            )
        fit = [(-number, table) for table, number in tables.items() if (file.digest, table) not in self._refused]
        return min(fit)[1] if fit else None

    def coming(self, file: File) -> bool:
        with self._lock:
            present = [peer for peer in self._peers if election.alive(peer, self._sharing.times)]
        return any(file.digest in (*peer.soon, *peer.brought) for peer in present)

    def refuse(self, file: File, table: str) -> None:
        self._refused.add((file.digest, table))

    def follows(self, file: File) -> bool:
        with self._lock:
            peer = election.leader(self._sharing.rank, self._peers, self._sharing.times)
        return (
            peer is not None
            and file.digest in peer.partial
            and file.digest not in self._distrusted
            and self._claimed is None
            and not self._on_our_own
        )

    def distrust(self, file: File) -> None:
        self._distrusted.add(file.digest)

    def say(
        self,
        needs_hub: bool,
        has_bytes: int,
        done: int,
        partial: Sequence[str] = (),
        brought: Sequence[str] = (),
        verified: int = 0,
    ) -> None:
        """Tell the others, and decide whether this node may fetch from the hub."""
        now = time.monotonic()
        times = self._sharing.times
        with self._lock:
            peers, seen, silent = self._peers, self._seen, now - self._heard
            if silent > times.silence:
                if not self._on_our_own:
                    self._tell(f"{self._sharing.socket}: no answer for {silent:.0f} s, so this node fetches by itself")
                self._on_our_own = self.hub_allowed = True
            else:
                self._on_our_own = False
                claiming = self._claimed is not None
                present = [peer for peer in peers if election.alive(peer, times)]
                if claiming or not needs_hub or any(peer.claims and peer.idle < times.stuck for peer in present):
                    self._unclaimed = now
                if not seen or not needs_hub:
                    wanted = claiming and needs_hub
                else:
                    unclaimed = now - self._unclaimed
                    wanted = election.claim(self._sharing.rank, claiming, has_bytes, peers, unclaimed, times)
                if wanted != claiming:
                    self._claimed = now if wanted else None
                allowed = self._claimed is not None and now - self._claimed >= times.settle
                if allowed != self.hub_allowed:
                    self._tell(f"this node fetches from the hub {'for all' if allowed else 'no more'}")
                self.hub_allowed = allowed
            claims = self._claimed is not None or self._on_our_own
            before, self._said = self._said, {
                "wants": needs_hub, "claims": claims, "bytes": has_bytes, "done": done,
                "partial": list(partial), "brought": list(brought), "verified": verified,
            }  # fmt: skip
            if any(before[name] != self._said[name] for name in AT_ONCE):
                self._news.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self._watch()
            self._ended.wait(self._sharing.poll / 2)

    def _watch(self) -> None:
        with _connected(self._sharing.socket, 4 * self._sharing.poll + 2) as (lines, send):
            send({"watch": self._key})
            told: dict[str, Any] = {}
            speaking = threading.Thread(target=self._speak, args=(send, told), daemon=True, name="company-says")
            speaking.start()
            try:
                for line in lines:
                    peers = [Peer(**peer) for peer in json.loads(line)["peers"]]
                    with self._lock:
                        before = {peer.name: peer for peer in self._peers}
                        for peer in peers:
                            known = before.get(peer.name)
                            if peer.claims and (known is None or peer.done != known.done):
                                self.moved += 1
                        self._peers, self._seen, self._heard = peers, True, time.monotonic()
                    if self._ended.is_set():
                        return
            finally:
                told["ended"] = True

    def _speak(self, send: Callable[[Any], None], told: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            while not self._ended.is_set() and "ended" not in told:
                with self._lock:
                    said = dict(self._said)
                if told.get("said") != said:
                    send(said)
                    told["said"] = said
                self._news.wait(self._sharing.poll / 5)
                self._news.clear()

    def download(
        self, file: File, table: str, target: str, moved: Callable[[int], None], stopping: threading.Event
    ) -> None:
        asked = {"digest": file.digest, "bytes": file.bytes, "table": table, "target": target}
        try:
            with _connected(self._sharing.socket, 30) as (lines, send):
                send({"get": asked})
                before: int | None = None
                for line in lines:
                    if stopping.is_set():
                        raise Stopped("stopped while fetching from peers")
                    answer = json.loads(line)
                    if answer.get("complete"):
                        return
                    if "failed" in answer:
                        raise Unshared(str(answer["failed"]))
                    done = int(answer["done"])
                    if before is not None and done > before:
                        moved(done - before)
                    before = done
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unshared(f"the sharer does not answer ({error})") from None
        raise Unshared("the sharer ended")

    def follow(self, file: File, target: str, moved: Callable[[int], None], stopping: threading.Event) -> None:
        with self._lock:
            peer = election.leader(self._sharing.rank, self._peers, self._sharing.times)
        address = next((at for _, name, at in self._sharing.peers if peer and name == peer.name), None)
        if address is None:
            raise Unshared("nobody fetches it")
        connection = http.client.HTTPConnection(
            address,
            self._sharing.port + 1,
            timeout=self._sharing.silence / 2,
            source_address=(self._sharing.address, 0),
        )
        path = f"/partial/{file.digest.replace(':', '-')}"
        here = aria2.begun(target, file.bytes)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)

        def save() -> None:
            os.fdatasync(descriptor)  # as aria2 does: the control file never says more than the disk has
            disk.write_bytes(target + aria2.CONTROL, here.content(), durable=False)

        try:
            while True:
                whole, there = _told(_asked(connection, path), file.bytes)
                before = bytes(here.bits)
                try:
                    for start, end in _runs(here, there):
                        content = _asked(connection, f"{path}/{start}-{end}")
                        if len(content) != end - start:
                            raise ValueError(f"{len(content)} bytes instead of {end - start}")
                        os.pwrite(descriptor, content, start)
                        for piece in range(start // here.piece, -(-end // here.piece)):
                            here.add(piece)
                        moved(len(content))
                        if stopping.is_set():
                            raise Stopped("stopped while following another node")
                finally:
                    if here.bits != before:
                        save()
                if whole and here.done == file.bytes:
                    disk.forget(target + aria2.CONTROL)
                    return
                if here.bits == before and stopping.wait(FOLLOW_SECONDS):
                    raise Stopped("stopped while following another node")
        except (http.client.HTTPException, OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, OSError) and (error.filename is not None or disk.full(error)):
                raise
            raise Unshared(f"{address} brings it no more: {error}") from None
        finally:
            os.close(descriptor)
            connection.close()


def _told(answer: bytes, total: int) -> tuple[bool, aria2.Control]:
    """Whether all of a file is there, and which pieces of it. Raises ValueError, KeyError or TypeError."""
    told = json.loads(answer)
    there = aria2.Control.nothing(total)
    bits = bytes.fromhex(told["pieces"])
    if len(bits) != len(there.bits):
        raise ValueError(f"{len(bits)} bytes of bits, wanted {len(there.bits)}")
    there.bits[:] = bits
    return bool(told["whole"]), there


def _runs(here: aria2.Control, there: aria2.Control) -> Iterator[tuple[int, int]]:
    """(start, end) of what is there and not here, in runs of at most RUN_BYTES."""
    start = end = 0
    for piece in range(aria2.pieces(there.total)):
        if there.has(piece) and not here.has(piece):
            at = piece * there.piece
            if end != at or end - start >= RUN_BYTES:
                if end > start:
                    yield start, end
                start = at
            end = at + there.length(piece)
    if end > start:
        yield start, end


def _asked(connection: http.client.HTTPConnection, path: str) -> bytes:
    """Raises ValueError for anything but 200."""
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read(RUN_BYTES + 1)
    if answer.status != 200 or not answer.isclosed():
        raise ValueError(f"answers {answer.status}")
    return body


@contextlib.contextmanager
def _connected(path: str, timeout: float) -> Iterator[tuple[Iterator[str], Callable[[Any], None]]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        connection.connect(path)
        with connection.makefile("r", encoding="utf-8") as source:

            def lines() -> Iterator[str]:
                while line := source.readline(LINE_BYTES):
                    yield line

            yield lines(), lambda said: connection.sendall(json.dumps(said).encode() + b"\n")
