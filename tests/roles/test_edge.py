"""edge: what the inventory makes of it, what is laid down, and when Caddy is told."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit import files, on_host, testing
from kit.on_host import Problem
from kit.refusal import Refusal
from node import inventory, layout
from node.edge import PROTOCOLS, Edge, UnusableKeys, client_keys, client_keys_text
from node.manifest import File, Manifest
from node.models import MODELS
from node.plan import Plan, make
from node.render import read_file, shown, text
from node.systems import SYSTEMS, System
from roles.edge import content, deploy, edge_on_host, install_on_host
from roles.edge.facts import EdgeFacts
from roles.edge.operations import close_edge, open_edge

KEY = "sk-of-client-0123456789"


def made(system: System | None = None, **data: Any) -> Plan | list[Any]:
    def read(path: str) -> bytes:
        known = {f"files/manifests/{model.key}.json": (model.repository, model.revision) for model in MODELS.values()}
        if path not in known:
            return read_file(path)
        repository, revision = known[path]
        return Manifest(repository, revision or "e" * 40, (File("config.json", 10, "a" * 64),)).dumps().encode()

    values = {"gpu": "rtx-pro-6000-blackwell-server", "gpu_count": 8, "weights_directory": "/srv/weights", **data}
    return make("gpu-1", values, read, None, system or SYSTEMS[0].as_system())


def planned(system: System | None = None, **data: Any) -> Plan:
    plan = made(system, **data)
    assert isinstance(plan, Plan), [str(problem) for problem in plan]
    return plan


def edge_of(**data: Any) -> Edge:
    edge = planned(**{"edge_name": "kimi.example.com", **data}).edge
    assert edge
    return edge


# --- the plan ---


def test_without_a_name_there_is_no_edge() -> None:
    """What an owner has not asked for must not open a port."""
    plan = planned()
    assert plan.edge is None and shown(plan)["edge"] is None and "edge" not in text(plan)


def test_a_name_is_enough() -> None:
    plan = planned(edge_name="kimi.example.com")
    assert plan.edge and plan.edge.origin == "https://kimi.example.com" and plan.edge.address is None
    assert "https://kimi.example.com" in text(plan)
    assert edge_of(edge_port=8443).origin == "https://kimi.example.com:8443"


def test_nothing_dangerous_is_served() -> None:
    """Every path of the list is one of generation, of its health, or of the model's name."""
    assert {str(served) for served in edge_of().served} == {
        "GET /v1/models",
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "GET /health",
    }


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"edge_client_keys_file": "keys"}, "edge_name"),
    "an address as name": ({"edge_name": "10.0.0.1"}, "a host name"),
    "capitals": ({"edge_name": "Kimi.example.com"}, "small letters"),
    "a port in the name": ({"edge_name": "kimi.example.com:443"}, "a host name"),
    "a Caddyfile in the name": ({"edge_name": "kimi {\n}"}, "a host name"),
    "a name as address": ({"edge_name": "kimi", "edge_address": "eth0"}, "an IPv4 or IPv6 address"),
    "the server's port": ({"edge_name": "kimi", "edge_port": 30000}, "which is port too"),
    "the store's port": ({"edge_name": "kimi", "edge_port": 30100}, "which is nccl_port too"),
    "a certificate without key": ({"edge_name": "kimi", "edge_certificate_file": "c.pem"}, "edge_key_file"),
    "a key without certificate": ({"edge_name": "kimi", "edge_key_file": "k.pem"}, "edge_certificate_file"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_a_problem(case: str) -> None:
    data, wanted = BAD[case]
    problems = made(**data)
    assert not isinstance(problems, Plan)
    assert any(wanted in str(problem) and "Fix: " in str(problem) for problem in problems), problems


@pytest.mark.parametrize("system", SYSTEMS, ids=str)
def test_a_system_without_caddy_is_said_before_anything_is_done(system: Any) -> None:
    plan = made(system.as_system(), edge_name="kimi")
    has_package = (system.distribution, system.version) in PROTOCOLS
    assert isinstance(plan, Plan) == has_package
    if not isinstance(plan, Plan):
        assert "no package caddy" in str(plan[0])


def test_keys_of_the_inventory_are_documented() -> None:
    for name in inventory.KEYS:
        if name.startswith("edge_"):
            assert f"| `{name}` |" in (deploy.PROJECT / "docs/inventory.md").read_text()


# --- keys of clients ---


def test_client_keys_have_names() -> None:
    assert client_keys(f"# clients\n\n{KEY}\nlab {KEY}x\n") == {"key-3": KEY, "lab": KEY + "x"}


@pytest.mark.parametrize(
    "text",
    [
        "", "# nothing\n", "short\n", f"a b {KEY}\n", f"{KEY}\n{KEY}\n", f"a {KEY}\na {KEY}x\n", f'a {KEY}"\n',
        f"a {{{KEY}}}\n", f"na\u00efve {KEY}\n", f"{'n' * 65} {KEY}\n", "a " + "k" * 513, f"a {KEY}`\n", f"- {KEY}\n",
    ],
)  # fmt: skip
def test_keys_that_cannot_work_are_refused_without_being_shown(text: str) -> None:
    with pytest.raises(UnusableKeys) as error:
        client_keys(text)
    assert KEY not in str(error.value)


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
        st.from_regex(r"[A-Za-z0-9._~+/=-]{16,60}", fullmatch=True),
        min_size=1,
    )
)
def test_what_is_laid_down_reads_the_same(keys: dict[str, str]) -> None:
    unique = {key: name for name, key in keys.items()}
    keys = {name: key for key, name in unique.items()}
    if any(name.startswith("#") for name in keys):
        return
    assert client_keys(client_keys_text(keys)) == keys


@pytest.fixture
def told(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "api-key").write_text("sk-of-the-server-0123456789\n")
    paths = {name: str(tmp_path / name) for name in ("clients", "upstream")}
    return {"api_key": str(tmp_path / "api-key"), "client_keys": str(tmp_path / "client-keys"), "user": "root", **paths}


def test_a_key_is_made_where_the_owner_gives_none(told: dict[str, Any]) -> None:
    assert edge_on_host.key_differences(told)
    first = edge_on_host.composed(told, make=True)
    file = Path(told["client_keys"])
    assert file.stat().st_mode & 0o777 == 0o600
    ((name, key),) = client_keys(file.read_text()).items()
    assert name == "client" and len(key) >= 40
    assert edge_on_host.composed(told, make=True) == first, "a second run makes no other key"
    assert f'"Bearer {key}" "client"\n' == first[told["clients"]]


def test_keys_that_are_not_those_of_now_are_noticed(told: dict[str, Any]) -> None:
    for path, content_ in edge_on_host.composed(told, make=True).items():
        on_host.replace(path, content_.encode(), 0o600, "root")
    assert edge_on_host.key_differences(told) == []
    Path(told["clients"]).chmod(0o640)
    assert edge_on_host.key_differences(told) == [f"{told['clients']} is not made of the keys of now"]
    Path(told["clients"]).chmod(0o600)
    Path(told["api_key"]).write_text("sk-of-the-server-rotated-01\n")
    assert edge_on_host.key_differences(told) == [f"{told['upstream']} is not made of the keys of now"]


@pytest.mark.parametrize(
    "key", ['quote"and\\backslash%$#1', "{env.HOME}-0123456789", "{$HOME}-0123456789-0123", "short"]
)
def test_an_api_key_that_means_something_to_caddy_is_refused(told: dict[str, Any], key: str) -> None:
    Path(told["api_key"]).write_text(key + "\n")
    with pytest.raises(Problem) as problem:
        edge_on_host.composed(told, make=True)
    assert "Fix: " in str(problem.value) and key not in str(problem.value)


# --- the owner's files ---


def test_the_owners_keys_are_laid_down_secretly(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"one {KEY}\n")
    (file,) = deploy.owners_files(edge_of(edge_client_keys_file=str(tmp_path / "keys")))
    assert isinstance(file, files.File)
    assert (file.path, file.mode, file.secret) == (layout.EDGE_CLIENT_KEYS, "600", True)
    assert KEY not in repr(file)


@pytest.mark.parametrize("content_", [f"one {KEY} more\n".encode(), "sch\u00f6n".encode(), None])
def test_unusable_files_of_the_owner_refuse_this_host_without_showing_them(
    tmp_path: Path, content_: bytes | None
) -> None:
    path = tmp_path / "keys"
    if content_ is not None:
        path.write_bytes(content_)
    with pytest.raises(Refusal) as refusal:
        deploy.owners_files(edge_of(edge_client_keys_file=str(path)))
    assert "Fix: " in str(refusal.value) and KEY not in str(refusal.value)


# --- the package ---


def fake(folder: Path, name: str, script: str) -> None:
    """A program of that name, first in PATH, that writes its call to `calls`."""
    path = folder / name
    path.write_text(f'#!/bin/sh\necho {name} "$@" >>{folder}/calls\n{script}\n')
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that stand for apt-get and useradd, and of the units that are masked."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(install_on_host, "LOCK", str(tmp_path / "lock"))
    monkeypatch.setattr(install_on_host, "UNITS", str(tmp_path))
    fake(tmp_path, "useradd", "")
    return tmp_path


def test_a_server_of_the_distributions_own_never_comes_up(machine: Path) -> None:
    """Masked before it is unpacked; and lists that are too old are fetched once, then apt is asked again."""
    script = """test -L {0}/no-such-server.service || exit 3
test "$1" = update && touch {0}/updated
test -e {0}/updated || {{ echo "E: Unable to locate package"; exit 100; }}"""
    fake(machine, "apt-get", script.format(machine))
    install_on_host.act("no-such-server", "no-such-user")
    assert os.readlink(machine / "no-such-server.service") == "/dev/null"
    calls = [line.split() for line in (machine / "calls").read_text().splitlines()]
    assert [call[:2] for call in calls] == [
        ["apt-get", "install"], ["apt-get", "update"], ["apt-get", "install"], ["useradd", "--system"],
    ]  # fmt: skip


def test_what_apt_and_useradd_say_is_told_with_a_way_out(machine: Path) -> None:
    fake(machine, "apt-get", 'echo "E: held broken packages"; exit 100')
    with pytest.raises(Problem, match=r"found E: held broken packages; wanted no-such-server installed.*Fix: apt-get"):
        install_on_host.act("no-such-server", "no-such-user")
    fake(machine, "apt-get", "")
    fake(machine, "useradd", "echo cannot lock /etc/passwd >&2; exit 1")
    with pytest.raises(Problem, match=r"useradd: found cannot lock /etc/passwd, wanted user no-such-user\. Fix: "):
        install_on_host.act("no-such-server", "no-such-user")


# --- what is laid down ---


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="wants systemd-analyze")
@pytest.mark.parametrize("port", [443, 8443])
def test_the_unit_is_hardened_and_good_to_systemd(port: int, tmp_path: Path) -> None:
    """At most 1.5 of systemd's 10 points of exposure; the distribution's own unit has 9.0."""
    plan = planned(edge_name="kimi", edge_port=port)
    assert plan.edge
    unit = content.render("kimi-edge.service.j2", plan.edge, plan.service)
    file = tmp_path / layout.EDGE_UNIT
    file.write_text(unit)
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=15", "--no-pager", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout.splitlines()[-1]
    file.write_text(unit.replace("/usr/bin/caddy", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True)
    assert not [line for line in done.stderr.splitlines() if file.name in line], done.stderr


def test_the_unit_opens_the_planned_port_and_no_other() -> None:
    plan = planned(edge_name="kimi", edge_port=8443)
    assert plan.edge
    lines = content.render("kimi-edge.service.j2", plan.edge, plan.service).splitlines()
    assert [line for line in lines if line.startswith("SocketBind")] == [
        "SocketBindDeny=any",
        "SocketBindAllow=tcp:8443",
    ]
    assert "CapabilityBoundingSet=" in lines, "a port above 1023 needs no capability"


# --- operations ---

PLAN = planned(edge_name="kimi.example.com")
assert PLAN.edge
WANTED = content.wanted(PLAN.edge, PLAN.service)
TOLD = content.on_host(PLAN.edge)


def opened(**found: Any) -> testing.Result:
    good = {
        "files": testing.as_wanted(WANTED),
        "units": {layout.EDGE_UNIT: testing.unit()},
        "package": "2.6.2-5",
        "user": True,
        "keys": [],
        "running": [],
    }
    arguments = {"wanted": WANTED, "edge": TOLD, "unit_file": content.UNIT_FILE}
    return testing.prepare(open_edge, arguments, facts={EdgeFacts: {**good, **found}})


def programs(result: testing.Result) -> list[str]:
    """The commands by what they are about."""
    return [command if command.startswith("files: ") else command.split()[-1] for command in result.commands]


def restarts(result: testing.Result) -> bool:
    sent = result.commands[-1].split()[-2]
    return bool(json.loads(zlib.decompress(base64.b64decode(sent)))["arguments"]["restart"])


def test_an_open_edge_is_no_change() -> None:
    result = opened()
    assert (result.commands, result.refused) == ([], []) and len(result.noop) == 1


def test_an_empty_host_gets_caddy_before_files_and_files_before_the_start() -> None:
    result = opened(
        files=dict.fromkeys((item.path for item in WANTED), None),
        units={layout.EDGE_UNIT: testing.unit("inactive", "", None)},
        package=None,
        user=False,
        keys=["no API key"],
        running=None,
    )
    first, second, third = programs(result)
    assert (first, third) == (layout.EDGE_USER, layout.EDGE_UNIT) and second.startswith("files: ")
    assert restarts(result)


@pytest.mark.parametrize(
    ("found", "restart"),
    [
        ({"keys": ["clients is not made of the keys of now"]}, False),
        ({"running": ["it runs another configuration"]}, False),
        ({"running": ["it shows another certificate"]}, False),
        ({"running": ["it runs a Caddy that has been replaced since"]}, True),
        ({"units": {layout.EDGE_UNIT: testing.unit("failed")}, "running": None}, True),
        ({"units": {layout.EDGE_UNIT: testing.unit(enabled="disabled")}}, False),
        ({"units": {layout.EDGE_UNIT: testing.unit(NeedDaemonReload="yes")}}, True),
    ],
)
def test_answers_are_cut_only_where_a_reload_is_not_enough(found: dict[str, Any], restart: bool) -> None:
    result = opened(**found)
    assert programs(result) == [layout.EDGE_UNIT]
    assert restarts(result) == restart


def test_a_changed_caddyfile_is_a_reload_and_a_changed_unit_a_restart() -> None:
    for path, restart in ((layout.EDGE_CADDYFILE, False), (content.UNIT_FILE, True)):
        state = {**testing.as_wanted(WANTED), path: testing.file("other")}
        result = opened(files=state)
        assert set(result.files) == {path}
        assert restarts(result) == restart


def test_nothing_secret_is_in_a_command() -> None:
    state = {**testing.as_wanted(WANTED), layout.EDGE_CLIENT_KEYS: None}
    (secret,) = content.client_key_files(f"one {KEY}\n")
    arguments = {"wanted": [*WANTED, secret], "edge": TOLD, "unit_file": content.UNIT_FILE}
    found = {"files": state, "units": {layout.EDGE_UNIT: testing.unit()}, "package": "2", "user": True, "keys": []}
    result = testing.prepare(open_edge, arguments, facts={EdgeFacts: {**found, "running": []}})
    assert set(result.files) == {layout.EDGE_CLIENT_KEYS}
    assert KEY not in "".join([*result.commands, *result.log, repr(result.files)])


def closed(state: dict[str, Any]) -> testing.Result:
    found = {"files": state, "units": {layout.EDGE_UNIT: testing.unit()}}
    arguments = {"unit": layout.EDGE_UNIT, "unit_file": content.UNIT_FILE}
    return testing.prepare(close_edge, arguments, facts={EdgeFacts: found})


def test_a_withdrawn_name_closes_the_edge() -> None:
    result = closed({content.UNIT_FILE: testing.file("unit"), layout.EDGE: testing.directory()})
    assert result.commands[0] == f"systemctl disable --now -- {layout.EDGE_UNIT}"
    assert set(result.files) == {content.UNIT_FILE, layout.EDGE}
    assert result.commands[-1] == "systemctl daemon-reload"


def test_where_there_was_no_edge_nothing_is_done() -> None:
    result = closed({content.UNIT_FILE: None, layout.EDGE: None})
    assert result.commands == [] and len(result.noop) == 1
