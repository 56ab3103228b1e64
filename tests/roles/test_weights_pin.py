"""bin/pin against the hub stand-in: a manifest holds a commit and a sha256 for every file, or there is none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from loopback_hub import Answer, LoopbackHub, loopback_hub

from node.manifest import File, Manifest, loads
from node.models import DRAFTERS, MODELS
from roles.weights import pin

MODEL = MODELS["lab-tiny"]
TOKEN = "hf_test_token_that_must_not_leak"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "hub" / MODEL.repository
    (folder / "figures").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    (folder / "config.json").write_text("{}")
    (folder / "figures" / "a plot, 100 %.png").write_bytes(b"picture")
    return folder


@pytest.fixture
def hub(tmp_path: Path, repository: Path) -> Iterator[LoopbackHub]:
    with loopback_hub(tmp_path / "hub", tmp_path) as started:
        yield started


def run(hub: LoopbackHub, *arguments: str, environment: dict[str, str] | None = None, model: str = MODEL.key) -> int:
    output = hub.state / "manifest.json"
    return pin.main([model, "--hub", hub.address, "--output", str(output), *arguments], environment or {})


def written(hub: LoopbackHub) -> Manifest:
    return loads((hub.state / "manifest.json").read_bytes())


def test_every_file_has_its_sha256_at_a_commit(hub: LoopbackHub, repository: Path, capsys: Any) -> None:
    assert run(hub) == 0
    files = {path.relative_to(repository).as_posix(): path for path in repository.rglob("*") if path.is_file()}
    assert written(hub) == Manifest(
        MODEL.repository,
        hub.hub.listing(repository)[0],
        tuple(
            File(name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
            for name, path in sorted(files.items())
        ),
    )
    assert f"main is {written(hub).revision} now" in capsys.readouterr().out
    assert hub.sent("model.safetensors") == 0, "the hub's own sha256 of large files is taken"
    text = (hub.state / "manifest.json").read_text()
    assert len(text.splitlines()) == len(files) + 2, "one file a line, so that two manifests diff well"


def test_compare_shows_what_changes_and_writes_nothing(hub: LoopbackHub, repository: Path, capsys: Any) -> None:
    assert run(hub) == 0
    before = (hub.state / "manifest.json").read_bytes()
    assert run(hub, "--compare") == 0
    (repository / "config.json").write_text('{"changed": true}')
    (repository / "new.json").write_text("{}")
    (repository / "model.safetensors").unlink()
    capsys.readouterr()
    assert run(hub, "--compare") == 1
    shown = capsys.readouterr().out
    assert "~ config.json (2 -> 17 bytes)" in shown and "+ new.json (2 bytes)" in shown
    assert "- model.safetensors (256000 bytes)" in shown and "~ revision (" in shown
    assert (hub.state / "manifest.json").read_bytes() == before
    assert run(hub, "--latest") == 0
    assert {file.path for file in written(hub).files} == {"config.json", "new.json", "figures/a plot, 100 %.png"}


def test_a_branch_name_is_resolved_before_it_is_written(hub: LoopbackHub, repository: Path, capsys: Any) -> None:
    assert run(hub, "--revision", "main") == 0
    commit = hub.hub.listing(repository)[0]
    assert f"main is {commit} now" in capsys.readouterr().out
    assert written(hub).revision == commit


def test_a_listing_of_several_pages_is_read_to_its_end(hub: LoopbackHub, repository: Path) -> None:
    entries = hub.hub.listing(repository)[1]

    def pages(host: str, method: str, target: str) -> Answer | None:
        if "/tree/" not in target:
            return None
        number = int(target.rpartition("cursor=")[2]) if "cursor=" in target else 0
        headers = {"Content-Type": "application/json"}
        if number + 1 < len(entries):
            headers["Link"] = f'<{hub.address}{urlsplit(target).path}?cursor={number + 1}>; rel="next"'
        return Answer(200, headers, json.dumps(entries[number : number + 1]).encode())

    hub.override = pages
    assert run(hub) == 0
    assert len(written(hub).files) == len(entries) == 3


def test_a_gated_repository_says_so_and_opens_with_the_token_of_a_file(hub: LoopbackHub, capsys: Any) -> None:
    hub.control(token=TOKEN)
    assert run(hub) == 2
    said = capsys.readouterr().err
    assert "gated" in said and "Fix:" in said and "--token-file" in said
    assert not (hub.state / "manifest.json").exists()
    (hub.state / "token").write_text(TOKEN + "\n")
    assert run(hub, environment={"HF_TOKEN_PATH": str(hub.state / "token")}) == 0
    assert run(hub, "--token-file", str(hub.state / "token")) == 0
    captured = capsys.readouterr()
    assert TOKEN not in captured.out + captured.err + (hub.state / "manifest.json").read_text()
    (hub.state / "token").write_text("two words\n")
    assert run(hub, "--token-file", str(hub.state / "token")) == 2
    assert "two words" not in capsys.readouterr().err


def test_a_renamed_repository_is_not_followed_blindly(hub: LoopbackHub, capsys: Any) -> None:
    moved = hub.folder / "somebody" / "else"
    moved.mkdir(parents=True)
    (moved / "config.json").write_text("{}")

    def rename(host: str, method: str, target: str) -> Answer | None:
        if MODEL.repository not in target:
            return None
        return Answer(307, {"Location": target.replace(MODEL.repository, "somebody/else")})

    hub.override = rename
    assert run(hub) == 2
    said = capsys.readouterr().err
    assert "somebody/else" in said and "renamed" in said and "Fix:" in said
    assert not (hub.state / "manifest.json").exists()


@pytest.mark.parametrize("revision", ["0" * 40, "no-such-branch"])
def test_a_revision_that_is_not_there(hub: LoopbackHub, capsys: Any, revision: str) -> None:
    assert run(hub, "--revision", revision) == 2
    said = capsys.readouterr().err
    assert revision in said and "RevisionNotFound" in said and "Fix:" in said


def test_a_repository_that_is_gone(hub: LoopbackHub, capsys: Any) -> None:
    drafter = DRAFTERS["kimi-k2.6-dflash-tmp-long"]
    assert run(hub, model=drafter.key) == 2
    said = capsys.readouterr().err
    assert drafter.repository in said and "RepoNotFound" in said and "--hub" in said


def test_no_hub(hub: LoopbackHub, capsys: Any) -> None:
    hub.stop()
    assert run(hub) == 2
    said = capsys.readouterr().err
    assert hub.address in said and "Fix:" in said


def test_a_model_that_nobody_knows(capsys: Any) -> None:
    assert pin.main(["kimi-k2.5"], {}) == 2
    assert "Fix: bin/pin kimi-k2.6" in capsys.readouterr().err


def test_a_small_file_that_is_not_what_the_hub_lists(hub: LoopbackHub, capsys: Any) -> None:
    hub.control(faults=[{"kind": "corrupt", "file": "config.json", "offset": 1}])
    assert run(hub) == 2
    said = capsys.readouterr().err
    assert "config.json" in said and "as the hub lists it" in said
    assert not (hub.state / "manifest.json").exists()


def test_something_else_in_the_manifests_place_is_not_overwritten(hub: LoopbackHub, capsys: Any) -> None:
    (hub.state / "manifest.json").write_text("notes of mine")
    assert run(hub) == 2
    assert "Fix: look at it" in capsys.readouterr().err
    assert (hub.state / "manifest.json").read_text() == "notes of mine"
