"""The node's sharer: gives verified files to the inventory's other nodes and takes pieces from them, by libtorrent.

Runs in the tools' environment as kimi-share.service, and outlives every fetch. Only addresses of the inventory are
talked to: by libtorrent's own filter, by the list server, and below both by the firewall. No DHT, no local discovery,
no port mapping, no tracker, no peer exchange. What the others say decides only where bytes are asked for; whether they
are right is decided by the manifest's digest, in the agent.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import shutil
import socket
import socketserver
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event
from typing import Any

import libtorrent

from . import aria2, disk, manifest, pieces, receipt
from . import configuration as configurations
from .errors import AgentError, Misconfigured, Stopped
from .journal import Journal
from .sharing import AT_ONCE, LINE_BYTES, RUN_BYTES, SILENT, Sharing
from .status import notify

STALL = 30.0  # seconds without a byte, until a transfer is given up
STALL_ALONE = 3.0  # where nobody gives it any more, or all who do were banned for a wrong piece
ANSWER_BYTES = 16 << 20
SETTLING = 10.0  # seconds from the end of an agent until what it brought is certainly seen here, in its last place
CONNECT_EVERY = 2.0
TURN = 0.1

SETTINGS: dict[str, Any] = {
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_incoming_utp": False,
    "enable_outgoing_utp": False,
    "out_enc_policy": 2,  # off: what is sent is public and hashed, and encryption takes a core
    "in_enc_policy": 2,
    "user_agent": "kimi-nodes",
    "min_reconnect_time": 1,
    "peer_connect_timeout": 5,
    "max_failcount": 1000,
    "unchoke_slots_limit": 64,
    "max_out_request_queue": 2000,
    "send_buffer_watermark": 8 << 20,
    "hashing_threads": 2,
    "aio_threads": 8,
    "mixed_mode_algorithm": 0,
    "alert_queue_size": 20000,
}
_FLAGS = libtorrent.torrent_flags
OURS = _FLAGS.disable_dht | _FLAGS.disable_lsd | _FLAGS.disable_pex | _FLAGS.apply_ip_filter | _FLAGS.duplicate_is_error


@dataclass
class Other:
    """What another node said last. heard: None since asking began. repositories: by OWNER/NAME@REVISION. version: of
    what it said."""

    rank: int
    name: str
    address: str
    heard: float | None = None
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    getting: dict[str, str] = field(default_factory=dict)
    progress: dict[str, tuple[int, float]] = field(default_factory=dict)
    version: int = -1

    def hear(self, answer: dict[str, Any], now: float) -> None:
        """Take an answer; raises ValueError or KeyError for one that makes no sense."""
        repositories: dict[str, dict[str, Any]] = {}
        for key, said in answer["repositories"].items():
            have = {str(digest): str(table) for digest, table in said["have"].items()}
            repositories[str(key)] = {"have": have, "soon": list(map(str, said["soon"])), **_said(said)}
        for key, said in repositories.items():
            known = self.progress.get(key)
            if known is None or known[0] != said["done"]:
                self.progress[key] = (said["done"], now)
        self.getting = {str(digest): str(table) for digest, table in answer["getting"].items()}
        self.repositories, self.heard, self.version = repositories, now, int(answer["version"])

    def seen(self, key: str, began: float, now: float) -> dict[str, Any]:
        """As election.Peer takes it."""
        said = self.repositories.get(key, {"have": {}, "soon": [], **SILENT})
        return {
            "name": self.name, "rank": self.rank, "silent": now - (self.heard or began),
            "answered": self.heard is not None, **said, "idle": now - self.progress.get(key, (0, began))[1],
        }  # fmt: skip


def _said(said: dict[str, Any]) -> dict[str, Any]:
    """What an agent says of itself; raises ValueError, KeyError or TypeError for what makes no sense."""
    return {
        "wants": bool(said["wants"]), "claims": bool(said["claims"]), "bytes": int(said["bytes"]),
        "done": int(said["done"]), "partial": list(map(str, said["partial"])),
        "brought": list(map(str, said["brought"])), "verified": int(said["verified"]),
    }  # fmt: skip


@dataclass
class Given:
    """A verified file that others may have."""

    path: str
    bytes: int
    record: dict[str, Any]
    table: str
    handle: Any


class Sharer:
    def __init__(self, sharing: Sharing, stopping: Event):
        self.sharing, self.stopping = sharing, stopping
        self.lock = threading.RLock()
        self.others = [Other(*peer) for peer in sharing.peers]
        self.given: dict[str, Given] = {}
        self.getting: dict[str, str] = {}
        self.soon: set[str] = set()  # verified, and the table is being made
        self.verified: queue.SimpleQueue[tuple[manifest.File, str, dict[str, Any]]] = queue.SimpleQueue()
        self.spoiled: dict[str, dict[str, Any]] = {}  # digest -> record that is no longer true
        self.tables: dict[str, bytes] = {}  # by name
        self.wanted: dict[str, dict[str, str]] = {}  # OWNER/NAME@REVISION -> digests of its manifest
        self.staged: dict[str, tuple[int, list[str]]] = {}  # digest -> bytes, and where the file is while it comes
        self.said: dict[str, dict[str, Any]] = {}  # by the agents of this node
        self.left: dict[str, float] = {}  # digest -> when the agent that had brought its file ended
        self.watchers = 0
        self.began = time.monotonic()
        self.asking = threading.Condition(self.lock)
        self.version = 0  # of what this node says of itself
        self.news = 0  # of what others have said
        self.due = Event()  # something may have been verified
        self.flushed: dict[str, Event] = {}  # by torrent
        self.wrong: dict[str, int] = {}  # pieces that were wrong, by torrent
        self.session = self._session()

    def _session(self) -> Any:
        mask = libtorrent.alert.category_t
        session = libtorrent.session(
            {
                **SETTINGS,
                "listen_interfaces": f"{self.sharing.address}:{self.sharing.port}",
                "outgoing_interfaces": self.sharing.address,
                "alert_mask": int(mask.error_notification | mask.storage_notification),
            }
        )
        allowed = libtorrent.ip_filter()
        allowed.add_rule("0.0.0.0", "255.255.255.255", 1)
        allowed.add_rule("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 1)
        for other in self.others:
            allowed.add_rule(other.address, other.address, 0)
        session.set_ip_filter(allowed)
        return session

    def run(self) -> None:
        """Until told to stop. Raises Misconfigured where it cannot listen."""
        os.makedirs(self.sharing.tables, exist_ok=True)
        disk.forget(self.sharing.socket)
        try:
            lists = Lists(self)
            agents = Agents(self)
        except OSError as error:
            raise Misconfigured(
                f"cannot listen on {self.sharing.address}:{self.sharing.port + 1} ({error.strerror}), wanted this "
                "node's address among the others. Fix: set weights_address of this host in the inventory"
            ) from None
        os.chmod(self.sharing.socket, 0o600)
        for name, work in (("lists", lists.serve_forever), ("agents", agents.serve_forever), ("scan", self._scan)):
            threading.Thread(target=work, daemon=True, name=name).start()
        threading.Thread(target=self._make, daemon=True, name="tables").start()
        for other in self.others:
            threading.Thread(target=self._ask, args=(other,), daemon=True, name=f"ask-{other.name}").start()
        notify("READY=1")
        while not self.stopping.wait(TURN):
            self._alerts()
            if not self.session.is_listening():
                raise Misconfigured(
                    f"cannot listen on {self.sharing.address}:{self.sharing.port}, wanted this node's address among "
                    "the others. Fix: set weights_address of this host, or a free weights_port"
                )
        lists.shutdown()
        agents.shutdown()
        disk.forget(self.sharing.socket)

    def _alerts(self) -> None:
        for alert in self.session.pop_alerts():
            if isinstance(alert, libtorrent.cache_flushed_alert):
                if flushed := self.flushed.get(str(alert.handle.info_hash())):
                    flushed.set()
            elif isinstance(alert, libtorrent.hash_failed_alert):
                key = str(alert.handle.info_hash())
                self.wrong[key] = self.wrong.get(key, 0) + 1
                print(alert.message(), file=sys.stderr, flush=True)
            elif isinstance(alert, libtorrent.file_error_alert):
                print(alert.message(), file=sys.stderr, flush=True)

    # What this node gives.

    def _scan(self) -> None:
        while not self.stopping.is_set():
            self.due.wait(self.sharing.poll / 2)
            self.due.clear()
            try:
                self._look()
            except (OSError, ValueError, AgentError) as error:
                print(f"cannot look at the weights: {error}", file=sys.stderr, flush=True)
            except RuntimeError as error:  # libtorrent's
                print(f"libtorrent: {error}", file=sys.stderr, flush=True)

    def _look(self) -> None:
        """Give what has been verified since, and no more what is not so any longer."""
        for digest, given in list(self.given.items()):
            status = given.handle.status()
            # libtorrent hashes what it reads before it sends it for the first time.
            spoiled = status.errc.value() or status.state == libtorrent.torrent_status.downloading
            if spoiled:
                self.spoiled[digest] = given.record
                print(
                    f"{given.path}: is not what it was when it was verified, and is given to nobody. "
                    "Fix: weights_agent.py verify --deep, then repair, on this node",
                    file=sys.stderr,
                    flush=True,
                )
            if spoiled or receipt.unlike(given.path, given.record):
                with self.lock:
                    del self.given[digest]
                self.session.remove_torrent(given.handle)
                self.tell()
        verified: list[tuple[manifest.File, str, dict[str, Any]]] = []
        for path in self.sharing.weights:
            configuration = configurations.load(path)
            wanted = manifest.load(configuration.manifest)
            key = f"{wanted.repository}@{wanted.revision}"
            stagings = (configuration.staging, f"{configuration.staging}.repair")
            with self.lock:
                self.wanted[key] = {file.digest: file.path for file in wanted.files}
                for file in wanted.files:
                    staged = [os.path.join(staging, file.path) for staging in stagings]
                    self.staged[file.digest] = (file.bytes, staged)
            places: list[tuple[str, dict[str, dict[str, Any]]]] = []
            for staging in stagings:
                if os.path.isdir(staging):
                    places.append((staging, Journal(staging).all()))
            if proved := receipt.read(configuration.snapshot):
                places.append((configuration.snapshot, proved["files"]))
            for file in wanted.files:
                if not file.bytes or file.digest in self.given:
                    continue
                for folder, records in places:
                    record = records.get(file.path)
                    where = os.path.join(folder, file.path)
                    if not record or record.get("digest") != file.digest or record == self.spoiled.get(file.digest):
                        continue
                    if not receipt.unlike(where, record):
                        verified.append((file, where, record))
                        break
        for file, where, record in verified:
            with self.lock:
                known = file.digest in self.soon
                self.soon.add(file.digest)
            if not known:
                self.verified.put((file, where, record))
                self.tell()

    def _make(self) -> None:
        """Tables of what has been verified, one after the other, while the scan goes on."""
        while True:
            file, where, record = self.verified.get()
            try:
                self._give(file, where, record)
            except (OSError, ValueError) as error:
                print(f"{where}: cannot be given to others: {error}", file=sys.stderr, flush=True)
            except RuntimeError as error:  # libtorrent's
                print(f"{where}: libtorrent: {error}", file=sys.stderr, flush=True)
            with self.lock:
                self.soon.discard(file.digest)
            self.tell()

    def _give(self, file: manifest.File, path: str, record: dict[str, Any]) -> None:
        kept = os.path.join(self.sharing.tables, file.digest.replace(":", "-"))
        table = b""
        with contextlib.suppress(OSError), open(kept, "rb") as source:
            table = source.read()
        if len(table) != pieces.DIGEST * pieces.count(file.bytes):
            try:
                table = pieces.table(path, file.bytes, self.stopping)
            except Stopped:
                return
            if receipt.unlike(path, record):
                return
            with open(kept + ".new", "wb") as target:
                target.write(table)
            os.rename(kept + ".new", kept)
        name = pieces.name(table)
        handle = self._add(file.digest, file.bytes, table, path, seed=True)
        with self.lock:
            self.tables[name] = table
            self.given[file.digest] = Given(path, file.bytes, record, name, handle)

    def _add(self, digest: str, size: int, table: bytes, path: str, seed: bool, peers: Any = ()) -> Any:
        """A torrent of one file that lies at a path, or will. Raises RuntimeError (libtorrent's), ValueError."""
        information = libtorrent.torrent_info(
            libtorrent.bdecode(pieces.torrent(digest, size, table, libtorrent.bencode))
        )
        wanted = libtorrent.add_torrent_params()
        wanted.ti = information
        wanted.save_path, name = os.path.split(path)
        wanted.renamed_files = {0: name}
        wanted.flags = OURS | (_FLAGS.seed_mode if seed else 0)
        wanted.peers = list(peers)
        return self.session.add_torrent(wanted)

    # What the others have.

    def _ask(self, other: Other) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self.stopping.is_set():
            with self.asking:
                while not self.watchers:
                    self.asking.wait()
            try:
                if connection is None:
                    connection = self._connection(other)
                connection.request("GET", f"/state?not={other.version}")
                answer = json.loads(_body(connection.getresponse()))
                with self.asking:
                    before, first = other.version, other.heard is None
                    other.hear(answer, time.monotonic())
                    if first or before != other.version:
                        self.news += 1
                        self.asking.notify_all()
                self.stopping.wait(self.sharing.poll / 20)  # the answer itself was waited for
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError):
                if connection is not None:
                    connection.close()
                    connection = None
                self.stopping.wait(self.sharing.poll)

    def _connection(self, other: Other) -> http.client.HTTPConnection:
        own = (self.sharing.address, 0)
        return http.client.HTTPConnection(other.address, self.sharing.port + 1, timeout=5, source_address=own)

    def watching(self, count: int) -> None:
        with self.asking:
            if not self.watchers and count > 0:
                self.began = time.monotonic()
                for other in self.others:
                    other.heard, other.version = None, -1
                    other.progress.clear()
                self.asking.notify_all()
            self.watchers += count

    def tell(self) -> None:
        """What this node says of itself has changed: others that wait for it are answered now."""
        with self.asking:
            self.version += 1
            self.asking.notify_all()

    def await_change(self, version: int) -> None:
        """Until this node says something else than by that version, or for a while."""
        with self.asking:
            self.asking.wait_for(lambda: self.version != version, self.sharing.poll)

    def await_news(self, news: int) -> None:
        """Until another node has said something else, or for a while."""
        with self.asking:
            self.asking.wait_for(lambda: self.news != news, self.sharing.poll)

    def view(self, key: str) -> list[dict[str, Any]]:
        now = time.monotonic()
        with self.lock:
            return [other.seen(key, self.began, now) for other in self.others]

    def state(self) -> dict[str, Any]:
        """What this node says of itself to others."""
        with self.lock:
            repositories = {}
            for key, digests in self.wanted.items():
                have = {digest: self.given[digest].table for digest in digests if digest in self.given}
                held = sum(self.given[digest].bytes for digest in have)
                said = self.said.get(key, {**SILENT, "bytes": held, "done": held})
                soon = [digest for digest in digests if self._is_soon(digest)]
                ungiven = [one for one in said["brought"] if one not in self.given and one not in self.spoiled]
                repositories[key] = {"have": have, "soon": soon, **said, "brought": ungiven}
            return {
                "name": self.sharing.name, "version": self.version, "repositories": repositories,
                "getting": dict(self.getting),
            }  # fmt: skip

    def _is_soon(self, digest: str) -> bool:
        """Whether a file will be given that is not given yet."""
        if digest in self.given or digest in self.spoiled:
            return False
        return digest in self.soon or time.monotonic() - self.left.get(digest, -SETTLING) < SETTLING

    def partial(self, digest: str) -> dict[str, Any] | None:
        """What there is of a file that an agent here brings from the hub: {"whole", "pieces": bits as hex}."""
        with self.lock:
            size, places = self.staged.get(digest, (0, []))
            coming = any(digest in said["partial"] for said in self.said.values())
            brought = any(digest in said["brought"] for said in self.said.values()) or self._is_soon(digest)
            given = self.given.get(digest)
        if given or brought:
            bits = aria2.Control.nothing(size).bits
            return {"whole": True, "pieces": (b"\xff" * len(bits)).hex()}
        for place in places if coming else ():
            with contextlib.suppress(OSError, ValueError), open(place + aria2.CONTROL, "rb") as source:
                control = aria2.Control.parse(source.read())
                if control.total == size:
                    return {"whole": False, "pieces": control.bits.hex()}
        return {"whole": False, "pieces": aria2.Control.nothing(size).bits.hex()} if coming else None

    def part(self, digest: str, start: int, end: int) -> bytes | None:
        """Bytes of such a file."""
        with self.lock:
            size, places = self.staged.get(digest, (0, []))
            given = self.given.get(digest)
        if not 0 <= start < end <= min(size, start + RUN_BYTES):
            return None
        for place in [*places, *([given.path] if given else [])]:
            with contextlib.suppress(OSError), open(place, "rb", buffering=0) as source:
                content = os.pread(source.fileno(), end - start, start)
                if len(content) == end - start:
                    return content
        return None

    def _sources(self, digest: str, table: str) -> list[tuple[str, int]]:
        """Nodes that have or get a file by this table, and still answer."""
        now = time.monotonic()
        with self.lock:
            found = []
            for other in self.others:
                if now - (other.heard or 0.0) > self.sharing.silence:
                    continue
                has = any(said["have"].get(digest) == table for said in other.repositories.values())
                if has or other.getting.get(digest) == table:
                    found.append((other.address, self.sharing.port))
            return found

    def _table(self, digest: str, size: int, name: str) -> bytes:
        """A table of pieces from whoever has it. Raises LookupError."""
        with self.lock:
            if name in self.tables:
                return self.tables[name]
            having = [
                other
                for other in self.others
                if any(said["have"].get(digest) == name for said in other.repositories.values())
            ]
        for other in having:
            connection = self._connection(other)
            try:
                connection.request("GET", f"/pieces/{name}")
                table = _body(connection.getresponse())
            except (OSError, http.client.HTTPException, ValueError):
                continue
            finally:
                connection.close()
            if pieces.name(table) == name and len(table) == pieces.DIGEST * pieces.count(size):
                return table
        raise LookupError("nobody gives the table of its pieces")

    # What this node takes.

    def get(self, asked: dict[str, Any], say: Any) -> None:
        """Bring one file, telling how far it is. Raises OSError where the agent is gone."""
        digest, size, name = str(asked["digest"]), int(asked["bytes"]), str(asked["table"])
        target = str(asked["target"])
        with self.lock:
            own = self.given.get(digest)
            busy = digest in self.getting
            if not own and not busy:
                self.getting[digest] = name
                self.tell()
        if own:
            shutil.copyfile(own.path, target)
            say({"complete": True})
            return
        if busy:
            say({"failed": "it is on its way already"})
            return
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            table = self._table(digest, size, name)
            handle = self._add(digest, size, table, target, seed=False, peers=self._sources(digest, name))
            try:
                self._bring(handle, digest, name, os.path.basename(target), say)
            finally:
                self.session.remove_torrent(handle)
            say({"complete": True})
        except (LookupError, ValueError, RuntimeError, TimeoutError) as error:
            say({"failed": str(error)})
        finally:
            with self.lock:
                self.getting.pop(digest, None)
            self.tell()

    def _bring(self, handle: Any, digest: str, name: str, shown: str, say: Any) -> None:
        """Raises TimeoutError where nothing moves, RuntimeError for an error of libtorrent's or of the disk."""
        key = str(handle.info_hash())
        self.wrong.pop(key, None)
        done, moved, connected, told = -1, time.monotonic(), 0.0, 0.0
        checking = (libtorrent.torrent_status.checking_files, libtorrent.torrent_status.checking_resume_data)
        while not self.stopping.wait(TURN):
            status, now = handle.status(), time.monotonic()
            if status.errc.value():
                raise RuntimeError(status.errc.message())
            if status.state in checking:
                moved = now
                continue
            if status.total_done != done:
                done, moved = status.total_done, now
            if now - told > 0.5 or status.is_seeding:
                told = now
                say({"done": done})
            if status.is_seeding:
                came, size = status.total_payload_download, status.total_wanted
                print(f"{shown}: {came} bytes from others, {max(0, size - came)} were here", flush=True)
                break
            sources = self._sources(digest, name)
            if now - connected > CONNECT_EVERY:
                connected = now
                for source in sources:
                    handle.connect_peer(source)
            wrong = self.wrong.get(key, 0)
            if now - moved > (STALL_ALONE if wrong or not sources else STALL):
                raise TimeoutError(f"no byte for {now - moved:.0f} s, {wrong} pieces were wrong")
        else:
            raise TimeoutError("the sharer is being stopped")
        self.flushed[key] = flushed = Event()
        handle.flush_cache()
        if not flushed.wait(120):
            raise TimeoutError("the disk takes no bytes")
        del self.flushed[key]


def _body(answer: http.client.HTTPResponse) -> bytes:
    """Raises ValueError for anything but 200 and a body of modest size."""
    body = answer.read(ANSWER_BYTES)
    if answer.status != 200 or not answer.isclosed():
        raise ValueError(f"answers {answer.status}")
    return body


class Lists(ThreadingHTTPServer):
    """For addresses of the inventory: GET /state, with ?not=VERSION only when it is another; GET /pieces/NAME; of files
    on their way GET /partial/DIGEST and GET /partial/DIGEST/START-END."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, sharer: Sharer):
        self.sharer = sharer
        self.allowed = {other.address for other in sharer.others}
        super().__init__((sharer.sharing.address, sharer.sharing.port + 1), Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return client_address[0] in self.allowed

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A node that went away is its own affair."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    server: Lists

    def log_message(self, format: str, *arguments: object) -> None:
        """Questions come once a second from each node."""

    def do_GET(self) -> None:
        sharer = self.server.sharer
        body: bytes | None = None
        if found := re.fullmatch(r"/state(?:\?not=(-?\d+))?", self.path):
            if found[1]:
                sharer.await_change(int(found[1]))
            body = json.dumps(sharer.state()).encode()
        elif found := re.fullmatch(r"/partial/(sha256-[0-9a-f]{64}|git-sha1-[0-9a-f]{40})(?:/(\d+)-(\d+))?", self.path):
            digest = found[1].replace("sha256-", "sha256:").replace("sha1-", "sha1:")
            if found[2]:
                body = sharer.part(digest, int(found[2]), int(found[3]))
            elif (partial := sharer.partial(digest)) is not None:
                body = json.dumps(partial).encode()
        elif found := re.fullmatch(r"/pieces/([0-9a-f]{32})", self.path):
            with sharer.lock:
                body = sharer.tables.get(found[1])
        self.send_response(200 if body is not None else 404)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")


class Agents(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """The socket of this node's agents; see sharing.py."""

    daemon_threads = True

    def __init__(self, sharer: Sharer):
        self.sharer = sharer
        super().__init__(sharer.sharing.socket, AgentHandler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """An agent that went away is its own affair."""


class AgentHandler(socketserver.StreamRequestHandler):
    server: Agents

    def say(self, said: Any) -> None:
        self.request.sendall(json.dumps(said).encode() + b"\n")

    def handle(self) -> None:
        asked = json.loads(self.rfile.readline(LINE_BYTES))
        if "get" in asked:
            self.server.sharer.get(asked["get"], self.say)
        elif "watch" in asked:
            self.watch(str(asked["watch"]))

    def watch(self, key: str) -> None:
        sharer = self.server.sharer
        hearing = threading.Thread(target=self.hear, args=(key,), daemon=True)
        sharer.watching(1)
        try:
            hearing.start()
            while hearing.is_alive() and not sharer.stopping.wait(sharer.sharing.poll / 10):
                news = sharer.news
                self.say({"peers": sharer.view(key)})
                sharer.await_news(news)
        finally:
            sharer.watching(-1)

    def hear(self, key: str) -> None:
        sharer = self.server.sharer
        try:
            while line := self.rfile.readline(LINE_BYTES):
                said = _said(json.loads(line))
                with sharer.lock:
                    before = sharer.said.get(key, SILENT)
                    sharer.said[key] = said
                if said["verified"] != before["verified"]:
                    sharer.due.set()
                if any(before[name] != said[name] for name in AT_ONCE):
                    sharer.tell()
        except (OSError, ValueError, KeyError, TypeError):
            pass
        finally:
            with sharer.lock:
                last = sharer.said.pop(key, SILENT)
                sharer.left.update(dict.fromkeys(last["brought"], time.monotonic()))
            sharer.due.set()
            sharer.tell()
            with contextlib.suppress(OSError):
                self.request.shutdown(socket.SHUT_RDWR)
