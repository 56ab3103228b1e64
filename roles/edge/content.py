"""What is laid down for the edge, made of the Plan and of the owner's files. Pure, but for reading the templates."""

from __future__ import annotations

import functools
import json
import ssl
from pathlib import Path
from typing import Any

from kit import files, templates
from node import layout
from node.edge import PACKAGE, Edge, client_keys, client_keys_text
from node.plan import Service

CADDY = "/usr/bin/caddy"
UNIT_FILE = f"{layout.UNITS}/{layout.EDGE_UNIT}"
SECRETS = (layout.EDGE_CLIENTS, layout.EDGE_UPSTREAM)  # written on the host, out of keys that never leave it


def render(name: str, edge: Edge, service: Service, **other: str) -> str:
    """A template; `other` replaces values that a test must have otherwise. Raises jinja2.UndefinedError."""
    values: dict[str, Any] = {
        "edge": edge,
        "served": json.dumps([str(served) for served in edge.served]),
        "upstream_address": f"{service.host}:{service.port}",
        "user": layout.EDGE_USER,
        "caddyfile": layout.EDGE_CADDYFILE,
        "clients": layout.EDGE_CLIENTS,
        "upstream": layout.EDGE_UPSTREAM,
        "certificate": layout.EDGE_CERTIFICATE,
        "certificate_key": layout.EDGE_CERTIFICATE_KEY,
        "admin": layout.EDGE_ADMIN,
        "state": layout.EDGE_STATE,
        "runtime": layout.EDGE_RUNTIME,
        "program": CADDY,
    }
    return templates.render(name, {**values, **other})


def wanted(edge: Edge, service: Service) -> list[files.Item]:
    """Files and folders without a secret in them."""
    items: list[files.Item] = [
        files.Directory(layout.EDGE, mode="750", group=layout.EDGE_USER),
        files.File(layout.EDGE_CADDYFILE, render("Caddyfile.j2", edge, service)),
        files.File(UNIT_FILE, render("kimi-edge.service.j2", edge, service)),
    ]
    if edge.certificate_file is None:
        items += [files.Absent(layout.EDGE_CERTIFICATE), files.Absent(layout.EDGE_CERTIFICATE_KEY)]
    return items


def certificate_files(certificate: str, key: str) -> list[files.Item]:
    """The owner's certificate and its key, as files of the node."""
    user = layout.EDGE_USER
    return [
        files.File(layout.EDGE_CERTIFICATE, certificate),
        files.File(layout.EDGE_CERTIFICATE_KEY, key, mode="600", user=user, group=user, secret=True),
    ]


def client_key_files(text: str) -> list[files.Item]:
    """The owner's client keys as a file of the node. Raises UnusableKeys."""
    return [files.File(layout.EDGE_CLIENT_KEYS, client_keys_text(client_keys(text)), mode="600", secret=True)]


def on_host(edge: Edge) -> dict[str, Any]:
    """What edge_on_host.py is told: names and paths, no secret."""
    return {
        "unit": layout.EDGE_UNIT,
        "user": layout.EDGE_USER,
        "package": PACKAGE,
        "program": CADDY,
        "caddyfile": layout.EDGE_CADDYFILE,
        "admin": layout.EDGE_ADMIN,
        "api_key": layout.API_KEY,
        "client_keys": layout.EDGE_CLIENT_KEYS,
        "clients": layout.EDGE_CLIENTS,
        "upstream": layout.EDGE_UPSTREAM,
        "name": edge.name,
        "address": reachable(edge.address),
        "port": edge.port,
        "certificate": layout.EDGE_CERTIFICATE if edge.certificate_file else None,
    }


def reachable(address: str | None) -> str:
    """Where the node itself reaches its edge."""
    return {None: "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address or "")


def certificate_problem(certificate: Path, key: Path, name: str) -> str | None:
    """Why these two cannot serve `name` now; None if they can. Shown by a handshake in memory, of which the certificate
    itself is the only authority: whether clients trust its own is for them to say."""
    no_password = functools.partial(bytes, 0)  # else OpenSSL would ask at the terminal
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        server.load_cert_chain(certificate, key, password=no_password)
        client.load_verify_locations(certificate)
    except OSError as error:  # ssl.SSLError is one
        return f"{error.strerror or error} ({certificate}, {key})"
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for side in list(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
            sides.remove(side)
    return None if not sides else "no TLS handshake comes about with it"
