"""Fetching the kernels that NVIDIA ships compiled, with FlashInfer's own downloader and a repository on the loopback.

FlashInfer's files are the wheels' own (artifacts.py, jit/cubin_loader.py), with the releases' own requests, urllib3 and
filelock. Stand-ins: what they import of torch's (its logger and folders), the pins, which name a few small files here,
and time.sleep, for FlashInfer waits half a minute and more between its tries.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from files.tools import cubins, jit_warmup
from node.releases import RELEASES
from tests.unit.test_patches import unpacked

PROGRAM = Path(cubins.__file__)
LIBRARIES = ("requests", "urllib3", "idna", "certifi", "charset-normalizer", "filelock", "tqdm")
FOLDERS = {
    "TRTLLM_GEN_FMHA": "11aa/fmha/trtllm-gen/",
    "TRTLLM_GEN_BMM": "22bb/batched/",
    "TRTLLM_GEN_GEMM": "33cc/gemm/",
}
FETCHING = ("sglang-0.5.17", "sglang-0.5.23")

pytestmark = pytest.mark.slow  # the wheels come from the index, once


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Repository:
    """What NVIDIA's repository serves: files by path, and index pages of folders as its own look."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        for number, folder in enumerate(FOLDERS.values()):
            header = "flashInferMetaInfo.h" if "fmha" in folder else "flashinferMetaInfo.h"
            names = (f"kernel{number}Sm100a.cubin", f"kernel{number}Sm103a.cubin", f"include/{header}")
            for name in names:
                self.files[folder + name] = f"{folder}{name}".encode() * 50
            self.list(folder)
        self.asked: list[str] = []
        self.status: dict[str, int] = {}
        self.cut: set[str] = set()  # announced whole, sent in half
        self.slow: set[str] = set()  # half, and then nothing for long
        repository = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                repository.answer(self)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}/"

    def list(self, folder: str) -> None:
        files = {path.removeprefix(folder): body for path, body in self.files.items() if path.startswith(folder)}
        files.pop("checksums.txt", None)
        self.files[f"{folder}checksums.txt"] = "".join(f"{sha256(b)}  {n}\n" for n, b in files.items()).encode()

    def pins(self) -> dict[str, dict[str, str]]:
        lists = {group: sha256(self.files[f"{folder}checksums.txt"]) for group, folder in FOLDERS.items()}
        return {"paths": FOLDERS, "lists": lists}

    def index(self, folder: str) -> bytes:
        inside = {path.removeprefix(folder).split("/")[0] for path in self.files if path.startswith(folder)}
        links = [name + ("" if folder + name in self.files else "/") for name in sorted(inside)]
        return "\n".join(f'<a href="{link}">{link}</a>' for link in links).encode()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.removeprefix("/")
        self.asked.append(path)
        body = self.index(path) if path.endswith("/") else self.files.get(path)
        status = self.status.get(path, 200 if body else 404)
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body or b"")))
        handler.end_headers()
        half = len(body or b"") // 2
        handler.wfile.write((body or b"")[: half if path in self.cut | self.slow else None])
        handler.wfile.flush()
        if path in self.slow:
            time.sleep(30)


@pytest.fixture
def repository() -> Iterator[Repository]:
    made = Repository()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()


def environment(release: str, folder: Path, pins: dict[str, Any]) -> dict[str, str]:
    """An environment in which FlashInfer's real downloader is imported, with these pins."""
    package = folder / "flashinfer"
    (package / "jit").mkdir(parents=True, exist_ok=True)
    real = unpacked(release, "flashinfer-python") / "flashinfer"
    (package / "__init__.py").write_text(f"__version__ = {RELEASES[release].flashinfer!r}\n")
    (package / "jit/__init__.py").write_text("")
    (package / "jit/core.py").write_text(
        "import logging, time\nlogger = logging.getLogger('flashinfer.jit')\ntime.sleep = lambda seconds: None\n"
    )
    (package / "jit/env.py").write_text(
        "import os, pathlib\nFLASHINFER_CUBIN_DIR = pathlib.Path(os.environ['FLASHINFER_CUBIN_DIR'])\n"
    )
    (package / "jit/cubin_loader.py").write_bytes((real / "jit/cubin_loader.py").read_bytes())
    (package / "artifacts.py").write_text(
        (real / "artifacts.py").read_text()
        + f"\n_pins = {pins!r}\n"
        + "for _group, _path in _pins['paths'].items():\n"
        + "    setattr(ArtifactPath, _group, _path)\n"
        + "    setattr(CheckSumHash, _group, _pins['lists'][_group])\n"
        + "    CheckSumHash.map_checksums[_path + 'checksums.txt'] = _pins['lists'][_group]\n"
        # The rest of what FlashInfer fetches is empty folders here.
        + "ArtifactPath.DEEPGEMM, ArtifactPath.DSL_FMHA_ARCHS = ArtifactPath.TRTLLM_GEN_GEMM, ()\n"
    )
    libraries = [str(unpacked(release, name)) for name in LIBRARIES]
    return {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join([str(folder), *libraries]), "HOME": str(folder)}


Run = Callable[..., "subprocess.CompletedProcess[str]"]


class Node:
    """One host's folder, configuration and program."""

    def __init__(self, release: str, repository: Repository, folder: Path):
        self.directory = folder / "cubins"
        self.directory.mkdir()
        self.configuration = folder / "cubins.json"
        self.asked: dict[str, Any] = {
            "release": "a" * 16,
            "flashinfer": RELEASES[release].flashinfer,
            "groups": list(FOLDERS),
            "repository": repository.address,
            "directory": str(self.directory),
            "receipt": str(self.directory / "fetched.json"),
            "problem": str(self.directory / "problem.txt"),
            "lock": str(self.directory / ".lock"),
            "bytes": 10**6,
        }
        self.environment = environment(release, folder / "site", repository.pins())
        self.write()

    def write(self, **changed: Any) -> None:
        self.asked |= changed
        self.configuration.write_text(json.dumps(self.asked))

    def command(self) -> list[str]:
        return [sys.executable, str(PROGRAM), str(self.configuration)]

    def run(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(), env=self.environment, capture_output=True, text=True, timeout=120)

    def refused(self) -> str:
        """What it says when it fails, which is also what it leaves for the warm-up."""
        done = self.run()
        assert done.returncode == 1, done.stdout + done.stderr
        said = done.stderr.strip().splitlines()[-1]
        assert "Fix: " in said and Path(self.asked["problem"]).read_text().strip() == said
        assert not Path(self.asked["receipt"]).exists()
        return said

    def files(self) -> dict[str, bytes]:
        """What lies in the folders of the repository, half files and locks too."""
        tops = {folder.split("/")[0] for folder in FOLDERS.values()}
        return {
            str(path.relative_to(self.directory)): path.read_bytes()
            for path in self.directory.rglob("*")
            if path.is_file() and path.relative_to(self.directory).parts[0] in tops
        }

    def receipt(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(Path(self.asked["receipt"]).read_text())
        return read


@pytest.fixture(params=FETCHING[:1])
def node(request: pytest.FixtureRequest, repository: Repository, tmp_path: Path) -> Node:
    return Node(request.param, repository, tmp_path)


@pytest.mark.parametrize("node", FETCHING, indirect=True)
def test_everything_is_fetched_and_nothing_else_is_left(node: Node, repository: Repository) -> None:
    done = node.run()
    assert done.returncode == 0, done.stderr
    assert node.files() == repository.files
    assert [group["files"] for group in node.receipt()["groups"]] == [3, 3, 3]
    assert not [path for path in repository.asked if path.endswith("/")], "a mirror has no index pages"
    modes = {path.stat().st_mode & 0o777 for path in node.directory.rglob("*.cubin")}
    assert modes == {0o644}, "the server's user reads them"


def test_what_is_there_is_not_fetched_again(node: Node, repository: Repository) -> None:
    assert node.run().returncode == 0
    repository.asked.clear()
    assert "nothing to fetch" in node.run().stdout and repository.asked == []
    lost = node.directory / FOLDERS["TRTLLM_GEN_BMM"] / "kernel1Sm103a.cubin"
    lost.unlink()
    assert any(str(lost) in reason for reason in cubins.why_not_there(node.asked))
    assert node.run().returncode == 0
    assert repository.asked == [f"{FOLDERS['TRTLLM_GEN_BMM']}kernel1Sm103a.cubin"]
    assert node.files() == repository.files


@pytest.mark.parametrize("node", FETCHING, indirect=True)
def test_a_file_of_another_digest_is_refused_and_does_not_stay(node: Node, repository: Repository) -> None:
    path = f"{FOLDERS['TRTLLM_GEN_FMHA']}kernel0Sm103a.cubin"
    good, repository.files[path] = repository.files[path], b"a page of a proxy"
    said = node.refused()
    assert path in said and sha256(b"a page of a proxy") in said and sha256(good) in said
    assert path not in node.files()
    repository.files[path] = good
    assert node.run().returncode == 0 and node.files() == repository.files
    assert not Path(node.asked["problem"]).exists()


def test_a_list_of_another_digest_is_not_followed(node: Node, repository: Repository) -> None:
    repository.files[f"{FOLDERS['TRTLLM_GEN_FMHA']}checksums.txt"] += f"{'0' * 64}  other.cubin\n".encode()
    assert "checksums.txt" in node.refused()
    assert {path.rpartition("/")[2] for path in repository.asked} == {"checksums.txt"}
    assert node.files() == {}


@pytest.mark.parametrize("node", FETCHING, indirect=True)
def test_a_transfer_that_breaks_off_leaves_nothing(node: Node, repository: Repository) -> None:
    path = f"{FOLDERS['TRTLLM_GEN_GEMM']}kernel2Sm100a.cubin"
    repository.cut.add(path)
    assert path in node.refused()
    assert repository.asked.count(path) >= 4, "FlashInfer tries four times"
    assert not [name for name in node.files() if "kernel2Sm100a" in name]
    repository.cut.clear()
    assert node.run().returncode == 0 and node.files() == repository.files


def test_no_way_to_the_repository_is_said_with_its_address(node: Node, repository: Repository) -> None:
    repository.server.shutdown()
    repository.server.server_close()
    said = node.refused()
    assert repository.address in said and "Connection refused" in said and "cubins_repository" in said


def test_a_mirror_that_lacks_a_file_is_named(node: Node, repository: Repository) -> None:
    path = f"{FOLDERS['TRTLLM_GEN_BMM']}kernel1Sm100a.cubin"
    repository.status[path] = 404
    said = node.refused()
    assert f"{repository.address}{path}: found status 404" in said


def test_room_is_looked_for_before_anything_is_asked(node: Node, repository: Repository) -> None:
    node.write(bytes=10**15)
    assert "GB free, wanted 1000000.0 GB" in node.refused()
    assert repository.asked == []


def test_killed_in_the_midst_it_leaves_no_half_file_and_goes_on(node: Node, repository: Repository) -> None:
    path = f"{FOLDERS['TRTLLM_GEN_FMHA']}kernel0Sm100a.cubin"
    repository.slow.add(path)
    process = subprocess.Popen(node.command(), env=node.environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while path not in repository.asked and time.monotonic() < deadline:
            time.sleep(0.05)
        assert path in repository.asked and jit_warmup.held(node.asked["lock"])
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not jit_warmup.held(node.asked["lock"])
    assert all(body == repository.files[name] for name, body in node.files().items() if name in repository.files)
    assert not Path(node.asked["receipt"]).exists() and path not in node.files()
    repository.slow.clear()
    assert node.run().returncode == 0 and node.files() == repository.files


def test_another_release_s_flashinfer_is_refused(node: Node) -> None:
    node.write(flashinfer="0.6.0")
    assert "wanted 0.6.0" in node.refused()


def test_what_they_lie_in_says_who_brings_them(node: Node) -> None:
    """A package of the release that brings these kernels would be read in place of ours."""
    (Path(node.environment["PYTHONPATH"].split(":")[0]) / "flashinfer/jit/env.py").write_text(
        "import pathlib\nFLASHINFER_CUBIN_DIR = pathlib.Path('/usr/lib/flashinfer_cubin')\n"
    )
    assert "/usr/lib/flashinfer_cubin" in node.refused()


@pytest.mark.parametrize("name", ["../x.cubin", "/etc/x.cubin", "a/../../x.cubin", "a b.cubin"])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(cubins.Problem, match="Fix: "):
        cubins.listed(f"{'0' * 64}  {name}\n".encode(), "here")


# --- why FlashInfer's own command is not used ---

OWN = "from flashinfer.artifacts import download_artifacts; download_artifacts()"


def own_download(node: Node, repository: Repository) -> subprocess.CompletedProcess[str]:
    more = {"FLASHINFER_CUBIN_DIR": str(node.directory), "FLASHINFER_CUBINS_REPOSITORY": repository.address}
    command = [sys.executable, "-c", OWN]
    return subprocess.run(command, env=node.environment | more, capture_output=True, text=True, timeout=120)


def test_flashinfer_takes_an_index_that_cannot_be_had_for_an_empty_folder(node: Node, repository: Repository) -> None:
    repository.status[FOLDERS["TRTLLM_GEN_BMM"]] = 503
    done = own_download(node, repository)
    assert done.returncode == 0, done.stderr
    assert f"{FOLDERS['TRTLLM_GEN_BMM']}kernel1Sm103a.cubin" not in node.files()


def test_flashinfer_leaves_a_file_of_another_digest_and_fetches_all_again(node: Node, repository: Repository) -> None:
    path = f"{FOLDERS['TRTLLM_GEN_FMHA']}kernel0Sm103a.cubin"
    repository.files[path] = b"a page of a proxy"
    done = own_download(node, repository)
    assert done.returncode == 1 and "checksum mismatch" in done.stderr
    assert node.files()[path] == b"a page of a proxy"
    repository.asked.clear()
    own_download(node, repository)
    assert {name for name in repository.files if name.endswith(".cubin")} <= set(repository.asked)


# --- the warm-up waits for them ---


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(jit_warmup, "CUBINS_GRACE_SECONDS", 2)
    names = {name: str(tmp_path / name) for name in ("receipt", "problem", "lock", "status")}
    return names | {"unit": "kimi-cubins.service"}


def test_the_warm_up_goes_on_when_they_are_there(fetched: dict[str, str]) -> None:
    Path(fetched["receipt"]).write_text("{}")
    jit_warmup.wait_for_cubins(fetched)


def test_the_warm_up_waits_while_they_are_fetched(fetched: dict[str, str]) -> None:
    order: list[str] = []

    def fetch() -> None:
        with cubins.locked(Path(fetched["lock"])):
            time.sleep(3)  # longer than the grace
            Path(fetched["receipt"]).write_text("{}")
            order.append("fetched")

    thread = threading.Thread(target=fetch)
    thread.start()
    jit_warmup.wait_for_cubins(fetched)
    order.append("went on")
    thread.join()
    assert order == ["fetched", "went on"]


def test_the_warm_up_tells_why_they_could_not_be_fetched(fetched: dict[str, str]) -> None:
    def fail() -> None:
        time.sleep(1)
        beside = Path(fetched["problem"] + ".new")
        beside.write_text("https://there: found no answer, wanted the file. Fix: this\n")
        beside.rename(fetched["problem"])

    thread = threading.Thread(target=fail)
    thread.start()
    with pytest.raises(jit_warmup.Problem, match=r"found no answer.*Fix: this$"):
        jit_warmup.wait_for_cubins(fetched)
    thread.join()


def test_the_warm_up_does_not_wait_for_nobody(fetched: dict[str, str]) -> None:
    began = time.monotonic()
    with pytest.raises(jit_warmup.Problem, match=r"kimi-cubins\.service\. Fix: "):
        jit_warmup.wait_for_cubins(fetched)
    assert time.monotonic() - began < 10
