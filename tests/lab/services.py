"""The lab's https services: one listener, the name asked for decides who answers. Runs in the lab's services namespace.

    python3 -m tests.lab.services ADDRESS CERTIFICATE_FOLDER REPOSITORY_FOLDER HUB_FOLDER STATE_FOLDER

Every request is a line of JSON in STATE_FOLDER/requests.jsonl: time, host, method, path, code, bytes sent, range, and
whether an Authorization header came (never its value).
"""

from __future__ import annotations

import json
import mimetypes
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.lab import certificates, cgroup, hub, network, nvidia_repository
from tests.lab.hub import Answer, Faults, Hub
from tests.lab.settings import CHECKOUT, SERVED_NAMES, Lab
from tests.lab.shell import LabError, key_of

MEMBER = "services"
BLOCK = 1 << 20


class Server(ThreadingHTTPServer):
    """TLS with the handshake in the request's own thread, so that one slow client holds up nobody."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str, port: int, certificate: Path, repository: Path, hub: Hub, log: Path) -> None:
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(certificate / "service.crt", certificate / "service.key")
        self.repository, self.hub, self.log, self.log_lock = repository, hub, log, threading.Lock()
        super().__init__((address, port), Handler)

    def get_request(self) -> tuple[socket.socket, object]:
        connection, peer = super().get_request()
        wrapped = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        wrapped.settimeout(600)
        return wrapped, peer

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is its own affair; the log of requests tells what was sent."""

    def note(self, record: dict[str, object]) -> None:
        with self.log_lock, self.log.open("a") as log:
            log.write(json.dumps(record) + "\n")


class Handler(BaseHTTPRequestHandler):
    """Answers for NVIDIA's repository itself; asks the hub stand-in for the rest."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *arguments: object) -> None:
        """requests.jsonl is the log."""

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def answer(self, body: bytes) -> None:
        host = (self.headers.get("Host") or "").split(":")[0].lower()
        if host == SERVED_NAMES[0]:
            found = self.repository_file()
        elif host in SERVED_NAMES[1:]:
            found = self.server.hub.answer(host, self.command, self.path, self.headers, body)
        else:
            found = Answer(421, body=f"{host} is not served here\n".encode())
        sent = 0
        try:
            sent = self.send_bytes(found) if found.file is None else self.send_file(found)
        except OSError:
            self.close_connection = True
        finally:
            self.server.note(
                {
                    "time": time.time(),
                    "host": host,
                    "method": self.command,
                    "path": urlsplit(self.path).path,
                    "code": found.code,
                    "sent": sent,
                    "range": self.headers.get("Range"),
                    "authorization": bool(self.headers.get("Authorization")),
                }
            )

    def repository_file(self) -> Answer:
        root = self.server.repository
        path = (root / unquote(urlsplit(self.path).path).lstrip("/")).resolve()
        if not path.is_file() or not path.is_relative_to(root):
            return Answer(404, body=b"not found\n")
        if self.headers.get("If-Modified-Since") == self.date_time_string(int(path.stat().st_mtime)):
            return Answer(304)
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        return Answer(
            200,
            {"Content-Type": kind, "Last-Modified": self.date_time_string(int(path.stat().st_mtime))},
            file=path,
        )

    def start(self, code: int, headers: dict[str, str], length: int) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def send_bytes(self, found: Answer) -> int:
        self.start(found.code, found.headers, len(found.body))
        if self.command == "HEAD":
            return 0
        self.wfile.write(found.body)
        return len(found.body)

    def send_file(self, found: Answer) -> int:
        """The file or the range asked for, with the faults that are due. Returns the bytes that went out."""
        assert found.file is not None
        size = found.file.stat().st_size
        first, after, code = 0, size, found.code
        headers = {**found.headers, "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted:
            first, code = int(wanted[1]), 206
            after = min(int(wanted[2]) + 1, size) if wanted[2] else size
            if first >= size:
                found.code = 416
                self.start(416, {"Content-Range": f"bytes */{size}"}, 0)
                return 0
            headers["Content-Range"] = f"bytes {first}-{after - 1}/{size}"
        found.code = code
        self.start(code, headers, after - first)
        if self.command == "HEAD":
            return 0
        faults, began, sent = found.faults, time.monotonic(), 0
        with found.file.open("rb") as source:
            source.seek(first)
            while sent < after - first:
                offset = first + sent
                block = bytearray(source.read(min(BLOCK, after - offset)))
                block = self.spoil(faults, found.file.name, offset, block)
                if faults and faults.rate:
                    due = began + (sent + len(block)) / faults.rate
                    time.sleep(max(0.0, due - time.monotonic()))
                self.wfile.write(block)
                sent += len(block)
        return sent

    def spoil(self, faults: Faults | None, name: str, offset: int, block: bytearray) -> bytearray:
        """Flip a byte, hang, or end the connection, where a fault says so."""
        if faults is None:
            return block
        if (at := faults.due("corrupt", name, offset, offset + len(block))) is not None:
            block[at - offset] ^= 0xFF
        if (at := faults.due("stall", name, offset, offset + len(block))) is not None:
            self.wfile.write(block[: at - offset])
            time.sleep(3600)
        if (at := faults.due("cut", name, offset, offset + len(block))) is not None:
            self.wfile.write(block[: at - offset])
            self.connection.shutdown(socket.SHUT_RDWR)
            raise OSError("cut on purpose")
        return block


def start(lab: Lab, limit_s: float = 10) -> None:
    """Start the services of a lab unless they run; returns when they accept connections.

    Services of another version of themselves or of the repository are started anew: a hub of yesterday names other
    commits.
    """
    network.plug(lab, MEMBER, lab.services_address)
    repository = nvidia_repository.build(lab)
    made_of = key_of(str(repository), *(path.read_bytes() for path in (Path(__file__), Path(hub.__file__))))
    note = lab.state / "services.key"
    if cgroup.processes(lab, MEMBER) and (not note.exists() or note.read_text() != made_of):
        cgroup.kill(lab, MEMBER)
    if not cgroup.processes(lab, MEMBER):
        note.write_text(made_of)
        groups = cgroup.create(lab, MEMBER)
        command = [
            "ip", "netns", "exec", lab.namespace(MEMBER), "/usr/bin/python3", "-m", "tests.lab.services",
            lab.services_address, certificates.authority(lab), repository, lab.parts / "hub",
            lab.state,
        ]  # fmt: skip
        with (lab.state / "services.log").open("ab") as log:
            subprocess.Popen(
                [str(part) for part in command],
                cwd=CHECKOUT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: cgroup.enter(groups),
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            )
    end = time.monotonic() + limit_s
    while not reachable(lab):
        if time.monotonic() > end or not cgroup.processes(lab, MEMBER):
            raise LabError("the lab's https services did not start", fix=f"read {lab.state / 'services.log'}")
        time.sleep(0.05)


def reachable(lab: Lab) -> bool:
    try:
        with socket.create_connection((lab.services_address, 443), timeout=1):
            return True
    except OSError:
        return False


def stop(lab: Lab) -> None:
    cgroup.kill(lab, MEMBER)
    network.unplug(lab, MEMBER)


def main(arguments: list[str]) -> None:
    address, certificate, repository, shelf, state = arguments
    state_folder = Path(state)
    Server(
        address, 443, Path(certificate), Path(repository).resolve(),
        Hub([state_folder / "hub", Path(shelf)], state_folder / "hub.json"), state_folder / "requests.jsonl",
    ).serve_forever()  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
