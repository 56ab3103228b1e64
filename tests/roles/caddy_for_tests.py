"""A real Caddy with the rendered Caddyfile on loopback, before a server of the test's own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from node.edge import Edge
from node.plan import Plan
from roles.edge import content, edge_on_host

API_KEY = "sk-of-the-server-0123456789"
STREAM_EVENTS, STREAM_PAUSE = 12, 0.25  # seconds


@functools.cache
def caddy() -> str:
    """The program: installed, or unpacked from the distribution's package into the cache folder and not installed."""
    if found := shutil.which("caddy"):
        return found
    cache = Path(os.environ.get("KIMI_NODES_CACHE") or Path.home() / ".cache/kimi-nodes") / "unpacked" / "caddy"
    program = cache / "usr/bin/caddy"
    if not program.exists():
        work = cache.with_name(f"caddy.{os.getpid()}")
        work.mkdir(parents=True)
        try:
            command = ["apt-get", "download", "-q", "caddy"]
            done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
            if done.returncode:  # an image without package lists
                subprocess.run(["apt-get", "update", "-qq"], capture_output=True, check=False)
                done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (
                f"{done.stderr}\nFix: apt-get install caddy, or run this on Debian or Ubuntu 24.04"
            )
            (package,) = work.glob("caddy_*.deb")
            subprocess.run(["dpkg-deb", "-x", package, work / "tree"], check=True)
            with contextlib.suppress(OSError):  # another run was first
                os.rename(work / "tree", cache)
        finally:
            shutil.rmtree(work)
    return str(program)


class Server(BaseHTTPRequestHandler):
    """Stands for SGLang: says what it was asked, streams slowly, and notices when the one who asked is gone."""

    protocol_version = "HTTP/1.1"
    server: Upstream

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append({"line": self.requestline, "headers": dict(self.headers), "bytes": len(body)})
        if b'"stream"' in body:
            self.stream()
            return
        if b'"slow"' in body:
            time.sleep(2 * STREAM_PAUSE)
        said = json.dumps({"path": self.path}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(STREAM_EVENTS):
            event = f"data: {number}\n\n".encode()
            try:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
                self.wfile.flush()
            except OSError:
                self.server.gone_after = number
                return
            time.sleep(STREAM_PAUSE)
        self.wfile.write(b"0\r\n\r\n")


class Upstream(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Server)
        self.seen: list[dict[str, Any]] = []
        self.gone_after: int | None = None


class RunningEdge:
    """What a test does with it. `log` is all that Caddy has said, `folder` where its files are."""

    def __init__(self, folder: Path, edge: Edge, upstream: Upstream, plan: Plan):
        self.folder, self.edge, self.upstream, self.plan = folder, edge, upstream, plan
        self.caddyfile, self.admin = folder / "Caddyfile", str(folder / "admin.sock")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        folder = str(self.folder)
        return {"PATH": os.environ["PATH"], "HOME": folder, "XDG_DATA_HOME": folder, "XDG_CONFIG_HOME": folder}

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def write(self, **keys: str) -> None:
        """The files, with these clients' keys: name -> key."""
        (self.folder / "api-key").write_text(API_KEY + "\n")
        (self.folder / "client-keys").write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
        paths = {name: str(self.folder / name) for name in ("clients", "upstream", "certificate", "certificate_key")}
        told = {
            "api_key": str(self.folder / "api-key"),
            "client_keys": str(self.folder / "client-keys"),
            "clients": paths["clients"],
            "upstream": paths["upstream"],
        }
        for path, text in edge_on_host.composed(told).items():
            Path(path).write_text(text)
        service = dataclasses.replace(self.plan.service, port=self.upstream.server_port)
        self.caddyfile.write_text(content.render("Caddyfile.j2", self.edge, service, admin=self.admin, **paths))

    def start(self) -> None:
        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [caddy(), "run", "--config", str(self.caddyfile), "--adapter", "caddyfile"],
                env=self.environment, stdout=log, stderr=log, umask=0o077,
            )  # fmt: skip
        until = time.monotonic() + 15
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                edge_on_host.asked(self.edge.name, "127.0.0.1", self.edge.port)
                return
            time.sleep(0.1)
        raise AssertionError(self.log)

    def reload(self) -> None:
        subprocess.run(
            [caddy(), "reload", "--force", "--config", str(self.caddyfile), "--adapter", "caddyfile", "--address",
             f"unix/{self.admin}"],
            env=self.environment, check=True, capture_output=True,
        )  # fmt: skip

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    @property
    def authority(self) -> ssl.SSLContext:
        """Trusts Caddy's internal authority and nobody else."""
        return ssl.create_default_context(cafile=str(self.folder / "caddy/pki/authorities/local/root.crt"))

    def connect(self, context: ssl.SSLContext | None = None, name: str | None = None) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.edge.port), timeout=20)
        return (context or self.authority).wrap_socket(plain, server_hostname=name or self.edge.name)

    def raw(self, request: bytes) -> http.client.HTTPResponse:
        """The answer to a request sent byte for byte; its body is read."""
        with self.connect() as secure:
            secure.sendall(request)
            response = http.client.HTTPResponse(secure)
            response.begin()
            response.read()
            return response

    def ask(self, line: str, key: str | None, body: bytes = b"", headers: str = "") -> int:
        """The status for a request line without its version, such as "GET /v1/models"."""
        authorization = f"Authorization: Bearer {key}\r\n" if key is not None else ""
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        head = f"{line} HTTP/1.1\r\nHost: {self.edge.name}\r\nConnection: close\r\n{authorization}{length}{headers}\r\n"
        return self.raw(head.encode("latin-1") + body).status

    def stream(self, key: str) -> Iterator[tuple[float, str]]:
        """Seconds since the request, and an event."""
        body = b'{"stream": true}'
        connection = http.client.HTTPSConnection(self.edge.name, context=self.authority, timeout=20)
        connection.sock = self.connect()
        began = time.monotonic()
        connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"})
        response = connection.getresponse()
        assert response.status == 200
        try:
            for line in response:
                if line.strip():
                    yield time.monotonic() - began, line.decode().strip()
        finally:
            connection.close()


@contextlib.contextmanager
def running(folder: Path, edge: Edge, plan: Plan, **keys: str) -> Iterator[RunningEdge]:
    """An edge on a free port of loopback, with a server behind it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    upstream = Upstream()
    thread = threading.Thread(target=upstream.serve_forever, args=(0.05,))
    thread.start()
    made = RunningEdge(folder, dataclasses.replace(edge, address="127.0.0.1", port=port), upstream, plan)
    try:
        made.write(**keys)
        made.start()
        yield made
    finally:
        made.stop()
        upstream.shutdown()
        thread.join()
        upstream.server_close()
