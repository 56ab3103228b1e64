"""The TLS edge of a node: what of the model server is reached from outside, and by whom.

Only what is listed here goes through; a path of a later SGLang is not there until somebody adds it. Everything else of
SGLang (weights, caches, profiles, /server_info, which shows the API key) stays on the machine.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from node.problems import Problem
from node.systems import System

PACKAGE = "caddy"

PROTOCOLS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("debian", "12"): ("h1",),  # 2.6.2-5 is built with Go 1.19.8
    ("debian", "13"): ("h1", "h2"),  # 2.6.2-12+deb13u1: Go 1.24.4, x/net 0.27
    ("ubuntu", "24.04"): ("h1",),  # 2.6.2-6ubuntu0.24.04.3: Go 1.22.2, x/net 0.21
}
"""(distribution, version) -> HTTP versions that its Caddy may speak; a system without an entry has no package caddy.

HTTP/2 of Go before 1.22.2 and of golang.org/x/net before 0.23 lets anybody, without a key, exhaust the process
(CVE-2023-44487, CVE-2023-45288). Read from `caddy build-info` and the packages' Static-Built-Using, 2026-11-29.
"""


@dataclass(frozen=True)
class Served:
    """One request that goes through: method and request target, byte for byte."""

    method: str
    path: str

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


SERVED = (
    Served("GET", "/v1/models"),
    Served("POST", "/v1/chat/completions"),
    Served("POST", "/v1/completions"),
    Served("GET", "/health"),  # with a key: SGLang generates a token for it
)

REQUEST_BYTES = 32 * 2**20  # a prompt of 262,144 tokens is about 1 MB; pictures come as base64
REQUEST_SECONDS = 300  # for a request to arrive whole; an answer takes as long as it takes
GRACE_SECONDS = 30  # that answers under way have left when the edge is stopped


@dataclass(frozen=True)
class Edge:
    """What Caddy is to do.

    name: host name of the certificate, and the only one that is answered. address: IP address to listen on, None for
    all of the machine. certificate_file, key_file: of the controller; None: Caddy's internal authority signs.
    client_keys_file: of the controller, see `client_keys`; None: one key is made on the node.
    """

    name: str
    address: str | None
    port: int
    protocols: tuple[str, ...]
    certificate_file: str | None
    key_file: str | None
    client_keys_file: str | None
    served: tuple[Served, ...] = SERVED
    request_bytes: int = REQUEST_BYTES
    request_seconds: int = REQUEST_SECONDS
    grace_seconds: int = GRACE_SECONDS

    @property
    def origin(self) -> str:
        """What clients put before a path."""
        return f"https://{self.name}" + ("" if self.port == 443 else f":{self.port}")


KEYS_OF_THE_EDGE = ("edge_address", "edge_certificate_file", "edge_key_file", "edge_client_keys_file")


def make(values: Mapping[str, Any], system: System) -> tuple[Edge | None, list[Problem]]:
    """The edge that the inventory's values (all keys of node.inventory) ask for; None where they name none."""
    name = values["edge_name"]
    problems = []
    if name is None:
        for key in KEYS_OF_THE_EDGE:
            if values[key] is not None:
                problems.append(
                    Problem(
                        f"inventory key {key}",
                        f"{values[key]!r}, and no edge_name",
                        "an edge_name, without which there is no edge",
                        f"set edge_name, or remove {key}",
                    )
                )
        return None, problems
    protocols = PROTOCOLS.get((system.distribution, system.version))
    if protocols is None:
        problems.append(
            Problem(
                "inventory key edge_name",
                f"{name!r} on {system}, whose archive has no package {PACKAGE}",
                "one of " + ", ".join(f"{distribution} {version}" for distribution, version in PROTOCOLS),
                "use one of these systems, or remove edge_name and put an edge of your own before the node",
            )
        )
    for given, other in (("certificate", "key"), ("key", "certificate")):
        if values[f"edge_{given}_file"] is not None and values[f"edge_{other}_file"] is None:
            problems.append(
                Problem(
                    f"inventory key edge_{other}_file",
                    f"nothing, with edge_{given}_file",
                    "both, or neither for Caddy's internal authority",
                    f"set edge_{other}_file",
                )
            )
    if problems:
        return None, problems
    edge = Edge(
        name=name,
        address=values["edge_address"],
        port=values["edge_port"],
        protocols=protocols or (),
        certificate_file=values["edge_certificate_file"],
        key_file=values["edge_key_file"],
        client_keys_file=values["edge_client_keys_file"],
    )
    return edge, []


def name_problem(name: str) -> str | None:
    """What is wanted instead of a text as the edge's name; None where it can be one."""
    label = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
    good = len(name) <= 253 and re.fullmatch(rf"({label}\.)*{label}", name) and not re.fullmatch(r"[0-9.]+", name)
    return None if good else "a host name of small letters, digits, '-' and '.'; an IP address is none"


def address_problem(address: str) -> str | None:
    """What is wanted instead of a text as the edge's address; None where it can be one."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return "an IPv4 or IPv6 address of the node"
    return None


# What RFC 6750 lets a bearer token be: nothing in it means anything to a Caddyfile.
_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class UnusableKeys(ValueError):
    """Why a text holds no client keys. Names lines, never what is in them."""


def client_keys(text: str) -> dict[str, str]:
    """Name -> key, from lines `key` or `name key`; empty lines and lines that begin with # are none.

    A key without a name is called after its line: key-3. Names stand in the access log. Raises UnusableKeys.
    """
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name, key = (words[0], words[1]) if len(words) == 2 else (f"key-{number}", words[0])
        if len(words) > 2:
            raise UnusableKeys(f"line {number} has {len(words)} words, wanted a key, or a name and a key")
        if not _NAME.fullmatch(name):
            raise UnusableKeys(
                f"line {number}: the name is not 1 to 64 letters, digits, '.', '_' and '-', the first a letter or digit"
            )
        if not _KEY.fullmatch(key):
            raise UnusableKeys(f"line {number}: the key is not 16 to 512 letters, digits and characters of ._~+/=-")
        if name in keys:
            raise UnusableKeys(f"line {number}: a second key of that name")
        if key in keys.values():
            raise UnusableKeys(f"line {number}: a key that an earlier line has")
        keys[name] = key
    if not keys:
        raise UnusableKeys("no key in it")
    return keys


def client_keys_text(keys: Mapping[str, str]) -> str:
    """Client keys as they lie on the node: a line `name key` each."""
    return "".join(f"{name} {key}\n" for name, key in keys.items())
