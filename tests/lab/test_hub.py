"""The https services, on the loopback: the hub stand-in's answers and faults, and what its log never holds."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPMessage, HTTPResponse, IncompleteRead
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.lab import certificates, hub
from tests.lab.services import Server
from tests.lab.settings import Lab

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
WEIGHTS = bytes(range(256)) * 8192  # 2 MiB: an LFS file
NAME = "some-owner/some-model"


@dataclass
class Said:
    code: int
    headers: HTTPMessage
    body: bytes

    def json(self) -> object:
        return json.loads(self.body)


@dataclass
class Services:
    """A running server, its folder, and a client that believes in its authority only."""

    port: int
    folder: Path
    trust: ssl.SSLContext

    def get(self, host: str, path: str, method: str = "GET", **headers: str) -> Said:
        """One request. The server logs it after the answer has gone out: returns when it has."""
        before = len(self.log())
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=10) as plain,
            self.trust.wrap_socket(plain, server_hostname=host) as connection,
        ):
            lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            answer = HTTPResponse(connection, method=method)
            answer.begin()
            said = Said(answer.status, answer.headers, answer.read())
        until = time.monotonic() + 10
        while len(self.log()) == before and time.monotonic() < until:
            time.sleep(0.005)
        return said

    def file(self, name: str, **headers: str) -> Said:
        """As a client does: ask the hub, follow to the other host without the Authorization header."""
        answer = self.get(hub.FRONT, f"/{NAME}/resolve/main/{name}", **headers)
        if answer.code != 302:
            return answer
        there = urlsplit(answer.headers["Location"])
        kept = {key: value for key, value in headers.items() if key != "Authorization"}
        return self.get(str(there.hostname), f"{there.path}?{there.query}", **kept)

    def control(self, **values: object) -> None:
        new = self.folder / "hub.json.new"
        new.write_text(json.dumps(values))
        new.rename(self.folder / "hub.json")

    def log(self) -> list[dict[str, object]]:
        path = self.folder / "requests.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    certificate = certificates.authority(Lab("test", "10.0.0", tmp_path / "cache"))
    repository = tmp_path / "repository"
    (repository / "compute").mkdir(parents=True)
    (repository / "compute" / "Packages").write_text("Package: cuda\n")
    (tmp_path / "secret").write_text("outside of the repository")
    model = tmp_path / "hub" / NAME
    (model / "folder").mkdir(parents=True)
    (model / "config.json").write_text("{}\n")
    (model / "folder" / "weights.bin").write_bytes(WEIGHTS)
    (model / "small.safetensors").write_bytes(b"small")
    served = hub.Hub([tmp_path / "hub"], tmp_path / "hub.json")
    server = Server("127.0.0.1", 0, certificate, repository.resolve(), served, tmp_path / "requests.jsonl")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Services(server.server_address[1], tmp_path, ssl.create_default_context(cafile=certificate / "ca.crt"))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_listing_names_the_revision_and_every_digest(services: Services) -> None:
    info = services.get(hub.FRONT, f"/api/models/{NAME}").json()
    assert isinstance(info, dict) and len(info["sha"]) == 40
    tree = services.get(hub.FRONT, f"/api/models/{NAME}/tree/{info['sha']}?recursive=True").json()
    assert isinstance(tree, list)
    by_path = {entry["path"]: entry for entry in tree}
    assert by_path["folder/weights.bin"]["lfs"]["oid"] == hashlib.sha256(WEIGHTS).hexdigest()
    assert by_path["small.safetensors"]["lfs"]["oid"] == hashlib.sha256(b"small").hexdigest()
    assert (
        by_path["config.json"]["oid"] == hashlib.sha1(b"blob 3\0{}\n").hexdigest()
        and "lfs" not in by_path["config.json"]
    )


def test_a_changed_file_changes_the_revision(services: Services) -> None:
    before = services.get(hub.FRONT, f"/api/models/{NAME}").json()
    (services.folder / "hub" / NAME / "config.json").write_text('{"changed": true}\n')
    after = services.get(hub.FRONT, f"/api/models/{NAME}").json()
    assert before != after
    assert isinstance(before, dict)
    assert services.get(hub.FRONT, f"/{NAME}/resolve/{before['sha']}/config.json").code == 404


def test_weights_come_from_the_other_host_whole_and_in_ranges(services: Services) -> None:
    assert services.file("folder/weights.bin").body == WEIGHTS
    part = services.file("folder/weights.bin", Range="bytes=1000-1999")
    assert (part.code, part.body) == (206, WEIGHTS[1000:2000])
    assert part.headers["Content-Range"] == f"bytes 1000-1999/{len(WEIGHTS)}"
    assert services.file("folder/weights.bin", Range=f"bytes={len(WEIGHTS)}-").code == 416


def test_a_signed_address_expires_and_cannot_be_forged(services: Services) -> None:
    services.control(signed_s=0.2)
    there = urlsplit(services.get(hub.FRONT, f"/{NAME}/resolve/main/folder/weights.bin").headers["Location"])
    assert services.get(hub.CDN, f"{there.path}?{there.query}", method="HEAD").code == 200
    later = f"{time.time() + 60:.3f}"
    forged = there.query.replace(there.query.split("=")[1].split("&")[0], later)
    assert services.get(hub.CDN, f"{there.path}?{forged}").code == 403
    time.sleep(0.3)
    assert services.get(hub.CDN, f"{there.path}?{there.query}").code == 403


def test_a_gated_model_wants_the_token_and_the_log_does_not_have_it(services: Services) -> None:
    services.control(token="hf_secret")
    refused = services.get(hub.FRONT, f"/api/models/{NAME}")
    assert (refused.code, refused.headers["X-Error-Code"]) == (401, "GatedRepo")
    assert services.file("folder/weights.bin", Authorization="Bearer hf_wrong").code == 401
    assert services.file("folder/weights.bin", Authorization="Bearer hf_secret").body == WEIGHTS
    log = services.log()
    assert [entry["authorization"] for entry in log if entry["host"] == hub.CDN] == [False]
    assert "hf_secret" not in (services.folder / "requests.jsonl").read_text()


def test_each_fault_strikes_as_often_as_it_was_told(services: Services) -> None:
    fault = {"file": "weights.bin", "offset": 1_500_000, "count": 1}
    services.control(faults=[{**fault, "kind": "corrupt"}])
    spoiled = services.file("folder/weights.bin").body
    assert [place for place in range(len(WEIGHTS)) if spoiled[place] != WEIGHTS[place]] == [1_500_000]
    assert services.file("folder/weights.bin").body == WEIGHTS

    services.control(faults=[{**fault, "kind": "cut"}])
    with pytest.raises((IncompleteRead, ssl.SSLError, ConnectionError)):
        services.file("folder/weights.bin")
    assert services.file("folder/weights.bin").body == WEIGHTS

    services.control(faults=[{**fault, "kind": "503", "count": 2}])
    assert [services.file("folder/weights.bin").code for _ in range(3)] == [503, 503, 200]

    services.control(faults=[{**fault, "kind": "stall"}])
    with pytest.raises(TimeoutError):
        services.file("folder/weights.bin")


def test_a_rate_is_kept(services: Services) -> None:
    services.control(rate=4_000_000)
    began = time.monotonic()
    services.file("folder/weights.bin")
    assert 0.4 < time.monotonic() - began < 3


def test_what_is_not_there_is_said_in_the_hubs_words(services: Services) -> None:
    cases = {
        "/api/models/nobody/nothing": "RepoNotFound",
        f"/{NAME}/resolve/main/none.json": "EntryNotFound",
        f"/{NAME}/resolve/{'0' * 40}/config.json": "RevisionNotFound",
        f"/{NAME}/resolve/main/../../../secret": "EntryNotFound",
    }
    for path, word in cases.items():
        answer = services.get(hub.FRONT, path)
        assert (answer.code, answer.headers["X-Error-Code"]) == (404, word), path


def test_the_repository_serves_its_folder_and_nothing_else(services: Services) -> None:
    host = "developer.download.nvidia.com"
    assert services.get(host, "/compute/Packages").body == b"Package: cuda\n"
    assert services.get(host, "/../secret").code == 404
    assert services.get(host, "/%2e%2e/secret").code == 404
    again = services.get(host, "/compute/Packages").headers["Last-Modified"]
    assert services.get(host, "/compute/Packages", **{"If-Modified-Since": again}).code == 304


def test_every_request_is_a_line_with_the_bytes_that_went_out(services: Services) -> None:
    services.file("folder/weights.bin", Range="bytes=0-9")
    (entry,) = [entry for entry in services.log() if entry["host"] == hub.CDN]
    assert (entry["code"], entry["sent"], entry["range"]) == (206, 10, "bytes=0-9")
