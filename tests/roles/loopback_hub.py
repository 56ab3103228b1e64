"""The lab's hub stand-in on loopback, over plain http, for programs under test; nothing of it outlives its `with`.

The hub is http://127.0.0.1:PORT; signed addresses lead to http://localhost:PORT, another host to every client. To who
takes it for a proxy it is also http://BEHIND, a name that nobody can resolve.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.lab.hub import CDN, FRONT, Answer, Hub
from tests.lab.services import Handler

BEHIND = "hub.site.invalid"
Override = Callable[[str, str, str], Answer | None]


class LoopbackHub:
    """folder: of <owner>/<name>/<files>. `control(...)` sets what the stand-in's control file says."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.folder, self.state = folder, state
        self.hub = Hub([folder], state / "hub.json")
        self.requests: list[dict[str, Any]] = []
        self.bytes: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.override: Override = lambda host, method, path: None
        self.server: Server | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.server = Server(("127.0.0.1", self.port), self)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """The hub is gone: connections are refused, and those that were open are ended."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server.hang_up()
            self.server = None

    def control(self, **values: Any) -> None:
        """token, signed_s, rate, faults; written so that the change is always seen."""
        path = self.state / "hub.json"
        path.write_text(json.dumps(values))
        os.utime(path, ns=(0, self.hub.faults.stamp + 1_000_000_000))

    def sent(self, suffix: str = "") -> int:
        """Bytes of bodies that went out for paths that end so, those of broken connections included."""
        with self.lock:
            return sum(count for path, count in self.bytes.items() if path.endswith(suffix))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], owner: LoopbackHub) -> None:
        self.owner, self.hub, self.open_connections = owner, Adapter(owner), set[Any]()
        super().__init__(address, LoopbackHandler)

    def get_request(self) -> Any:
        connection, peer = super().get_request()
        # Small, so that what counts as sent has nearly arrived.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        self.open_connections.add(connection)
        return connection, peer

    def shutdown_request(self, request: Any) -> None:
        self.open_connections.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        for connection in list(self.open_connections):
            with contextlib.suppress(OSError):
                connection.shutdown(2)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is its own affair."""

    def note(self, record: dict[str, Any]) -> None:
        with self.owner.lock:
            self.owner.requests.append(record)


class Adapter:
    """Gives the hub the names it knows, and its answers the addresses that lead here."""

    def __init__(self, owner: LoopbackHub) -> None:
        self.owner = owner

    def answer(self, host: str, method: str, target: str, headers: Any, body: bytes) -> Answer:
        overridden = self.owner.override(host, method, target)
        answer = overridden or self.owner.hub.answer(host, method, target, headers, body)
        if location := answer.headers.get("Location"):
            answer.headers["Location"] = location.replace(f"https://{CDN}", f"http://localhost:{self.owner.port}")
        return answer


class LoopbackHandler(Handler):
    server: Server  # type: ignore[assignment]
    body = False

    def setup(self) -> None:
        super().setup()
        self.wfile = Counted(self.wfile, self)  # type: ignore[assignment]

    def start(self, code: int, headers: dict[str, str], length: int) -> None:
        self.body = False
        super().start(code, headers, length)
        self.body = True

    def answer(self, body: bytes) -> None:
        asked = (self.headers.get("Host") or "").split(":")[0]
        self.headers.replace_header("Host", {"127.0.0.1": FRONT, BEHIND: FRONT, "localhost": CDN}.get(asked, asked))
        super().answer(body)


class Counted:
    """A connection's output that counts the bytes of bodies."""

    def __init__(self, output: Any, handler: LoopbackHandler) -> None:
        self.output, self.handler, self.closed = output, handler, False

    def write(self, data: Any) -> int:
        owner = self.handler.server.owner
        for start in range(0, len(data), 1 << 16):
            piece = bytes(data[start : start + (1 << 16)])
            self.output.write(piece)
            if self.handler.body:
                with owner.lock:
                    owner.bytes[unquote(urlsplit(self.handler.path).path)] += len(piece)
        return len(data)

    def flush(self) -> None:
        self.output.flush()

    def close(self) -> None:
        self.output.close()
        self.closed = True


@contextlib.contextmanager
def loopback_hub(folder: Path, state: Path) -> Iterator[LoopbackHub]:
    hub = LoopbackHub(folder, state)
    hub.start()
    try:
        yield hub
    finally:
        hub.stop()
