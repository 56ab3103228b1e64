"""What the server's user reaches under the firewall that is laid down: real rules, real connections, two network
namespaces of the test's own. The other namespace has an address of every kind and answers on all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from node import layout
from roles.inference_service import content
from tests.host.firewall_rules import verdict
from tests.roles.test_inference_service import planned

pytestmark = pytest.mark.lab  # wants root, and nftables

USER = "nobody"  # stands for the server's user, who is on no machine but a node
PUBLIC = ("9.9.9.9", "2620:fe::fe")
NOT_PUBLIC = (
    "10.1.2.3", "172.16.0.9", "192.168.7.7", "100.64.1.1", "169.254.169.254", "198.18.0.1", "203.0.113.5",
    "fd00::17", "2001:db8::1", "2002:a00:1::1",
)  # fmt: skip
ANSWERS = """
import selectors, socket, sys
waiting = selectors.DefaultSelector()
for port in map(int, sys.argv[1:]):
    listening = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64)
    waiting.register(listening, selectors.EVENT_READ)
datagrams = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
datagrams.bind(("::", 53))
waiting.register(datagrams, selectors.EVENT_READ)
print("ready", flush=True)
while True:
    for key, _ in waiting.select():
        if key.fileobj is datagrams:
            datagrams.sendto(b"answer", datagrams.recvfrom(100)[1])
        else:
            key.fileobj.accept()[0].close()
"""
ASKS = """
import errno, json, os, pwd, socket, sys, time
user, tried = json.load(sys.stdin)
os.setgroups([]); os.setgid(pwd.getpwnam(user).pw_gid); os.setuid(pwd.getpwnam(user).pw_uid)
found = []
for kind, address, port in tried:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    began = time.monotonic()
    with socket.socket(family, getattr(socket, kind)) as one:
        one.settimeout(3)
        try:
            one.connect((address, port))
            if kind == "SOCK_DGRAM":
                one.send(b"question"); one.recv(100)
            said = "answered"
        except OSError as error:
            said = errno.errorcode.get(error.errno, type(error).__name__)
    found.append([said, time.monotonic() - began])
print(json.dumps(found))
"""


@dataclass
class World:
    """Two namespaces, joined by a cable: `node`, and `others` who have every address."""

    node: int
    others: int
    table: list[dict[str, Any]] = field(default_factory=list)

    def load(self, media: str, file: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "SERVICE_USER", USER)
            file.write_text(content.render("firewall.nft.j2", planned(fetch_media=media)))
        inside(self.node, "nft", "--file", str(file))
        self.table = json.loads(inside(self.node, "nft", "--json", "list", "ruleset"))["nftables"]

    def ask(self, *tried: tuple[str, str, int], user: str = USER) -> list[tuple[str, float]]:
        answer = inside(self.node, sys.executable, "-c", ASKS, said=json.dumps([user, tried]))
        return [(said, seconds) for said, seconds in json.loads(answer)]


def inside(process: int, *command: str, said: str | None = None) -> str:
    """Run in the network namespace of a process."""
    full = ["nsenter", f"--target={process}", "--net", *command]
    done = subprocess.run(full, input=said, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    started: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            one = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo ready; exec sleep 600"], stdout=subprocess.PIPE, text=True
            )
            started.append(one)
            assert one.stdout and one.stdout.readline() == "ready\n"
        made = World(started[0].pid, started[1].pid)
        cable = ("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(made.others))
        inside(made.node, *cable)
        for process in (made.node, made.others):
            inside(process, "ip", "link", "set", "lo", "up")
            inside(process, "ip", "link", "set", "cable", "up")
        for address in (*PUBLIC, *NOT_PUBLIC):
            inside(made.others, "ip", "address", "add", address, "dev", "cable", *(["nodad"] if ":" in address else []))
        for address in ("11.0.0.2/32", "2a00::2/128"):
            options = ["nodad"] if ":" in address else []
            inside(made.node, "ip", "address", "add", address, "dev", "cable", *options)
            family = "-6" if ":" in address else "-4"
            inside(made.node, "ip", family, "route", "add", "default", "dev", "cable")
            inside(made.others, "ip", family, "route", "add", address, "dev", "cable")
        for process, ports in ((made.others, ("22", "80", "443", "8080")), (made.node, ("80", "30000"))):
            full = ["nsenter", f"--target={process}", "--net", sys.executable, "-c", ANSWERS, *ports]
            one = subprocess.Popen(full, stdout=subprocess.PIPE, text=True)
            started.append(one)
            assert one.stdout and one.stdout.readline() == "ready\n"
        yield made
    finally:
        for one in started:
            one.kill()
            one.wait()


def web(*addresses: str, port: int = 443) -> list[tuple[str, str, int]]:
    return [("SOCK_STREAM", address, port) for address in addresses]


def test_the_world_answers_whom_nothing_keeps_back(world: World) -> None:
    """Without this, refusals prove nothing."""
    everything = web(*PUBLIC, *NOT_PUBLIC)
    assert {said for said, _ in world.ask(*everything)} == {"answered"}
    assert world.ask(("SOCK_DGRAM", PUBLIC[0], 53))[0][0] == "answered"


@pytest.mark.parametrize("media", ["none", "public"])
def test_private_addresses_are_refused_at_once(world: World, media: str, tmp_path: Path) -> None:
    """Metadata of a cloud, machines that only the node reaches, IPv4 addresses in IPv6 ones. Root may go everywhere."""
    world.load(media, tmp_path / "rules")
    for port in (22, 80, 443, 8080):
        for said, seconds in world.ask(*web(*NOT_PUBLIC, port=port)):
            assert said == "ECONNREFUSED" and seconds < 1
    assert {said for said, _ in world.ask(*web(*NOT_PUBLIC), user="root")} == {"answered"}


def test_by_default_nothing_is_reached(world: World, tmp_path: Path) -> None:
    world.load("none", tmp_path / "rules")
    tried = [*web(*PUBLIC), *web(*PUBLIC, port=80), *web(*PUBLIC, port=22)]
    assert {said for said, _ in world.ask(*tried)} == {"ECONNREFUSED"}
    for said, seconds in world.ask(("SOCK_DGRAM", PUBLIC[0], 53), ("SOCK_DGRAM", "127.0.0.1", 53)):
        assert said == "EPERM" and seconds < 1  # a name is not looked up, nor waited for


def test_public_means_the_web_and_names_alone(world: World, tmp_path: Path) -> None:
    world.load("public", tmp_path / "rules")
    tried = [*web(*PUBLIC), *web(*PUBLIC, port=80)]
    assert {said for said, _ in world.ask(*tried)} == {"answered"}
    names = [("SOCK_DGRAM", PUBLIC[0], 53), ("SOCK_DGRAM", "127.0.0.1", 53)]
    assert {said for said, _ in world.ask(*names)} == {"answered"}
    assert {said for said, _ in world.ask(*web(*PUBLIC, port=22), *web(*PUBLIC, port=8080))} == {"ECONNREFUSED"}


@pytest.mark.parametrize("media", ["none", "public"])
def test_its_own_processes_reach_each_other_and_no_service_below_1024(world: World, media: str, tmp_path: Path) -> None:
    world.load(media, tmp_path / "rules")
    for address in ("127.0.0.1", "::1", "11.0.0.2"):
        assert world.ask(*web(address, port=30000))[0][0] == "answered"
        assert world.ask(*web(address, port=80))[0][0] == "ECONNREFUSED"
        assert world.ask(*web(address, port=80), user="root")[0][0] == "answered"


@pytest.mark.parametrize("media", ["none", "public"])
def test_the_reader_of_rules_finds_what_the_kernel_does(world: World, media: str, tmp_path: Path) -> None:
    """tests/host judges a node by reading its rules: so the reading is held against connections here."""
    world.load(media, tmp_path / "rules")
    users = {"root": 0, USER: 65534}
    tried = [*(("", each) for port in (22, 443) for each in web(*PUBLIC, *NOT_PUBLIC, port=port))]
    tried += [("lo", each) for port in (80, 30000) for each in web("127.0.0.1", port=port)]
    for name, number in users.items():
        answers = world.ask(*(each for _, each in tried), user=name)
        for (interface, (_, address, port)), (said, _) in zip(tried, answers, strict=True):
            found = verdict(world.table, "output", number, interface or "cable", "tcp", address, port)
            assert (found == "accept") == (said == "answered"), (name, address, port, found, said)
