"""The weights agent against the hub stand-in, with real aria2: whatever goes wrong, nothing wrong is ever published."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from loopback_hub import BEHIND, Answer, LoopbackHub, loopback_hub

from files.tools.weights import aria2, configuration, errors, receipt
from files.tools.weights import manifest as manifest_file
from files.tools.weights.gather import Gather
from files.tools.weights.hub import Hub
from files.tools.weights.status import Status
from node.manifest import File, Manifest

PROJECT = Path(__file__).resolve().parents[2]
AGENT = PROJECT / "files" / "tools" / "weights_agent.py"
PYTHON = "/usr/bin/python3"
MIB = 1 << 20
SHARDS, SHARD = 4, 6 * MIB
TOKEN = "hf_test_token_that_must_not_leak"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("aria2c") is None, reason="wants aria2c (apt-get install aria2)"),
]


class Node:
    """A weights directory on this machine and the agent's commands for it."""

    def __init__(self, folder: Path, hub: LoopbackHub, repository: Path) -> None:
        self.folder, self.hub = folder, hub
        name = f"{repository.parent.name}/{repository.name}"
        self.revision = hub.hub.listing(repository)[0]
        self.repository = repository
        self.manifest = Manifest(name, self.revision, tuple(entries(repository)))
        self.directory = folder / "weights"
        self.snapshot = self.directory / name / self.revision
        self.staging = self.directory / ".staging" / f"{name.replace('/', '--')}-{self.revision}"
        self.environment = {"PATH": os.environ["PATH"]}
        self.directory.mkdir()
        (folder / "manifest.json").write_text(self.manifest.dumps())
        self.values: dict[str, Any] = {
            "repository": name,
            "revision": self.revision,
            "hub": hub.address,
            "directory": str(self.directory),
            "snapshot": str(self.snapshot),
            "staging": str(self.staging),
            "manifest": str(folder / "manifest.json"),
            "status": str(folder / "status.json"),
            "user": "nobody",
            "token_file": "",
            "client": "",
            "sharing": "",
            "files_at_once": 2,
            "connections_per_file": 2,
            "stall_seconds": 2,
        }
        self.running: list[subprocess.Popen[str]] = []
        self.configure()

    def configure(self, **values: Any) -> None:
        self.values.update(values)
        (self.folder / "configuration.json").write_text(json.dumps(self.values))

    def start(self, *command: str) -> subprocess.Popen[str]:
        argv = [PYTHON, "-sE", str(AGENT), *command, str(self.folder / "configuration.json")]
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment
        )
        self.running.append(process)
        return process

    def run(self, *command: str, limit: float = 90) -> subprocess.CompletedProcess[str]:
        process = self.start(*command)
        out, err = process.communicate(timeout=limit)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def fetch(self) -> subprocess.CompletedProcess[str]:
        return self.run("fetch")

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        return found

    def stop(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def assert_whole(self) -> None:
        """Every byte is the manifest's, nothing else is there, and the receipt says so."""
        found = {
            path.relative_to(self.snapshot).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self.snapshot.rglob("*")
            if path.is_file() and path.name != receipt.NAME
        }
        assert found == {file.path: file.sha256 for file in self.manifest.files}
        assert receipt.check(str(self.snapshot), self.manifest.sha256)["state"] == "whole"
        assert not self.staging.exists()
        assert not self.staging.with_name(self.staging.name + ".repair").exists()
        assert not self.staging.with_name(self.staging.name + ".journal").exists()

    def assert_not_published(self) -> None:
        assert not self.snapshot.exists()


def entries(repository: Path) -> Iterator[File]:
    for path in sorted(repository.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            yield File(path.relative_to(repository).as_posix(), len(data), hashlib.sha256(data).hexdigest())


def shard(number: int) -> str:
    return f"model-{number:05}-of-{SHARDS:06}.safetensors"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    repository = root / "lab" / "tiny"
    (repository / "figures").mkdir(parents=True)
    source = random.Random(1)
    for number in range(1, SHARDS + 1):
        (repository / shard(number)).write_bytes(source.randbytes(SHARD))
    (repository / "config.json").write_text('{"model_type": "tiny"}')
    (repository / "empty.txt").write_text("")
    (repository / "figures" / "a plot, 100 %.png").write_bytes(source.randbytes(3000))
    return root


@pytest.fixture
def node(tmp_path: Path, repositories: Path) -> Iterator[Node]:
    with loopback_hub(repositories, tmp_path) as hub:
        made = Node(tmp_path, hub, repositories / "lab" / "tiny")
        try:
            yield made
        finally:
            made.stop()


def wait_until(true: Any, limit: float = 30) -> None:
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


def total(node: Node) -> int:
    return node.manifest.bytes


def test_fetches_everything_once_and_again_nothing(node: Node) -> None:
    done = node.fetch()
    assert (done.returncode, done.stderr) == (0, "")
    node.assert_whole()
    # Two connections a shard: a segment that overtakes its neighbour's start may be sent twice for a part.
    assert total(node) <= node.hub.sent() <= 1.25 * total(node)
    status = node.status()
    assert (status["phase"], status["done"], status["total"]) == ("complete", total(node), total(node))
    requests = len(node.hub.requests)
    began = time.monotonic()
    assert node.fetch().returncode == 0
    assert time.monotonic() - began < 2
    assert len(node.hub.requests) == requests, "weights that are whole ask nothing of the hub"


def test_a_copy_that_is_here_needs_no_hub(node: Node) -> None:
    assert node.fetch().returncode == 0
    node.hub.stop()
    assert node.fetch().returncode == 0
    node.assert_whole()


def test_a_repository_that_has_vanished_does_not_concern_a_node_that_has_its_copy(node: Node) -> None:
    """A drafter lives in somebody's own repository."""
    assert node.fetch().returncode == 0
    node.hub.override = lambda host, method, path: Answer(404, {"X-Error-Code": "RepoNotFound"})
    requests = len(node.hub.requests)
    assert node.fetch().returncode == 0
    (node.snapshot / shard(1)).chmod(0o640)  # doubtful, and right
    assert node.fetch().returncode == 0
    node.assert_whole()
    assert len(node.hub.requests) == requests
    keep_time(node.snapshot / shard(1), flip)
    done = node.fetch()
    assert done.returncode == errors.NotOnHub.code and "no repository" in done.stderr
    assert sorted(path.name for path in node.snapshot.glob("*.safetensors")) == [shard(n + 1) for n in range(SHARDS)]


def test_staging_that_is_whole_needs_no_hub(node: Node) -> None:
    """Killed between the last byte and the rename, and the hub is gone: it is published all the same."""
    assert node.fetch().returncode == 0
    shutil.copytree(node.snapshot, node.staging)
    shutil.rmtree(node.snapshot)
    node.hub.stop()
    assert node.fetch().returncode == 0
    node.assert_whole()


def test_flipped_byte_in_transit_is_fetched_again_by_the_other_transport(node: Node) -> None:
    node.hub.control(faults=[{"kind": "corrupt", "file": shard(2), "offset": 12345}])
    done = node.fetch()
    assert done.returncode == 0
    assert shard(2) in done.stderr and "fetched again by a plain connection" in done.stderr
    node.assert_whole()
    assert node.hub.sent(shard(2)) >= 2 * SHARD
    assert node.hub.sent(shard(1)) < 2 * SHARD


def test_wrong_bytes_from_both_transports_are_never_published(node: Node) -> None:
    node.hub.control(faults=[{"kind": "corrupt", "file": shard(3), "offset": 99, "count": 1000}])
    done = node.fetch()
    assert done.returncode == errors.WrongContent.code
    wanted = next(file.sha256 for file in node.manifest.files if file.path == shard(3))
    content = bytearray((node.repository / shard(3)).read_bytes())
    content[99] ^= 0xFF
    assert shard(3) in done.stderr and f"wanted sha256:{wanted}" in done.stderr and "Fix:" in done.stderr
    assert done.stderr.count(f"sha256:{hashlib.sha256(content).hexdigest()}") >= 2
    node.assert_not_published()
    assert not (node.staging / shard(3)).exists()
    assert node.status()["phase"] == "failed" and shard(3) in node.status()["error"]


@pytest.fixture(scope="session")
def tools_python() -> Path:
    """The python of the tools' environment, as nodes have it: made once from its lock, kept in the project's cache."""
    lock = PROJECT / "files" / "locks" / "tools.txt"
    cache = Path(os.environ.get("KIMI_NODES_CACHE") or Path.home() / ".cache" / "kimi-nodes")
    folder = cache / "tests" / f"tools-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)  # another worker may be making it
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([PYTHON, "-m", "venv", str(folder)], check=True)
            install = [str(python), "-m", "pip", "install", "-q", "--require-hashes", "--no-deps", "-r", str(lock)]
            subprocess.run(install, check=True)
            (folder / "complete").touch()
    return python


def test_flipped_byte_in_transit_is_fetched_again_by_the_hubs_own_client(node: Node, tools_python: Path) -> None:
    node.configure(client=str(tools_python))
    node.hub.control(faults=[{"kind": "corrupt", "file": shard(2), "offset": 12345}])
    done = node.fetch()
    assert done.returncode == 0, done.stderr
    assert f"{shard(2)}: found sha256:" in done.stderr and "fetched again by the hub's client" in done.stderr
    assert "brought nothing" not in done.stderr
    node.assert_whole()
    assert 2 * SHARD <= node.hub.sent(shard(2)) < 3 * SHARD


def test_the_hubs_client_sends_the_token_to_the_hub_only(node: Node, tools_python: Path) -> None:
    give_token(node)
    node.configure(client=str(tools_python))
    node.hub.control(token=TOKEN, faults=[{"kind": "corrupt", "file": shard(2), "offset": 12345}])
    done = node.fetch()
    assert done.returncode == 0, done.stderr
    assert "fetched again by the hub's client" in done.stderr and "brought nothing" not in done.stderr
    hosts = {(request["host"], request["authorization"]) for request in node.hub.requests}
    assert hosts == {("huggingface.co", True), ("cdn-lfs.huggingface.co", False)}
    node.assert_whole()


def test_a_client_that_fails_leaves_the_plain_connection(node: Node) -> None:
    node.configure(client="/usr/bin/false")
    node.hub.control(faults=[{"kind": "corrupt", "file": shard(2), "offset": 12345}])
    done = node.fetch()
    assert done.returncode == 0, done.stderr
    assert "the hub's client brought nothing (exit code 1" in done.stderr
    node.assert_whole()


def test_wrong_bytes_of_the_client_too_are_never_published(node: Node, tools_python: Path) -> None:
    node.configure(client=str(tools_python))
    node.hub.control(faults=[{"kind": "corrupt", "file": shard(3), "offset": 99, "count": 1000}])
    done = node.fetch()
    assert done.returncode == errors.WrongContent.code
    assert "by the hub's client, wanted" in done.stderr
    node.assert_not_published()


@pytest.mark.parametrize("kind", ["http", "folder"])
def test_any_address_or_folder_with_the_files_is_a_mirror(node: Node, kind: str) -> None:
    """An offline site: nothing of the hub's API, only the files."""
    served = node.folder / "mirror"
    shutil.copytree(node.repository, served / "tiny")

    def serve(host: str, method: str, target: str) -> Answer | None:
        path = unquote(urlsplit(target).path)
        file = node.folder / path.lstrip("/")
        return Answer(200, file=file) if file.is_file() and path.startswith("/mirror/") else Answer(404)

    node.hub.override = serve
    base = node.hub.address if kind == "http" else f"file://{node.folder}"
    node.configure(hub=base + "/mirror/tiny/{path}")
    (served / "tiny" / shard(2)).rename(node.folder / "away")
    assert node.fetch().returncode == errors.NotOnHub.code
    (node.folder / "away").rename(served / "tiny" / shard(2))
    done = node.fetch()
    assert done.returncode == 0, done.stderr
    node.assert_whole()
    shutil.rmtree(node.snapshot)
    flip(served / "tiny" / shard(2))
    done = node.fetch()
    assert done.returncode == errors.WrongContent.code and shard(2) in done.stderr
    node.assert_not_published()


def test_everything_goes_by_the_sites_proxy(node: Node, tools_python: Path) -> None:
    """A hub whose name this node cannot even resolve; the stand-in answers as the proxy does."""
    proxy = node.hub.address
    node.configure(hub=f"http://{BEHIND}", client=str(tools_python))
    node.environment |= {"http_proxy": proxy, "no_proxy": "127.0.0.1"}
    node.hub.control(faults=[{"kind": "corrupt", "file": shard(2), "offset": 12345}])
    done = node.fetch()
    assert done.returncode == 0, done.stderr
    assert "fetched again by the hub's client" in done.stderr and "brought nothing" not in done.stderr
    node.assert_whole()


@pytest.mark.parametrize("change", [-1000, 1000], ids=["shorter", "longer"])
def test_a_shard_of_another_size_is_never_published(node: Node, change: int) -> None:
    other = node.folder / shard(1)
    other.write_bytes(((node.repository / shard(1)).read_bytes() + bytes(1000))[: SHARD + change])

    def serve(host: str, method: str, path: str) -> Answer | None:
        return Answer(200, file=other) if shard(1) in path else None

    node.hub.override = serve
    done = node.fetch()
    assert done.returncode == errors.WrongContent.code, done.stderr
    assert shard(1) in done.stderr and f"{SHARD + change} bytes" in done.stderr and f"({SHARD} bytes)" in done.stderr
    node.assert_not_published()


def test_signed_addresses_that_expire_are_asked_for_again(node: Node) -> None:
    node.hub.control(signed_s=1, rate=2 * MIB)
    done = node.fetch()
    assert done.returncode == 0, done.stderr
    node.assert_whole()
    assert node.hub.sent() <= total(node) + SHARD


def test_signed_addresses_that_expire_are_asked_for_again_with_the_token(node: Node) -> None:
    give_token(node)
    node.hub.control(signed_s=0.5, rate=MIB, token=TOKEN)
    expired: list[str] = []

    def cut(host: str, method: str, path: str) -> Answer | None:
        # Every connection to the content network after the first of a shard comes too late once.
        if shard(1) in path and host == "cdn-lfs.huggingface.co" and len(expired) < 1:
            expired.append(path)
            return Answer(403, {"X-Error-Code": "AccessDenied"})
        return None

    node.hub.override = cut
    done = node.fetch()
    assert done.returncode == 0, done.stderr
    assert expired
    node.assert_whole()
    assert node.hub.sent() <= total(node) + SHARD


def test_connections_that_break_off_go_on_where_they_were(node: Node) -> None:
    node.hub.control(faults=[{"kind": "cut", "file": shard(n), "offset": SHARD // 3} for n in range(1, SHARDS + 1)])
    done = node.fetch()
    assert done.returncode == 0, done.stderr
    node.assert_whole()
    assert node.hub.sent() <= total(node) + SHARD


def test_stalled_connection_is_given_up_for_a_new_one(node: Node) -> None:
    node.hub.control(faults=[{"kind": "stall", "file": shard(1), "offset": SHARD // 2}])
    done = node.fetch()
    assert done.returncode == 0, done.stderr
    node.assert_whole()
    assert node.hub.sent() <= total(node) + SHARD


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_at_random_points_it_goes_on_and_publishes_nothing_before(node: Node, how: signal.Signals) -> None:
    """Five kills in a row; at most one shard's bytes come again, and no aria2 is left behind."""
    node.hub.control(rate=2 * MIB)
    dice = random.Random(int(how))
    for _ in range(5):
        before = node.hub.sent()
        process = node.start("fetch")
        points = dice.randrange(MIB // 2, total(node) // 6)
        wait_until(lambda: process.poll() is not None or node.hub.sent() - before > points)  # noqa: B023
        if process.poll() is None:
            time.sleep(dice.random() * 0.3)
            process.send_signal(how)
        process.wait(30)
        if process.returncode == -how:
            node.assert_not_published()
    wait_until(lambda: not holders(node))
    assert node.fetch().returncode == 0
    node.assert_whole()
    assert node.hub.sent() <= total(node) + SHARD


def test_aria2s_control_files_are_read_and_written_as_aria2_does(node: Node) -> None:
    """By them one node goes on where another was."""
    node.configure(files_at_once=1)
    node.hub.control(rate=2 * MIB)
    process = node.start("fetch")
    wait_until(lambda: node.hub.sent() > SHARD * 0.7)
    process.terminate()
    process.wait(20)
    (control,) = node.staging.glob(f"*{aria2.CONTROL}")
    told = aria2.Control.parse(control.read_bytes())
    name = control.name.removesuffix(aria2.CONTROL)
    here, right = (node.staging / name).read_bytes(), (node.repository / name).read_bytes()
    assert told.total == SHARD and 0 < told.done < SHARD
    for piece in range(aria2.pieces(SHARD)):
        at = slice(piece * aria2.PIECE, (piece + 1) * aria2.PIECE)
        assert not told.has(piece) or here[at] == right[at]
    control.write_bytes(told.content())
    (node.staging / name).write_bytes(here)
    before = node.hub.sent()
    node.hub.control()
    assert node.fetch().returncode == 0
    node.assert_whole()
    assert node.hub.sent() - before <= total(node) - told.done + aria2.PIECE  # of one a part may be there


@pytest.mark.parametrize("content", [b"", bytes(20), b"\0\1" + bytes(60), b"\0\1\0\0\0\0\0\0\0\0\0\x10\0\0\xff"])
def test_a_control_file_that_is_none_is_not_believed(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(5))
    Path(f"{path}{aria2.CONTROL}").write_bytes(content)
    assert aria2.begun(str(path), 5).done == 0
    assert list(tmp_path.iterdir()) == []


def holders(node: Node) -> list[str]:
    """Processes that have something below the weights directory open."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                found += [
                    entry.name for link in (entry / "fd").iterdir() if os.readlink(link).startswith(str(node.directory))
                ]
    return found


@pytest.fixture
def disk_image(node: Node) -> Iterator[Path]:
    """The weights directory on an ext4 of its own, whose disk is a file: a copy of it is what a power cut leaves."""
    if os.geteuid() != 0:
        pytest.skip("wants root, to mount a disk image")
    image = node.folder / "disk"
    with image.open("wb") as made:
        made.truncate(4 * total(node))
    subprocess.run(["mkfs.ext4", "-q", "-E", "lazy_itable_init=0", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop,commit=1", str(image), str(node.directory)], check=False).returncode:
        pytest.skip("wants loop devices")
    try:
        yield image
    finally:
        node.stop()
        subprocess.run(["umount", str(node.directory)], check=True)


def test_a_power_cut_loses_less_than_a_shard(node: Node, disk_image: Path) -> None:
    """What was only in memory is gone; nothing that the disk has says otherwise, so that no shard turns out wrong."""
    node.configure(files_at_once=1, connections_per_file=1)
    node.hub.control(rate=2 * MIB)
    process = node.start("fetch")
    wait_until(lambda: node.hub.sent() > total(node) * 0.4)
    after, at_work = node.folder / "after", holders(node)
    for number in at_work:
        os.kill(int(number), signal.SIGSTOP)
    subprocess.run(["cp", "--sparse=always", str(disk_image), str(after)], check=True)
    for number in at_work:
        os.kill(int(number), signal.SIGKILL)
    process.wait()
    wait_until(lambda: not holders(node))
    subprocess.run(["umount", str(node.directory)], check=True)
    os.replace(after, disk_image)
    subprocess.run(["mount", "-o", "loop", str(disk_image), str(node.directory)], check=True)
    node.assert_not_published()
    node.hub.control()
    done = node.fetch()
    assert (done.returncode, done.stderr) == (0, "")
    node.assert_whole()
    assert node.hub.sent() <= total(node) + SHARD


def test_two_agents_at_once_fetch_once(node: Node) -> None:
    node.hub.control(rate=4 * MIB)
    first, second = node.start("fetch"), node.start("fetch")
    assert (first.wait(60), second.wait(60)) == (0, 0)
    node.assert_whole()
    assert node.hub.sent() <= 1.25 * total(node)


def test_hub_down_half_way_is_outlived(node: Node) -> None:
    node.hub.control(rate=3 * MIB)
    process = node.start("fetch")
    wait_until(lambda: node.hub.sent() > total(node) // 3)
    node.hub.stop()
    wait_until(lambda: (node.folder / "status.json").exists() and node.status()["error"] is not None)
    assert "Fix:" in node.status()["error"]
    node.assert_not_published()
    node.hub.start()
    assert process.wait(90) == 0
    node.assert_whole()
    assert node.hub.sent() <= total(node) + SHARD


def test_no_hub_at_all_is_said_before_anything_is_made(node: Node) -> None:
    node.hub.stop()
    done = node.fetch()
    assert done.returncode == errors.HubUnreachable.code
    assert node.hub.address in done.stderr and "Fix:" in done.stderr
    since = node.status()["error_since"]
    time.sleep(1)
    assert node.fetch().returncode == errors.HubUnreachable.code
    assert node.status()["error_since"] == since, "tries one after the other are one trouble"
    assert 1 <= node.status()["trouble_seconds"] < 30
    node.assert_not_published()


@pytest.mark.parametrize(
    ("code", "name", "error"),
    [
        (401, "GatedRepo", errors.Refused),
        (403, "GatedRepo", errors.Refused),
        (404, "RepoNotFound", errors.NotOnHub),
        (404, "RevisionNotFound", errors.NotOnHub),
        (404, "EntryNotFound", errors.NotOnHub),
        (503, "Unavailable", errors.HubUnreachable),
    ],
)
def test_what_the_hub_refuses_is_said_before_the_first_byte(
    node: Node, code: int, name: str, error: type[errors.AgentError]
) -> None:
    node.hub.override = lambda host, method, path: Answer(code, {"X-Error-Code": name})
    done = node.fetch()
    assert done.returncode == error.code
    assert name in done.stderr and "Fix:" in done.stderr and node.hub.address in done.stderr
    assert node.hub.sent() == 0
    node.assert_not_published()


def test_one_shard_missing_on_the_hub_is_no_success(node: Node) -> None:
    node.hub.override = lambda host, method, path: (
        Answer(404, {"X-Error-Code": "EntryNotFound"}) if shard(4) in path else None
    )
    done = node.fetch()
    assert done.returncode == errors.NotOnHub.code
    assert shard(4) in done.stderr
    node.assert_not_published()


def give_token(node: Node) -> None:
    credentials = node.folder / "credentials"
    credentials.mkdir()
    (credentials / "hub-token").write_text(TOKEN + "\n")
    node.environment["CREDENTIALS_DIRECTORY"] = str(credentials)
    node.configure(token_file="/etc/kimi-nodes/keys/hub-token")


def test_token_goes_to_the_hub_only_and_is_shown_nowhere(node: Node) -> None:
    give_token(node)
    node.hub.control(token=TOKEN, rate=4 * MIB)
    process = node.start("fetch")
    seen = ""
    while process.poll() is None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    seen += (entry / "cmdline").read_text()
                if (entry / "comm").exists() and entry.name != str(process.pid):
                    with contextlib.suppress(OSError):
                        if "aria2c" in (entry / "comm").read_text():
                            seen += (entry / "environ").read_text()
        time.sleep(0.05)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "aria2c" in seen
    node.assert_whole()
    hosts = {(request["host"], request["authorization"]) for request in node.hub.requests}
    assert hosts == {("huggingface.co", True), ("cdn-lfs.huggingface.co", False)}
    written = "".join(
        path.read_text(errors="replace") for path in node.folder.rglob("*.json") if path.name != "hub.json"
    )
    assert TOKEN not in seen + out + err + written


def test_a_token_the_hub_does_not_accept_is_said_before_the_first_byte(node: Node) -> None:
    give_token(node)
    node.hub.control(token="another")
    done = node.fetch()
    assert done.returncode == errors.Refused.code
    assert "hub_token_file" in done.stderr and TOKEN not in done.stderr
    assert node.hub.sent() == 0


@pytest.mark.parametrize("path", ["../outside", "/etc/outside", "a/../../outside", ".kimi-nodes-receipt.json"])
def test_manifest_that_would_leave_the_snapshot_is_refused(node: Node, path: str) -> None:
    text = node.manifest.dumps().replace("config.json", path)
    (node.folder / "manifest.json").write_text(text)
    done = node.fetch()
    assert done.returncode == errors.Misconfigured.code
    assert path in done.stderr and "Fix:" in done.stderr
    assert list(node.directory.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"sha256": "', '"sha256": "x', 1),
        lambda text: text.replace(json.loads(text)["revision"], "main"),
    ],
    ids=["cut short", "empty", "digest that is none", "branch name"],
)
def test_manifest_that_cannot_be_trusted_is_refused(node: Node, damage: Any) -> None:
    path = node.folder / "manifest.json"
    path.write_text(damage(path.read_text()))
    done = node.fetch()
    assert done.returncode == errors.Misconfigured.code
    assert str(path) in done.stderr and "Fix: make it anew with bin/pin" in done.stderr
    assert node.hub.requests == [] and list(node.directory.iterdir()) == []


def test_manifest_that_names_other_bytes_publishes_nothing(node: Node) -> None:
    """Reviewed by nobody, or of another repository: what the hub has is not what it says."""
    right = next(file.sha256 for file in node.manifest.files if file.path == shard(1))
    (node.folder / "manifest.json").write_text(node.manifest.dumps().replace(str(right), "0" * 64))
    done = node.fetch()
    assert done.returncode == errors.WrongContent.code
    assert f"sha256:{right}" in done.stderr and "wanted sha256:" + "0" * 64 in done.stderr
    node.assert_not_published()


def test_manifest_of_another_revision_is_refused(node: Node) -> None:
    (node.folder / "manifest.json").write_text(node.manifest.dumps().replace(node.revision, "0" * 40))
    done = node.fetch()
    assert done.returncode == errors.Misconfigured.code
    assert "0" * 40 in done.stderr and node.revision in done.stderr


@pytest.fixture
def small_disk(node: Node) -> Iterator[Node]:
    """The weights directory on a file system of its own, as large as the weights and a quarter."""
    if os.geteuid() != 0:
        pytest.skip("wants root, to mount a small file system")
    size = total(node) * 5 // 4
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(node.directory)], check=True)
    try:
        yield node
    finally:
        node.stop()
        subprocess.run(["umount", str(node.directory)], check=True)


def test_a_network_file_system_is_refused_before_the_first_byte(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renames and locks there have lost weights before."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"22 1 8:1 / / rw - ext4 /dev/vda rw\n23 22 0:9 / {node.directory} rw shared:1 - nfs4 server:/weights rw\n"
    )
    real = open

    def opened(path: Any, *arguments: Any, **named: Any) -> Any:
        return real(mounts if path == "/proc/self/mountinfo" else path, *arguments, **named)

    monkeypatch.setattr("builtins.open", opened)
    told = configuration.load(str(node.folder / "configuration.json"))
    gather = Gather(
        told, node.revision, str(node.staging), Hub(node.hub.address), Status(told.status, "a/b", "c"), Event()
    )
    with pytest.raises(
        errors.NoRoom, match=r"found a nfs4 file system, wanted a local disk\. Fix: set weights_directory"
    ):
        gather.run(manifest_file.load(told.manifest).files)
    assert node.hub.requests == []


def test_a_snapshot_on_another_file_system_than_its_staging_is_refused(node: Node) -> None:
    if os.geteuid() != 0:
        pytest.skip("wants root, to mount a small file system")
    staging = node.staging.parent
    staging.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(staging)], check=True)
    try:
        done = node.fetch()
    finally:
        subprocess.run(["umount", str(staging)], check=True)
    assert done.returncode == errors.NoRoom.code
    assert "another file system" in done.stderr and "Fix: mount" in done.stderr
    assert node.hub.requests == []


def test_too_little_room_is_said_before_the_first_byte(small_disk: Node) -> None:
    (small_disk.directory / "somebody's").write_bytes(bytes(total(small_disk) // 2))
    done = small_disk.fetch()
    assert done.returncode == errors.NoRoom.code
    assert "bytes free" in done.stderr and "Fix: free" in done.stderr
    assert small_disk.hub.sent() == 0


def test_disk_that_fills_up_half_way_ends_it_and_it_goes_on_afterwards(small_disk: Node) -> None:
    small_disk.hub.control(rate=4 * MIB)
    process = small_disk.start("fetch")
    wait_until(lambda: small_disk.hub.sent() > SHARD)
    with contextlib.suppress(OSError), (small_disk.directory / "somebody's").open("wb") as target:
        while True:
            target.write(bytes(MIB))
            target.flush()
    assert process.wait(60) == errors.NoRoom.code
    assert "Fix: free space" in small_disk.status()["error"]
    small_disk.assert_not_published()
    (small_disk.directory / "somebody's").unlink()
    assert small_disk.fetch().returncode == 0
    small_disk.assert_whole()
    assert small_disk.hub.sent() <= total(small_disk) + SHARD


def keep_time(path: Path, change: Any) -> None:
    """Change a file and put its modification time back."""
    before = path.stat()
    path.chmod(0o644)
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def flip(path: Path) -> None:
    with path.open("r+b") as target:
        target.seek(1000)
        byte = target.read(1)
        target.seek(1000)
        target.write(bytes([byte[0] ^ 0xFF]))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda node: keep_time(node.snapshot / shard(2), flip), "ctime_ns"),
        (lambda node: keep_time(node.snapshot / shard(2), lambda path: os.truncate(path, 1000)), "bytes 1000"),
        (lambda node: (node.snapshot / shard(2)).unlink(), "missing"),
        (lambda node: replaced_by_link(node.snapshot / shard(2)), "not a regular file"),
    ],
    ids=["byte flipped", "truncated", "missing", "link"],
)
def test_damage_on_disk_is_seen_at_once_and_only_that_file_is_fetched(node: Node, damage: Any, named: str) -> None:
    assert node.fetch().returncode == 0
    damage(node)
    seen = node.run("verify")
    assert seen.returncode == errors.WrongContent.code
    assert f"{node.snapshot / shard(2)}: {named}" in seen.stdout and "Fix:" in seen.stdout
    before = node.hub.sent()
    requests = len(node.hub.requests)
    assert node.fetch().returncode == 0
    node.assert_whole()
    assert SHARD <= node.hub.sent() - before <= 1.5 * SHARD
    paths = {request["path"].rpartition("/")[2] for request in node.hub.requests[requests:]}
    assert paths == {shard(2)}


def replaced_by_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def test_a_file_that_was_only_touched_is_hashed_and_not_fetched(node: Node) -> None:
    assert node.fetch().returncode == 0
    (node.snapshot / shard(1)).chmod(0o640)
    assert node.run("verify").returncode == errors.WrongContent.code
    requests = len(node.hub.requests)
    assert node.run("fetch").returncode == 0
    assert len(node.hub.requests) == requests
    node.assert_whole()


def test_repair_shows_no_half_file(node: Node) -> None:
    """The damaged file stands until the whole new one takes its place."""
    assert node.fetch().returncode == 0
    path = node.snapshot / shard(1)
    keep_time(path, flip)
    damaged = hashlib.sha256(path.read_bytes()).hexdigest()
    right = next(file.sha256 for file in node.manifest.files if file.path == shard(1))
    node.hub.control(rate=3 * MIB)
    process = node.start("fetch")
    seen = set()
    while process.poll() is None:
        seen.add(hashlib.sha256(path.read_bytes()).hexdigest())
    seen.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert process.returncode == 0
    assert seen == {damaged, right}


def test_code_that_is_not_in_the_manifest_is_removed(node: Node) -> None:
    assert node.fetch().returncode == 0
    (node.snapshot / "modeling_extra.py").write_text("print('not the model owner')\n")
    seen = node.run("verify")
    assert seen.returncode == errors.WrongContent.code and "modeling_extra.py: is not in the manifest" in seen.stdout
    assert node.fetch().returncode == 0
    node.assert_whole()


def test_weights_that_somebody_else_put_there_are_hashed_and_taken(node: Node) -> None:
    shutil.copytree(node.repository, node.snapshot)
    assert node.run("verify").returncode == errors.WrongContent.code
    assert node.fetch().returncode == 0
    node.assert_whole()
    assert node.hub.sent() == 0


def test_deep_verify_finds_what_a_forged_receipt_hides(node: Node) -> None:
    assert node.fetch().returncode == 0
    path = node.snapshot / shard(3)
    keep_time(path, flip)
    forged = receipt.read(str(node.snapshot))
    assert forged is not None
    forged["files"][shard(3)].update(receipt.stamps(path.stat()))
    (node.snapshot / receipt.NAME).chmod(0o644)
    (node.snapshot / receipt.NAME).write_text(json.dumps(forged))
    assert node.run("verify").returncode == 0
    deep = node.run("verify", "--deep")
    assert deep.returncode == errors.WrongContent.code
    wanted = next(file.sha256 for file in node.manifest.files if file.path == shard(3))
    assert shard(3) in deep.stdout and f"wanted sha256:{wanted}" in deep.stdout


def test_watchdog_is_told_only_while_bytes_move(node: Node) -> None:
    node.configure(stall_seconds=60)
    node.hub.control(faults=[{"kind": "stall", "file": shard(1), "offset": 4 * MIB, "count": 10}])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(node.folder / "notify"))
        told.settimeout(0.1)
        node.environment["NOTIFY_SOCKET"] = str(node.folder / "notify")
        process = node.start("fetch")
        alive, ready, last = 0, False, time.monotonic()
        began = last
        while time.monotonic() - last < 4 and time.monotonic() - began < 60:
            with contextlib.suppress(TimeoutError):
                message = told.recv(4096).decode()
                ready = ready or "READY=1" in message
                if "WATCHDOG=1" in message:
                    alive, last = alive + 1, time.monotonic()
        assert ready and alive >= 1
        assert process.poll() is None, "it still waits for the stalled shard"
        process.terminate()
        assert process.wait(20) == -signal.SIGTERM
    assert node.status()["phase"] == "stopped"


def test_progress_is_honest(node: Node) -> None:
    node.hub.control(rate=MIB)
    process = node.start("fetch")
    told: list[dict[str, Any]] = []
    while process.poll() is None:
        with contextlib.suppress(OSError):
            status = node.status()
            if not told or status["time"] != told[-1]["time"]:
                told.append(status)
        time.sleep(0.02)
    fetching = [status for status in told if status["phase"] == "fetching" and status["rate"]]
    assert len(fetching) >= 3
    assert all(a["done"] <= b["done"] <= total(node) == b["total"] for a, b in itertools.pairwise(told[1:]))
    # Two files of two connections each at 1 MiB/s.
    assert all(0.5 * MIB < status["rate"] < 6 * MIB for status in fetching[1:])
    shown = node.run("status")
    assert "complete" in shown.stdout and str(total(node)) in shown.stdout


def test_a_clock_that_is_set_neither_hides_nor_invents_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    told = Status(str(path), "lab/tiny", "0" * 40)
    told.set(phase="fetching", total=100 * MIB)
    told.trouble("no answer")
    told.write()
    today = time.time()
    for jump in (1e6, -1e6):
        monkeypatch.setattr(time, "time", lambda jump=jump: today + jump)
        told.worked(MIB)
        told.write()
        written = json.loads(path.read_text())
        assert 0 <= written["trouble_seconds"] < 10 and written["rate"] > 0
    told.trouble(None)
    told.write()
    assert json.loads(path.read_text())["trouble_seconds"] is None


JUMPING = """
import itertools, sys, time
sys.path.insert(0, sys.argv.pop(1))
real, jumps = time.time, itertools.cycle((0.0, 4e6, -4e6))
time.time = lambda: real() + next(jumps)
from weights.commands import main
sys.exit(main(sys.argv[1:]))
"""
"""The agent on a machine whose clock is set by weeks, forth and back, whenever it is looked at."""


def test_a_clock_that_jumps_changes_nothing(node: Node) -> None:
    node.hub.control(faults=[{"kind": "cut", "file": shard(2), "offset": SHARD // 3}])
    argv = [PYTHON, "-sE", "-c", JUMPING, str(AGENT.parent), "fetch", str(node.folder / "configuration.json")]
    done = subprocess.run(argv, capture_output=True, text=True, env=node.environment, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    node.assert_whole()
    assert node.hub.sent() <= total(node) + SHARD
    keep_time(node.snapshot / shard(1), lambda path: os.utime(path, (0, 0)))
    os.utime(node.snapshot / shard(1), (4e9, 4e9))  # as a clock that was wrong would have left it
    assert "mtime_ns" in node.run("verify").stdout
    assert node.fetch().returncode == 0
    node.assert_whole()


def test_gc_shows_first_and_removes_only_what_no_configuration_wants(node: Node) -> None:
    assert node.fetch().returncode == 0
    old = node.snapshot.with_name("1" * 40)
    old.mkdir()
    (old / "model.safetensors").write_bytes(bytes(MIB))
    mine = node.snapshot.with_name("not-ours")
    mine.mkdir()
    shown = node.run("gc")
    assert f"{old}: {MIB} bytes, would be removed" in shown.stdout and old.exists()
    with (old / "model.safetensors").open("rb"):
        assert "in use by" in node.run("gc", "--delete").stdout and old.exists()
    assert "removed" in node.run("gc", "--delete").stdout
    assert not old.exists() and mine.exists()
    node.assert_whole()


def test_what_dead_runs_left_is_removed(node: Node) -> None:
    node.staging.mkdir(parents=True)
    (node.staging / "model.safetensors.incomplete").write_bytes(bytes(MIB))
    (node.staging / shard(1)).write_bytes(bytes(MIB))
    (node.staging / f"{shard(2)}.aria2").write_bytes(b"control file of a file that is gone")
    (node.staging / shard(3)).write_bytes(bytes(SHARD))
    other = node.staging.with_name(node.staging.name[:-40] + "2" * 40)
    other.mkdir()
    (other / shard(1)).write_bytes(bytes(MIB))
    another_model = node.staging.with_name("lab--other-" + "2" * 40)
    another_model.mkdir()
    done = node.fetch()
    assert done.returncode == 0, done.stderr
    node.assert_whole()
    assert not other.exists() and another_model.exists()


def next_revision(node: Node) -> Manifest:
    """The repository with another configuration file and the same weights."""
    copied = node.folder / "next" / "lab" / "tiny"
    shutil.copytree(node.repository, copied)
    (copied / "config.json").write_text('{"model_type": "tiny", "tokenizer": "mended"}')
    (copied / shard(1)).rename(copied / "renamed.safetensors")
    node.hub.hub.roots[0] = node.folder / "next"
    node.repository = copied
    return Manifest(node.manifest.repository, node.hub.hub.listing(copied)[0], tuple(entries(copied)))


def test_a_new_revision_takes_the_weights_that_are_the_same(node: Node) -> None:
    assert node.fetch().returncode == 0
    old, old_manifest = node.snapshot, node.manifest
    node.manifest = next_revision(node)
    node.snapshot = old.with_name(node.manifest.revision)
    node.staging = node.staging.with_name(node.staging.name[:-40] + node.manifest.revision)
    (node.folder / "manifest.json").write_text(node.manifest.dumps())
    node.configure(revision=node.manifest.revision, snapshot=str(node.snapshot), staging=str(node.staging))
    keep_time(old / shard(3), flip)  # what is damaged there is not taken
    before = node.hub.sent()
    done = node.fetch()
    assert done.returncode == 0, done.stderr
    node.assert_whole()
    assert SHARD < node.hub.sent() - before < 1.5 * SHARD
    assert list(receipt.check(str(old), old_manifest.sha256)["damaged"]) == [shard(3)]
    shown = node.run("gc").stdout
    assert str(old) in shown and int(shown.split(": ")[1].split()[0]) < 1.5 * SHARD, "shared files free nothing"
    assert "removed" in node.run("gc", "--delete").stdout and not old.exists()
    node.assert_whole()


def test_receipts_are_checked_in_milliseconds(node: Node) -> None:
    assert node.fetch().returncode == 0
    answer = json.loads(node.run("verify", "--json").stdout)["weights"][0]
    assert answer["state"] == "whole" and answer["seconds"] < 0.05


def test_the_agent_wants_nothing_but_the_systems_python() -> None:
    done = subprocess.run([PYTHON, "-sES", str(AGENT), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
