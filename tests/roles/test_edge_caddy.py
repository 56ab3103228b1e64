"""What the edge's Caddyfile lets through, asked of the distribution's own Caddy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node import edge as edge_module
from node.edge import SERVED
from node.plan import Plan
from node.systems import SYSTEMS
from roles.edge import content, edge_on_host
from tests.roles.caddy_for_tests import API_KEY, STREAM_EVENTS, STREAM_PAUSE, RunningEdge, caddy, running
from tests.roles.test_edge import planned

pytestmark = pytest.mark.slow  # wants the package caddy

KEY, OTHER = "sk-of-client-0123456789", "sk-of-another-0123456789"
# Of SGLang's own routes, those that load, unpickle, stop, empty or tell; and the documentation of all of them.
KEPT_IN = (
    "/server_info", "/get_server_info", "/get_model_info", "/model_info", "/metrics", "/flush_cache", "/generate",
    "/encode", "/classify", "/invocations", "/vertex_generate", "/update_weights_from_disk",
    "/update_weights_from_tensor", "/load_lora_adapter", "/load_lora_adapter_from_tensors", "/start_profile",
    "/stop_profile", "/abort_request", "/pause_generation", "/release_memory_occupation", "/open_session",
    "/close_session", "/set_trace_level", "/v1/rerank", "/v1/embeddings", "/v1/score", "/health_generate", "/ready",
    "/docs", "/openapi.json", "/",
)  # fmt: skip
TRICKS = (
    "//v1/models", "/v1//models", "/V1/models", "/v1/models/", "/v1/./models", "/v1/../v1/models",
    "/v1/models/../models", "/v1%2fmodels", "/%761/models", "/v1/models%00", "/v1/models%20", "/v1/models;x",
    "/v1/models?x=1", "/v1/models?", "/v1/models#", "/v1/models/../../server_info", "/v1/..%2fserver_info",
    "/v1/models%0d%0aX:y", "http://{name}/server_info", "/v1/models\\..\\server_info", "/health/../flush_cache",
    "/healthz",
)  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(edge_name="edge.lab")


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> Iterator[RunningEdge]:
    assert plan.edge
    with running(tmp_path_factory.mktemp("edge"), plan.edge, plan, one=KEY) as made:
        yield made


def test_what_is_served_passes_with_the_servers_own_key(edge: RunningEdge) -> None:
    """The client's key ends at the edge, and the server's is never seen outside."""
    for served in SERVED:
        edge.upstream.seen.clear()
        assert edge.ask(str(served), KEY, b"{}" if served.method == "POST" else b"", "Cookie: a=b\r\n") == 200, served
        (seen,) = edge.upstream.seen
        assert seen["line"] == f"{served} HTTP/1.1"
        assert seen["headers"]["Authorization"] == f"Bearer {API_KEY}"
        assert KEY not in str(seen) and "Cookie" not in seen["headers"]


@pytest.mark.parametrize("path", (*KEPT_IN, *TRICKS))
def test_everything_else_is_not_there(edge: RunningEdge, path: str) -> None:
    """With a good key, by any method: 404, or 400 for what is no request; and the server hears nothing of it."""
    edge.upstream.seen.clear()
    target = path.format(name=edge.edge.name)
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
        assert edge.ask(f"{method} {target}", KEY) in (400, 404), f"{method} {target}"
    assert edge.upstream.seen == []


@pytest.mark.parametrize("served", SERVED, ids=str)
def test_only_its_own_method_is_served(edge: RunningEdge, served: edge_module.Served) -> None:
    edge.upstream.seen.clear()
    for method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "get", "X"} - {served.method}:
        assert edge.ask(f"{method} {served.path}", KEY, headers="X-HTTP-Method-Override: GET\r\n") in (400, 404), method
    assert edge.upstream.seen == []


@pytest.mark.parametrize(
    "authorization",
    [
        "", "Authorization: \r\n", "Authorization: Bearer \r\n", f"Authorization: {KEY}\r\n",
        f"Authorization: Basic {KEY}\r\n", f"Authorization: Bearer {KEY}x\r\n", f"Authorization: Bearer {KEY[:-1]}\r\n",
        f"Authorization: Bearer {KEY.upper()}\r\n", f"Authorization: Bearer x, Bearer {KEY}\r\n",
        f"Authorization: Bearer {KEY}\r\nAuthorization: Bearer {KEY}\r\n", f"Authorization: Bearer {API_KEY}\r\n",
        f"X-Api-Key: {KEY}\r\n", f"Cookie: Authorization=Bearer {KEY}\r\n",
    ],
)  # fmt: skip
def test_nobody_passes_without_a_key(edge: RunningEdge, authorization: str) -> None:
    """The server's own key is none of a client's."""
    edge.upstream.seen.clear()
    for served in SERVED:
        assert edge.ask(str(served), None, headers=authorization) == 401, served
    assert edge.upstream.seen == []


def test_another_host_is_not_answered(edge: RunningEdge) -> None:
    """The name of the certificate, the Host header and what is served belong together."""
    edge.upstream.seen.clear()
    head = f"GET /v1/models HTTP/1.1\r\nHost: other\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
    assert edge.raw(head.encode()).status == 421
    target = f"GET http://other/v1/models HTTP/1.1\r\nHost: {edge.edge.name}\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    assert edge.raw(target.encode()).status == 421
    trusting = ssl._create_unverified_context()
    with pytest.raises(ssl.SSLError):
        edge.connect(trusting, "other")
    assert edge.upstream.seen == []


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_only_tls_of_today(edge: RunningEdge) -> None:
    with socket.create_connection(("127.0.0.1", edge.edge.port), timeout=10) as plain:
        plain.sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
        assert b" 400 " in plain.recv(1000).splitlines()[0]
    old = ssl._create_unverified_context()
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        edge.connect(old)
    with edge.connect() as secure:
        assert secure.version() == "TLSv1.3"


@pytest.mark.parametrize(
    ("system", "spoken"), [("debian 12", "http/1.1"), ("debian 13", "h2"), ("ubuntu 24.04", "http/1.1")]
)
def test_http_2_only_where_the_systems_caddy_is_sound(tmp_path: Path, system: str, spoken: str) -> None:
    """Two flaws of older Go let anybody exhaust the process over HTTP/2, with no key at all."""
    (on,) = (each.as_system() for each in SYSTEMS if str(each) == system)
    plan = planned(on, edge_name="edge.lab")
    assert plan.edge
    with running(tmp_path, plan.edge, plan, one=KEY) as edge:
        context = edge.authority
        context.set_alpn_protocols(["h2", "http/1.1"])
        with edge.connect(context) as secure:
            assert secure.selected_alpn_protocol() == spoken


def test_a_stream_arrives_as_it_is_made(edge: RunningEdge) -> None:
    times = [at for at, _ in edge.stream(KEY)]
    assert len(times) == STREAM_EVENTS
    assert times[0] < 2 * STREAM_PAUSE
    assert times[-1] - times[0] > 0.8 * STREAM_PAUSE * (STREAM_EVENTS - 1)


def test_a_server_is_told_that_its_client_is_gone(edge: RunningEdge) -> None:
    """Else it would go on generating, for minutes, what nobody reads."""
    edge.upstream.gone_after = None
    stream = edge.stream(KEY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    time.sleep(4 * STREAM_PAUSE)
    assert edge.upstream.gone_after is not None and edge.upstream.gone_after < STREAM_EVENTS - 1


def test_keys_change_without_cutting_an_answer(edge: RunningEdge) -> None:
    """The old key is worth nothing from the reload on, and an answer under way goes on to its end."""
    stream = edge.stream(KEY)
    next(stream)
    edge.write(two=OTHER)
    assert edge_on_host.loaded(edge.admin) != adapted(edge)
    edge.reload()
    try:
        assert edge_on_host.loaded(edge.admin) == adapted(edge)
        assert edge.ask("GET /v1/models", KEY) == 401
        assert edge.ask("GET /v1/models", OTHER) == 200
        assert len(list(stream)) == STREAM_EVENTS - 1
    finally:
        edge.write(one=KEY)
        edge.reload()


def adapted(edge: RunningEdge) -> object:
    """The configuration that the files mean. Fails where Caddy has anything to say of them."""
    command = [caddy(), "adapt", "--config", str(edge.caddyfile), "--adapter", "caddyfile"]
    done = subprocess.run(command, env=edge.environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_names_of_keys_are_never_taken_for_something_else(tmp_path: Path, plan: Plan) -> None:
    """Caddy reads true, 0 and - in a map as other things than text."""
    names = ("true", "false", "0", "1.5", "1-", "nil", "default", "inf")
    assert plan.edge
    keys = {name: f"sk-key-of-client-{number}" for number, name in enumerate(names)}
    with running(tmp_path, plan.edge, plan, **keys) as edge:
        for name, key in keys.items():
            assert edge.ask("GET /v1/models", key) == 200, name
            assert f'"user_id":"{name}"' in edge.log.splitlines()[-1]
        assert edge.ask("GET /v1/models", KEY) == 401


def test_too_much_is_refused(edge: RunningEdge) -> None:
    """A body that says its length, one that does not, and a header."""
    limit = edge.edge.request_bytes
    edge.upstream.seen.clear()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {edge.edge.name}\r\nAuthorization: Bearer {KEY}\r\n"
    assert edge.raw(f"{head}Content-Length: {limit + 1}\r\n\r\n".encode()).status == 413
    assert edge.upstream.seen == []
    assert edge.ask("POST /v1/completions", KEY, b" " * (limit // 8)) == 200
    with edge.connect() as secure, contextlib.suppress(OSError):
        secure.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(limit // 2**20 + 1):
            secure.sendall(b"100000\r\n" + b" " * 2**20 + b"\r\n")
        secure.sendall(b"0\r\n\r\n")
    assert all(seen["bytes"] <= limit for seen in edge.upstream.seen)
    assert edge.ask("GET /v1/models", KEY, headers=f"X: {'x' * 40_000}\r\n") == 431


def test_an_answer_may_take_longer_than_a_request(tmp_path: Path, plan: Plan) -> None:
    """Only sending is bounded in time."""
    assert plan.edge
    with running(tmp_path, dataclasses.replace(plan.edge, request_seconds=1), plan, one=KEY) as edge:
        assert len(list(edge.stream(KEY))) == STREAM_EVENTS
        began = time.monotonic()
        with edge.connect() as secure:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {edge.edge.name}\r\nAuthorization: Bearer {KEY}\r\n"
            secure.sendall(f"{head}Content-Length: 100\r\n\r\nhalf".encode())
            while secure.recv(1000):
                pass
        assert time.monotonic() - began < 5


def test_an_absent_server_is_said(tmp_path: Path, plan: Plan) -> None:
    assert plan.edge
    with running(tmp_path, plan.edge, plan, one=KEY) as edge:
        edge.upstream.socket.close()
        assert edge.ask("GET /v1/models", KEY) == 502
        assert edge.ask("GET /v1/models", None) == 401


def test_the_log_says_who_asked_what_and_holds_no_secret(edge: RunningEdge) -> None:
    edge.ask("GET /v1/models", KEY, headers="X-Private: of-a-header\r\n")
    assert '"user_id":"one"' in edge.log.splitlines()[-1] and '"uri":"/v1/models"' in edge.log.splitlines()[-1]
    edge.ask("GET /v1/models?api_key=in-the-address", KEY)
    assert '"uri":"/v1/models?..."' in edge.log.splitlines()[-1]
    edge.ask("POST /v1/completions", KEY, b'{"prompt": "of-a-body"}')
    edge.ask("GET /v1/models", "sk-mistyped-0123456789")
    assert '"user_id":""' in edge.log.splitlines()[-1]
    for secret in (KEY, OTHER, API_KEY, "in-the-address", "of-a-header", "of-a-body", "sk-mistyped", "Bearer"):
        assert secret not in edge.log


def test_no_secret_is_readable_by_others(edge: RunningEdge) -> None:
    """Nor in the arguments and the environment of the process. What Caddy saves of its configuration is its own too."""
    open_to_others = [path for path in edge.folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    for path in open_to_others:
        text = path.read_text(errors="replace")
        assert path.name in ("api-key", "client-keys", "clients", "upstream") or not any(
            secret in text for secret in (KEY, OTHER, API_KEY)
        ), path
    assert KEY not in edge.caddyfile.read_text() and API_KEY not in edge.caddyfile.read_text()
    assert edge.process
    for name in ("cmdline", "environ"):
        seen = Path(f"/proc/{edge.process.pid}/{name}").read_text(errors="replace")
        assert not any(secret in seen for secret in (KEY, OTHER, API_KEY))


def test_it_listens_on_one_port_and_speaks_to_the_server_only(edge: RunningEdge) -> None:
    """No port 80, no HTTP/3, no port for its own administration."""
    assert edge.process
    shown = subprocess.run(["ss", "-Hltunp"], capture_output=True, text=True, check=True).stdout
    mine = [line.split()[4] for line in shown.splitlines() if f"pid={edge.process.pid}," in line]
    assert mine == [f"127.0.0.1:{edge.edge.port}"]
    assert os.stat(edge.admin).st_mode & 0o077 == 0


def test_a_certificate_of_the_owner_is_served_and_renewed_by_a_reload(tmp_path: Path, plan: Plan) -> None:
    assert plan.edge
    own = dataclasses.replace(plan.edge, certificate_file="given", key_file="given")
    certificate, key = tmp_path / "certificate", tmp_path / "certificate_key"
    first = certify(certificate, key, "edge.lab")
    assert content.certificate_problem(certificate, key, "edge.lab") is None
    with running(tmp_path, own, plan, one=KEY) as edge:
        assert edge_on_host.asked("edge.lab", "127.0.0.1", edge.edge.port) == (first, 401)
        assert edge_on_host.first_certificate(str(certificate)) == first
        second = certify(certificate, key, "edge.lab")
        assert edge_on_host.asked("edge.lab", "127.0.0.1", edge.edge.port)[0] == first != second
        edge.reload()
        for _ in range(5):
            assert edge_on_host.asked("edge.lab", "127.0.0.1", edge.edge.port) == (second, 401)
        assert "acme" not in edge.log.lower() and not (tmp_path / "caddy/pki").exists()


def certify(certificate: Path, key: Path, name: str, days: int = 2) -> bytes:
    """A certificate signed by itself, and its key; as DER."""
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", str(days),
        "-subj", "/CN=kimi-nodes test", "-addext", f"subjectAltName=DNS:{name}",
        "-keyout", str(key), "-out", str(certificate),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return ssl.PEM_cert_to_DER_cert(certificate.read_text())


def test_a_certificate_that_cannot_work_is_refused_before_it_is_laid_down(tmp_path: Path) -> None:
    certificate, key, other = tmp_path / "certificate", tmp_path / "key", tmp_path / "other"
    certify(tmp_path / "another", other, "edge.lab")
    certify(certificate, key, "edge.lab")
    problem = content.certificate_problem
    assert problem(certificate, key, "edge.lab") is None
    assert "Hostname mismatch" in str(problem(certificate, key, "other.lab"))
    assert "mismatch" in str(problem(certificate, other, "edge.lab")).lower()
    assert "No such file" in str(problem(certificate, tmp_path / "none", "edge.lab"))
    assert problem(key, key, "edge.lab")
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:secret", "-out", tmp_path / "locked"],
        check=True, capture_output=True,
    )  # fmt: skip
    assert problem(certificate, tmp_path / "locked", "edge.lab")
