"""What another machine of the network reaches of a node: the edge, ssh, and nothing else. Asked from the controller.

The tests run in this order on one machine, each beginning where the one before it ended.
"""

from __future__ import annotations

import errno
import http.client
import json
import secrets
import selectors
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kit.inventory import load
from node import layout, systems
from node import plan as plan_module
from node.edge import SERVED, Edge, client_keys
from node.plan import Plan
from node.render import read_file
from tests.proof.conftest import INVENTORY, PROJECT, Node

AT_ONCE, PATIENCE = 512, 2.0  # connections, and seconds until a port counts as one that answers nobody
SSH = 22
OPENED = "Edge | Open the edge: Caddy, its keys, its answer"


@dataclass(frozen=True)
class Outside:
    """The node as another machine sees it."""

    address: str
    plan: Plan
    edge: Edge
    trust: ssl.SSLContext

    def connect(self, trust: ssl.SSLContext | None = None) -> http.client.HTTPSConnection:
        connection = http.client.HTTPSConnection(self.edge.name, self.edge.port, timeout=120)
        plain = socket.create_connection((self.address, self.edge.port), timeout=120)
        connection.sock = (trust or self.trust).wrap_socket(plain, server_hostname=self.edge.name)
        return connection

    def ask(self, method: str, path: str, key: str | None, body: Any = None) -> tuple[int, str]:
        connection = self.connect()
        try:
            headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    @property
    def question(self) -> dict[str, Any]:
        return self.plan.service.questions[0].body(self.plan.service.name)


@pytest.fixture(scope="module")
def outside(node: Node) -> Outside:
    deployed = node.deploy()
    assert deployed.code == 0, deployed.output
    entry = load(PROJECT / INVENTORY)[node.name]
    made = plan_module.make(node.name, entry.data, read_file, None, systems.SYSTEMS[0].as_system())
    assert isinstance(made, Plan) and made.edge
    root = node.ssh(f"cat {layout.EDGE_ROOT_CERTIFICATE}")
    return Outside(entry.ssh["ssh_hostname"], made, made.edge, ssl.create_default_context(cadata=root))


def first_key(node: Node) -> str:
    return next(iter(client_keys(node.ssh(f"cat {layout.EDGE_CLIENT_KEYS}")).values()))


def open_ports(address: str, ports: Iterator[int]) -> set[int]:
    """Those of the TCP ports that take a connection."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found, waiting = set(), selectors.DefaultSelector()
    deadlines: dict[socket.socket, float] = {}
    more = True
    while more or deadlines:
        while more and len(deadlines) < AT_ONCE:
            port = next(ports, None)
            if port is None:
                more = False
                break
            tried = socket.socket(family)
            tried.setblocking(False)
            code = tried.connect_ex(socket.getaddrinfo(address, port, family, socket.SOCK_STREAM)[0][4])
            if code not in (0, errno.EINPROGRESS):
                tried.close()
                continue
            waiting.register(tried, selectors.EVENT_WRITE, port)
            deadlines[tried] = time.monotonic() + PATIENCE
        done = {key.fileobj: key.data for key, _ in waiting.select(0.1)}
        for tried in [each for each, until in deadlines.items() if each in done or until < time.monotonic()]:
            if tried in done and tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                found.add(done[tried])
            waiting.unregister(tried)
            del deadlines[tried]
            tried.close()
    waiting.close()
    return found


def test_of_all_ports_only_the_edge_and_ssh_answer(node: Node, outside: Outside) -> None:
    """Torch's store listens on every interface whatever it is told, and has no password: it is there, and not reached.

    All 65535, over IPv4 and over the IPv6 address that every interface has.
    """
    service = outside.plan.service
    listening = {int(line.split()[3].rpartition(":")[2]) for line in node.ssh("ss -Hltn").splitlines()}
    assert {service.port, service.nccl_port} <= listening, "the server is not there to be reached"
    wanted = {SSH, outside.edge.port}
    assert open_ports(outside.address, iter(range(1, 65536))) == wanted
    link = node.ssh("ip -6 -o addr show scope link | awk '{print $4}' | cut -d/ -f1 | head -1")
    bridge = network_interface(outside.address)
    if link and bridge:
        assert open_ports(f"{link}%{bridge}", iter(range(1, 65536))) == wanted


def network_interface(address: str) -> str | None:
    """The interface of this machine through which an address of its own network is reached."""
    words = subprocess.run(["ip", "route", "get", address], capture_output=True, text=True, check=True).stdout.split()
    return words[words.index("dev") + 1] if "dev" in words else None


def test_no_datagram_is_waited_for(node: Node) -> None:
    """No HTTP/3, no discovery: what listens on UDP listens on loopback, or is the system's own DHCP client."""
    for line in node.ssh("ss -Hlun").splitlines():
        address, _, port = line.split()[3].rpartition(":")
        assert address.startswith(("127.", "[::1]")) or port in ("68", "546"), line


def test_a_client_that_trusts_the_edge_gets_a_right_answer(node: Node, outside: Outside) -> None:
    """The chain is verified against the node's own authority, fetched over ssh, and against nothing else."""
    key = first_key(node)
    status, body = outside.ask("POST", "/v1/chat/completions", key, outside.question)
    assert status == 200, body
    assert outside.plan.service.questions[0].expected[0] in json.loads(body)["choices"][0]["message"]["content"]
    with pytest.raises(ssl.SSLCertVerificationError):
        outside.connect(ssl.create_default_context())


def test_who_has_no_key_gets_nothing(node: Node, outside: Outside) -> None:
    keys = (None, "sk-" + "0" * 40, node.ssh(f"cat {layout.API_KEY}"))
    for served in SERVED:
        for key in keys:
            assert outside.ask(served.method, served.path, key)[0] == 401, served


def test_a_path_that_is_not_served_is_not_there(node: Node, outside: Outside) -> None:
    """Of the paths that the running engine has by its own account, those of the list answer and no other."""
    ask = f'curl -s -H "Authorization: Bearer $(cat {layout.API_KEY})" http://127.0.0.1:{outside.plan.service.port}'
    paths = json.loads(node.ssh(f"{ask}/openapi.json"))["paths"]
    assert len(paths) > 40 and "/server_info" in paths
    key, served = first_key(node), {(each.method, each.path) for each in SERVED}
    tried = 0
    for path, methods in paths.items():
        for method in methods:
            if (method.upper(), path) not in served:
                tried += 1
                assert outside.ask(method.upper(), path.replace("{", "").replace("}", ""), key)[0] == 404, path
    assert tried > 40


def test_a_key_is_changed_and_no_request_is_lost(node: Node, outside: Outside, tmp_path: Path) -> None:
    """Change the file, deploy. One client keeps its key and asks all the while; another's is taken away."""
    taken, kept, given = first_key(node), *(f"sk-{secrets.token_urlsafe(24)}" for _ in range(2))
    file = tmp_path / "client-keys"
    file.write_text(f"first {taken}\nkept {kept}\n")
    deployed = node.deploy(f"edge_client_keys_file={file}")
    assert deployed.code == 0 and deployed.changed == (OPENED,), deployed.output
    file.write_text(f"kept {kept}\ngiven {given}\n")
    statuses: list[int] = []
    over = threading.Event()

    def keep_asking() -> None:
        while not over.is_set():
            statuses.append(outside.ask("POST", "/v1/chat/completions", kept, {**outside.question, "stream": True})[0])

    client = threading.Thread(target=keep_asking)
    client.start()
    try:
        deployed = node.deploy(f"edge_client_keys_file={file}")
    finally:
        over.set()
        client.join()
    assert deployed.code == 0 and deployed.changed == (OPENED,), deployed.output
    assert len(statuses) > 3 and set(statuses) == {200}
    assert [outside.ask("GET", "/v1/models", key)[0] for key in (taken, kept, given)] == [401, 200, 200]
    assert not any(key in deployed.output for key in (taken, kept, given))
    assert node.deploy(f"edge_client_keys_file={file}").changed == ()


BREAKS = {
    "it was told otherwise while it runs": (
        f"curl -s --fail --unix-socket {layout.EDGE_ADMIN} -H 'Host;' -H Content-Type:application/json "
        "-X PATCH -d 60000000000 http://caddy/config/apps/http/servers/srv0/idle_timeout",
        "it runs another configuration",
    ),
    "its keys are readable by others": (f"chmod 644 {layout.EDGE_CLIENTS}", layout.EDGE_CLIENTS),
    "its list was edited": (
        f"sed -i 's,GET /health,GET /server_info,' {layout.EDGE_CADDYFILE} && systemctl reload {layout.EDGE_UNIT}",
        "/server_info",
    ),
    "it was stopped": (f"systemctl stop {layout.EDGE_UNIT}", layout.EDGE_UNIT),
    "its program was replaced": (
        "cp --remove-destination /usr/bin/caddy /usr/bin/caddy.new && mv /usr/bin/caddy.new /usr/bin/caddy",
        "has been replaced",
    ),
}


@pytest.mark.parametrize("case", BREAKS)
def test_what_is_broken_at_the_edge_is_named_and_mended(node: Node, outside: Outside, case: str) -> None:
    do, named = BREAKS[case]
    node.ssh(do)
    verified = node.verify("edge")
    assert verified.failed and named in verified.output and "Fix: " in verified.output, verified.output
    deployed = node.deploy()
    assert deployed.code == 0, deployed.output
    again = node.verify("edge")
    assert again.code == 0, again.output


def test_without_a_name_the_edge_is_closed(node: Node, outside: Outside) -> None:
    ports = (SSH, outside.edge.port, 80, 2019, outside.plan.service.port, outside.plan.service.nccl_port)
    deployed = node.deploy("edge_name=null")
    assert deployed.code == 0, deployed.output
    assert open_ports(outside.address, iter(ports)) == {SSH}
    assert node.deploy("edge_name=null").changed == ()
    assert node.deploy().code == 0
    assert open_ports(outside.address, iter(ports)) == {SSH, outside.edge.port}
    assert node.verify("edge").code == 0
