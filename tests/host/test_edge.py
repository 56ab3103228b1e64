"""Clients get over TLS what the plan serves, with a key of theirs; nobody gets anything else.

Asked on the node itself, at the address that clients use. What other machines reach is for tests/proof to say, in a
network where every port can be tried.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kit import files
from kit.program import probe_command
from node import layout
from node.edge import Edge
from node.plan import Plan
from roles.edge import content
from roles.edge.facts import EdgeFacts

COLLECTOR = Path(__file__).parent / "edge_seen_on_host.py"
MEND = "Fix: run deploy.py"
# What would hand the node over: to load, stop, empty, profile, or read the API key.
FORBIDDEN = (
    "GET /server_info", "GET /get_server_info", "GET /metrics", "POST /flush_cache", "POST /generate",
    "POST /update_weights_from_disk", "POST /load_lora_adapter_from_tensors", "POST /start_profile", "GET /docs",
    "POST /v1/models", "GET //v1/models", "GET /v1/models/../../server_info", "GET /v1/%2e%2e/server_info", "GET /",
)  # fmt: skip


@pytest.fixture(scope="module")
def edge(plan: Plan) -> Edge:
    if plan.edge is None:
        pytest.skip("the inventory names no edge: edge_name is not set, the server stays on loopback")
    return plan.edge


def _ask(host: Any, source: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    answer = host.run(probe_command(source, arguments).get_raw_value())
    assert answer.rc == 0, f"the host gives no answer: {answer.stderr.strip() or answer.stdout.strip()}"
    collected = json.loads(answer.stdout.splitlines()[-1])
    assert "found" in collected, f"the host cannot be looked at: {collected}"
    found: dict[str, Any] = collected["found"]
    return found


@pytest.fixture(scope="module")
def state(host: Any, plan: Plan, edge: Edge) -> dict[str, Any]:
    """Files, units, and how what runs differs from them: what the role itself goes by."""
    paths = [item.path for item in content.wanted(edge, plan.service)]
    paths += [layout.KEYS, layout.EDGE_CLIENT_KEYS, *content.SECRETS]
    paths += [layout.EDGE_CERTIFICATE, layout.EDGE_CERTIFICATE_KEY] if edge.certificate_file else []
    arguments = {"paths": paths, "units": [layout.EDGE_UNIT], "edge": content.on_host(edge)}
    return _ask(host, EdgeFacts.source(), arguments)


@pytest.fixture(scope="module")
def seen(host: Any, plan: Plan, edge: Edge) -> dict[str, Any]:
    """What a client gets."""
    arguments = {
        "unit": layout.EDGE_UNIT,
        "program": content.CADDY,
        "name": edge.name,
        "address": content.reachable(edge.address),
        "port": edge.port,
        "trusted": layout.EDGE_CERTIFICATE if edge.certificate_file else layout.EDGE_ROOT_CERTIFICATE,
        "api_key": layout.API_KEY,
        "client_keys": layout.EDGE_CLIENT_KEYS,
        "question": plan.service.questions[0].body(plan.service.name),
        "forbidden": [request.split() for request in FORBIDDEN],
        "seconds": 300,
    }
    return _ask(host, COLLECTOR, arguments)


def test_the_edge_is_active_and_comes_back_after_a_boot(state: dict[str, Any]) -> None:
    """A node whose server runs behind a closed door serves nobody."""
    unit = state["units"][layout.EDGE_UNIT]
    wrong = (
        f"{layout.EDGE_UNIT} is {unit['ActiveState']} ({unit['Result']}), {unit['UnitFileState'] or 'not installed'}"
    )
    ready = (unit["ActiveState"], unit["UnitFileState"], unit["NeedDaemonReload"]) == ("active", "enabled", "no")
    assert ready, f"{wrong}, wanted active and enabled. {MEND}; journalctl -u {layout.EDGE_UNIT} says why"


def test_it_runs_what_the_files_say(state: dict[str, Any], plan: Plan, edge: Edge) -> None:
    """Caddy's configuration can be changed while it runs, past every file: so the process itself is asked."""
    wrong = files.compare(state["files"], content.wanted(edge, plan.service))
    assert not wrong, "; ".join(f"{path}: {reason}" for path, reason in wrong.items()) + f". {MEND}"
    assert state["running"] is not None, f"{layout.EDGE_UNIT} has no process. {MEND}"
    assert not state["running"], f"{layout.EDGE_UNIT}: {'; '.join(state['running'])}. {MEND}"


def test_its_keys_are_those_of_now_and_nobody_elses_to_read(state: dict[str, Any], edge: Edge) -> None:
    """A key taken out of the owner's file must be worth nothing; and who can read these files can be any client."""
    assert not state["keys"], f"{'; '.join(state['keys'])}. {MEND}"
    user = layout.EDGE_USER
    wanted = {layout.KEYS: ("700", "root"), layout.EDGE_CLIENT_KEYS: ("600", "root")}
    wanted |= dict.fromkeys(content.SECRETS, ("600", user))
    if edge.certificate_file:
        wanted[layout.EDGE_CERTIFICATE_KEY] = ("600", user)
    for path, (mode, owner) in wanted.items():
        found = state["files"][path]
        assert found, f"{path}: missing, wanted mode {mode} of {owner}. {MEND}"
        now = (found["mode"], found["user"])
        assert now == (mode, owner), f"{path}: found mode {now[0]} of {now[1]}, wanted {mode} of {owner}. {MEND}"


def test_keys_stand_in_no_arguments_environment_or_log(seen: dict[str, Any]) -> None:
    """Every user of the machine reads the process list, and logs are copied to where nobody thinks of keys."""
    assert seen["keys"], f"{layout.EDGE_CLIENT_KEYS}: found no key, wanted those of clients. {MEND}"
    assert not seen["told_in"], (
        f"{'; '.join(seen['told_in'])}. Fix: remove it there, then change that key (docs/security.md) and run deploy.py"
    )


def test_it_listens_where_told_and_nowhere_else(seen: dict[str, Any], edge: Edge) -> None:
    """Caddy by itself opens port 80, HTTP/3 on UDP, and port 2019 to be administered; its package starts another."""
    found = {(each["kind"], each["address"], each["port"]) for each in seen["listening"]}
    addresses = [edge.address] if edge.address else ["::", "0.0.0.0"]
    wanted = [{("tcp", address, edge.port)} for address in addresses]
    assert found in wanted, f"caddy listens on {sorted(found) or 'nothing'}, wanted {wanted[0]}. {MEND}"


def test_its_process_may_do_little(seen: dict[str, Any], edge: Edge) -> None:
    """Strangers' bytes reach it first: a user of its own, one capability at most, system calls filtered."""
    process = seen["process"]
    assert process, f"{layout.EDGE_UNIT} has no process. {MEND}"
    bind_below_1024 = 1 << 10  # CAP_NET_BIND_SERVICE
    allowed = bind_below_1024 if edge.port < 1024 else 0
    wanted = {"user": layout.EDGE_USER, "capabilities": f"{allowed:016x}", "no_new_privileges": "1", "seccomp": "2"}
    assert process == wanted, f"found {process}, wanted {wanted}. {MEND}"


def test_its_certificate_is_good_for_its_name(seen: dict[str, Any], edge: Edge) -> None:
    """Name, dates and chain, as a client sees them that trusts the edge's authority and nobody else."""
    assert seen["trust"] == "", f"{edge.origin}: {seen['trust']}. {MEND}; an expired certificate: give a new one"


def test_a_client_gets_a_right_answer(seen: dict[str, Any], plan: Plan, edge: Edge) -> None:
    """All the way: TLS, a client's key exchanged for the server's, a sampled answer."""
    expected, answer = plan.service.questions[0].expected[0], seen["answer"]
    assert answer["status"] == 200, f"{edge.origin} answers {answer['status']}: {answer['body'][:200]}. {MEND}"
    said = json.loads(answer["body"])["choices"][0]["message"]["content"] or ""
    assert expected in said, f"{edge.origin} answers {said!r}, wanted {expected!r} in it. {MEND}"
    models = [model["id"] for model in json.loads(seen["models"]["body"])["data"]]
    assert models == [plan.service.name], f"{edge.origin}/v1/models: found {models}, wanted {plan.service.name}. {MEND}"


def test_an_answer_streams(seen: dict[str, Any], edge: Edge) -> None:
    """Each token when it is made: a proxy that buffers looks like a server that hangs."""
    instants = {round(at / 0.002) for at in seen["stream"]}
    assert len(instants) >= 3, (
        f"{edge.origin}: events of a stream came {seen['stream']} seconds after the first. {MEND}"
    )


@pytest.mark.parametrize("whose", ["no key", "another key", "the API key"])
def test_nobody_else_gets_in(seen: dict[str, Any], edge: Edge, whose: str) -> None:
    """The server's own key opens nothing at the edge, so that one that leaked is of no use outside."""
    status = seen["statuses"][whose]
    assert status == 401, f"{edge.origin}: found {status} with {whose}, wanted 401. {MEND}"


@pytest.mark.parametrize("request_", FORBIDDEN)
def test_what_is_not_served_is_not_there(seen: dict[str, Any], edge: Edge, request_: str) -> None:
    """With a good key too: SGLang's other paths load weights, unpickle data and show its API key."""
    status = seen["statuses"][request_]
    assert status == 404, f"{edge.origin}: found {status} for {request_}, wanted 404. {MEND}"
