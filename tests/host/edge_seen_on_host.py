"""Runs on the host for test_edge: what clients get of the edge and what its process is, in one command. No key leaves
the host."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import struct
import time
from pathlib import Path
from typing import Any

from kit import on_host


def probe(
    unit: str,
    program: str,
    name: str,
    address: str,
    port: int,
    trusted: str,
    api_key: str,
    client_keys: str,
    question: dict[str, Any],
    forbidden: list[list[str]],
    seconds: int,
) -> dict[str, Any]:
    """Everything is None or empty where it is not there: the tests say what that means."""
    secret, lines = (on_host.text(api_key) or "").strip(), (on_host.text(client_keys) or "").splitlines()
    key = lines[0].split()[-1] if lines else ""
    shown = on_host.run(["systemctl", "show", "--property=MainPID,InvocationID", "--", unit])["out"]
    properties = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    edge = Client(name, address, port, trusted, seconds)
    return {
        "process": process(int(properties.get("MainPID") or 0)),
        "listening": listening(program),
        "keys": len(lines),
        "told_in": told({"the API key": secret, "a client's key": key}, properties) if secret and key else [],
        "trust": edge.trust(),
        "models": edge.ask("GET", "/v1/models", key),
        "statuses": {
            "no key": edge.ask("GET", "/v1/models")["status"],
            "another key": edge.ask("GET", "/v1/models", "sk-" + "0" * 40)["status"],
            "the API key": edge.ask("GET", "/v1/models", secret)["status"] if secret else None,
            **{f"{method} {path}": edge.ask(method, path, key)["status"] for method, path in forbidden},
        },
        "answer": edge.ask("POST", "/v1/chat/completions", key, question),
        "stream": edge.stream("/v1/chat/completions", key, question),
    }


class Client:
    """A client of the edge that trusts one file of certificates, and the edge's name."""

    def __init__(self, name: str, address: str, port: int, trusted: str, seconds: int):
        self.name, self.address, self.port, self.seconds = name, address, port, seconds
        self.trusted = on_host.text(trusted)

    def connect(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cadata=self.trusted or None)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the owner's own may be no root
        connection = http.client.HTTPSConnection(self.name, self.port, timeout=self.seconds, context=context)
        plain = socket.create_connection((self.address, self.port), timeout=self.seconds)
        try:
            connection.sock = context.wrap_socket(plain, server_hostname=self.name)
        except BaseException:
            plain.close()
            raise
        return connection

    def trust(self) -> str:
        """ "" where the certificate is good for the name; else what is wrong, or why there is no connection."""
        if not self.trusted:
            return "there is no certificate to trust"
        try:
            self.connect().close()
        except OSError as error:
            return str(error)
        return ""

    def ask(self, method: str, path: str, key: str | None = None, body: Any = None) -> dict[str, Any]:
        """{"status": int, "body": text}; status 0 where nobody answers."""
        try:
            connection = self.connect()
            try:
                connection.request(method, path, json.dumps(body) if body else None, headers(key))
                response = connection.getresponse()
                return {"status": response.status, "body": response.read(1 << 20).decode(errors="replace")}
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            return {"status": 0, "body": str(error)}

    def stream(self, path: str, key: str, body: dict[str, Any]) -> list[float]:
        """Seconds from the first event of a stream to each of them."""
        times: list[float] = []
        try:
            connection = self.connect()
            try:
                # Long enough that a reader who gets the processor late still sees it come in parts.
                long = {**body, "stream": True, "max_tokens": 256, "ignore_eos": True}
                connection.request("POST", path, json.dumps(long), headers(key))
                for line in connection.getresponse():
                    if line.startswith(b"data: "):
                        times.append(time.monotonic())
            finally:
                connection.close()
        except (OSError, http.client.HTTPException):
            pass
        return [at - times[0] for at in times]


def headers(key: str | None) -> dict[str, str]:
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


def process(pid: int) -> dict[str, Any] | None:
    """{"user": name, "capabilities": hex digits, "no_new_privileges": "1", "seccomp": "2"}; None where it is not."""
    try:
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )
    except OSError:
        return None
    return {
        "user": on_host.user_name(int(status["Uid"].split()[1])),
        "capabilities": status["CapBnd"],
        "no_new_privileges": status["NoNewPrivs"],
        "seccomp": status["Seccomp"],
    }


def listening(program: str) -> list[dict[str, Any]]:
    """TCP sockets on which any process of this program listens, and its UDP sockets: {"address", "port", "kind"}."""
    inodes = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor.parents[1] / "exe").removesuffix(" (deleted)") != program:
                continue
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
        except OSError:
            continue
        if found:
            inodes.add(found[1])
    sockets = []
    for kind, family in (
        ("tcp", socket.AF_INET),
        ("tcp6", socket.AF_INET6),
        ("udp", socket.AF_INET),
        ("udp6", socket.AF_INET6),
    ):
        for line in Path("/proc/net", kind).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (kind.startswith("udp") or fields[3] == "0A"):
                address, port = fields[1].split(":")
                words = [struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8)]
                text = socket.inet_ntop(family, b"".join(words))
                sockets.append({"kind": kind.rstrip("6"), "address": text, "port": int(port, 16)})
    return sockets


def told(keys: dict[str, str], properties: dict[str, str]) -> list[str]:
    """Where a key stands though it should not: in any process's arguments or environment, in what the edge has said."""
    found = []
    places = {str(path): path for name in ("cmdline", "environ") for path in Path("/proc").glob(f"[0-9]*/{name}")}
    command = ["journalctl", "--no-pager", "--output=cat", f"_SYSTEMD_INVOCATION_ID={properties.get('InvocationID')}"]
    said = on_host.run(command, timeout=60)["out"]
    for what, key in keys.items():
        for place, path in places.items():
            try:
                if key.encode() in path.read_bytes():
                    found.append(f"{what} in {place}")
            except OSError:
                continue
        if key in said:
            found.append(f"{what} in the journal of the edge")
    return found
