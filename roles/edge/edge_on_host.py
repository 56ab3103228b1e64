"""Runs on the host: what the edge is now, and bringing its process to what the files say. No key leaves the host.

`edge`, in both: {"unit", "user", "package": names, and paths: "program": Caddy, "caddyfile", "admin": its socket,
"api_key", "client_keys": what the keys are, "clients", "upstream": the same keys as Caddy reads them, "certificate":
None for Caddy's own authority; "name", "address", "port": where it answers}.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import pwd
import re
import secrets
import socket
import ssl
import time
from typing import Any

from kit import on_host
from kit.on_host import Problem

LOCK = "/run/lock/kimi-nodes-edge"
SETTLE_SECONDS = 20
KEY = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")  # RFC 6750; nothing in it means anything to a Caddyfile
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def probe(paths: list[str], units: list[str], edge: dict[str, Any] | None = None) -> dict[str, Any]:
    """{"files", "units"} and, of an edge: {"package": version | None, "user": bool, "keys": [why Caddy's are not those
    that they should be], "running": [how what runs differs from the files], None where nothing runs}"""
    found: dict[str, Any] = {"files": on_host.files(paths), "units": on_host.units(units)}
    if edge is not None:
        found["package"] = on_host.packages([edge["package"]])[edge["package"]]
        found["user"] = _has_user(edge["user"])
        found["keys"] = key_differences(edge)
        found["running"] = differences(edge)
    return found


def act(edge: dict[str, Any], restart: bool) -> None:
    """Make keys where there are none, give them to Caddy, and let it run with what the files say, until it answers so.

    restart: a reload is not enough. Raises Problem.
    """
    os.umask(0o077)
    with open(LOCK, "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path, text in composed(edge, make=True).items():
            if not _is(path, text, edge["user"]):
                on_host.replace(path, text.encode(), 0o600, edge["user"])
        unit = edge["unit"]
        _systemctl("daemon-reload")
        _systemctl("enable", unit)
        running = on_host.units([unit])[unit]["ActiveState"] == "active"
        verbs = ["reload", "restart"] if running and not restart else ["restart"]
        for verb in verbs:
            _systemctl("reset-failed", unit, check=False)
            if _systemctl(verb, unit, check=verb == verbs[-1]):
                wrong = _settled(edge)
                if not wrong:
                    return
        raise Problem(f"{unit}: found {'; '.join(wrong)}; wanted none of it. Fix: journalctl -u {unit}, on that host")


def _settled(edge: dict[str, Any]) -> list[str]:
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        wrong = differences(edge)
        if wrong == [] or time.monotonic() > until:
            return ["it does not run"] if wrong is None else wrong
        time.sleep(0.3)


# --- keys ------------------------------------------------------------------------------------------------------------


def composed(edge: dict[str, Any], make: bool = False) -> dict[str, str]:
    """What Caddy is to read: path -> content. make: a client's key is made where there is none. Raises Problem."""
    api_key, clients = on_host.text(edge["api_key"]), on_host.text(edge["client_keys"])
    if api_key is None:
        raise Problem(f"{edge['api_key']}: found none, wanted the server's API key. Fix: run deploy.py")
    if not KEY.fullmatch(api_key.strip()):
        raise Problem(
            f"{edge['api_key']}: found a key with characters that no bearer token may have, wanted letters, digits and "
            "._~+/=- for a server behind an edge. Fix: change it (api_key_file, or remove that file) and deploy"
        )
    if clients is None:
        if not make:
            raise Problem(f"{edge['client_keys']}: found none, wanted the keys of clients. Fix: run deploy.py")
        clients = f"client sk-{secrets.token_urlsafe(32)}\n"
        on_host.replace(edge["client_keys"], clients.encode(), 0o600, "root")
    lines = [line.split() for line in clients.splitlines()]
    if not lines or any(len(line) != 2 or not NAME.fullmatch(line[0]) or not KEY.fullmatch(line[1]) for line in lines):
        raise Problem(
            f"{edge['client_keys']}: found another form, wanted lines of a name and a key. Fix: remove that file and "
            "deploy: it is written anew"
        )
    return {
        edge["clients"]: "".join(f'"Bearer {key}" "{name}"\n' for name, key in lines),
        edge["upstream"]: f'header_up Authorization "Bearer {api_key.strip()}"\n',
    }


def key_differences(edge: dict[str, Any]) -> list[str]:
    """Why Caddy's files of keys are not what they should be; [] if they are."""
    try:
        wanted = composed(edge)
    except Problem as problem:
        return [str(problem)]
    return [
        f"{path} is not made of the keys of now" for path, text in wanted.items() if not _is(path, text, edge["user"])
    ]


def _is(path: str, text: str, user: str) -> bool:
    state = on_host.file_state(path)
    if state is None or (state["kind"], state["mode"], state["user"]) != ("file", "600", user):
        return False
    return bool(state["sha256"] == hashlib.sha256(text.encode()).hexdigest())


def _has_user(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


# --- the process -----------------------------------------------------------------------------------------------------


def differences(edge: dict[str, Any]) -> list[str] | None:
    """How what runs differs from what the files say; None where nothing runs.

    Asked of the process itself: its configuration over its own socket, its certificate and its answer over TLS.
    """
    shown = on_host.run(["systemctl", "show", "--property=MainPID", "--value", "--", edge["unit"]])
    pid = int(shown["out"].strip() or 0)
    if not pid:
        return None
    wrong = []
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{pid}/exe") != edge["program"]:
            wrong.append("it runs a Caddy that has been replaced since")
    adapted = on_host.run([edge["program"], "adapt", "--config", edge["caddyfile"], "--adapter", "caddyfile"])
    if adapted["code"] != 0:
        return [*wrong, f"{edge['caddyfile']}: {adapted['err'].strip().splitlines()[-1:]}"]
    if loaded(edge["admin"]) != json.loads(adapted["out"]):
        wrong.append("it runs another configuration")
    try:
        certificate, status = asked(edge["name"], edge["address"], edge["port"])
    except (OSError, http.client.HTTPException) as error:
        return [*wrong, f"no answer on {edge['address']} port {edge['port']}: {error}"]
    if edge["certificate"] and certificate != first_certificate(edge["certificate"]):
        wrong.append("it shows another certificate")
    if status != 401:
        wrong.append(f"it answers {status} to a request without a key, wanted 401")
    return wrong


class _AdminConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str):
        super().__init__("", timeout=10)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(self.path)


def loaded(admin: str) -> Any:
    """The configuration that Caddy runs; None where it does not say."""
    connection = _AdminConnection(admin)
    try:
        connection.putrequest("GET", "/config/", skip_host=True)
        connection.putheader("Host", "")  # of a Unix socket Caddy takes no other
        connection.endheaders()
        return json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def asked(name: str, address: str, port: int) -> tuple[bytes, int]:
    """The certificate shown for a name (DER) and the status of a request without a key. Raises OSError, HTTPException.

    Whom to trust is the clients' to say, so nothing is verified here.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((address, port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=name) as secure,
    ):
        secure.sendall(f"GET /v1/models HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
        response = http.client.HTTPResponse(secure)
        response.begin()
        return secure.getpeercert(binary_form=True) or b"", response.status


def first_certificate(path: str) -> bytes:
    """The first certificate of a PEM file, DER; b"" where there is none."""
    found = re.search(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", on_host.text(path) or "", re.DOTALL)
    return ssl.PEM_cert_to_DER_cert(found[0]) if found else b""


def _systemctl(*arguments: str, check: bool = True) -> bool:
    code, said = on_host.output(["systemctl", *arguments])
    if code and check:
        unit = arguments[-1]
        log = on_host.run(["journalctl", "--no-pager", "--output=cat", "--lines=3", "--unit", unit])["out"]
        found = " ".join(f"{said} {log}".split())[-600:]
        raise Problem(f"systemctl {' '.join(arguments)}: found {found}; wanted it done. Fix: journalctl -u {unit}")
    return code == 0
