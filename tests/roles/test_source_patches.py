"""source_patches: what is known is patched once, what is not known is refused, and the receipt carries the evidence."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kit import testing
from kit.on_host import Problem
from node.patches import Digests, Patch
from roles.source_patches import patch_on_host, probe
from roles.source_patches.facts import PatchFacts
from roles.source_patches.operations import patch_release

ORIGINAL = b"def first():\n    return pool(0)\n"
RESULT = b"def first():\n    return pool(start)\n"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


FIRST = Patch(
    id="first-layer",
    title="a stage asks for its own layer",
    package="engine",
    file="engine/backend.py",
    versions=">=1,<2",
    nvcc_below=None,
    digests={"1.5": Digests(sha256(ORIGINAL), sha256(RESULT))},
    upstream={"2.0": sha256(b"mended")},
    old="pool(0)",
    new="pool(start)",
    retired_by="engine 2",
    shows="IndexError",
    source="its source",
)
SECOND = Patch(
    **{
        **FIRST.__dict__,
        "id": "empty-check",
        "package": "kernels",
        "file": "kernels/core.py",
        "nvcc_below": "12.9",
    }
)
FOUND = {
    "built": True,
    "versions": {"engine": "1.5", "kernels": "1.5"},
    "digests": {FIRST.file: sha256(ORIGINAL), SECOND.file: sha256(ORIGINAL)},
    "nvcc": "13.0",
    "receipt": None,
}


def patch(found: dict[str, Any]) -> testing.Result:
    return testing.prepare(
        patch_release,
        {
            "patches": (FIRST, SECOND),
            "digest": "0123456789abcdef",
            "python": "/r/bin/python",
            "site_packages": "/r/site",
            "nvcc": "/cuda/bin/nvcc",
            "built": "/receipts/release.json",
            "receipt": "/receipts/patches.json",
        },
        {PatchFacts: found},
    )


class Acted:
    """What an act command would tell the host: its arguments, caught at `patch_on_host.act`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.arguments: dict[str, Any] = {}
        monkeypatch.setattr("roles.source_patches.operations.act_command", self._caught)

    def _caught(self, source: Path, arguments: dict[str, Any], shown: tuple[str, ...] = ()) -> str:
        assert source == Path(patch_on_host.__file__)
        self.arguments = json.loads(json.dumps(arguments))
        return "patch " + ", ".join(shown)


def test_the_needed_patch_is_applied_and_the_other_recorded_with_its_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    acted = Acted(monkeypatch)
    assert patch(FOUND).commands == ["patch first-layer: applied, empty-check: not needed"]
    assert [edit["id"] for edit in acted.arguments["edits"]] == ["first-layer"]
    assert acted.arguments["compiled"] == [FIRST.file]
    first, second = acted.arguments["record"]["patches"]
    assert (first["sha256_before"], first["sha256"]) == (sha256(ORIGINAL), sha256(RESULT))
    assert (second["action"], second["nvcc"], second["sha256"]) == ("not needed", "13.0", sha256(ORIGINAL))
    assert "nvcc 13.0 is not older than 12.9" in second["reason"]


def test_an_older_compiler_makes_the_second_patch_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    acted = Acted(monkeypatch)
    patch({**FOUND, "nvcc": "12.8"})
    assert [edit["id"] for edit in acted.arguments["edits"]] == ["first-layer", "empty-check"]


def test_a_second_run_finds_all_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    acted = Acted(monkeypatch)
    patch(FOUND)
    receipt = {**acted.arguments["record"], "patched": "2026-01-01T00:00:00+00:00"}
    result = patch(
        {**FOUND, "digests": {FIRST.file: sha256(RESULT), SECOND.file: sha256(ORIGINAL)}, "receipt": receipt}
    )
    assert (result.commands, result.refused) == ([], [])
    assert result.noop == ["first-layer: applied; empty-check: not needed"], "what was applied once stays on record so"


def test_a_kill_between_edit_and_receipt_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    acted = Acted(monkeypatch)
    result = patch({**FOUND, "digests": {FIRST.file: sha256(RESULT), SECOND.file: sha256(ORIGINAL)}})
    assert result.commands == ["patch first-layer: already, empty-check: not needed"]
    assert acted.arguments["edits"] == []
    assert acted.arguments["compiled"] == [FIRST.file], "the bytecode may be missing still"


@pytest.mark.parametrize("file", [FIRST.file, SECOND.file])
def test_a_file_edited_by_hand_refuses_the_host_and_nothing_is_changed(file: str) -> None:
    result = patch({**FOUND, "digests": {**FOUND["digests"], file: sha256(b"by hand")}})  # type: ignore[dict-item]
    assert not result.commands
    assert len(result.refused) == 1
    assert file in result.refused[0] and sha256(b"by hand") in result.refused[0] and "Fix: remove" in result.refused[0]


@pytest.mark.parametrize(
    "missing",
    [
        {
            "built": False,
            "versions": {"engine": None, "kernels": None},
            "digests": {FIRST.file: None, SECOND.file: None},
        },
        {"nvcc": None},
        {"built": False},
    ],
)
def test_what_earlier_steps_bring_is_no_reason_to_refuse_before_they_ran(
    missing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    acted = Acted(monkeypatch)
    result = patch({**FOUND, **missing})
    assert not result.refused and len(result.commands) == 1
    with pytest.raises(Problem, match="Fix: run deploy"):  # but once it is their turn, it is
        patch_on_host.act(**acted.arguments)


@pytest.fixture
def release(tmp_path: Path) -> dict[str, Any]:
    """A release on disk, and the arguments that patch it."""
    target = tmp_path / FIRST.file
    target.parent.mkdir()
    target.write_bytes(ORIGINAL)
    target.chmod(0o640)
    return {
        "problems": [],
        "python": sys.executable,
        "site_packages": str(tmp_path),
        "edits": [
            {
                "id": FIRST.id,
                "file": FIRST.file,
                "before": sha256(ORIGINAL),
                "after": sha256(RESULT),
                "old": FIRST.old,
                "new": FIRST.new,
            }
        ],
        "compiled": [FIRST.file],
        "receipt": str(tmp_path / "patches.json"),
        "record": {"digest": "0", "patches": []},
    }


def test_the_edit_is_made_with_its_bytecode_and_the_receipt(release: dict[str, Any], tmp_path: Path) -> None:
    target = tmp_path / FIRST.file
    other = tmp_path / "cache"
    other.hardlink_to(target)
    patch_on_host.act(**release)
    assert target.read_bytes() == RESULT and target.stat().st_mode & 0o777 == 0o640
    assert other.read_bytes() == ORIGINAL, "a hard link of the installer's cache keeps what it had"
    assert list((target.parent / "__pycache__").glob("backend.*.pyc"))
    receipt = json.loads((tmp_path / "patches.json").read_text())
    assert receipt.pop("patched") and receipt == release["record"]
    assert not [path for path in tmp_path.rglob("*kimi-nodes-new")]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"before": "0" * 64}, "Fix: see who changes files"),
        ({"after": "0" * 64}, "results in sha256"),
        ({"old": "pool(1)"}, "0 times, wanted it once"),
    ],
)
def test_nothing_is_written_where_the_file_or_the_result_is_not_the_known_one(
    release: dict[str, Any], tmp_path: Path, change: dict[str, str], says: str
) -> None:
    release["edits"][0].update(change)
    with pytest.raises(Problem, match=says):
        patch_on_host.act(**release)
    assert (tmp_path / FIRST.file).read_bytes() == ORIGINAL
    assert not (tmp_path / "patches.json").exists()


def test_the_probe_reads_versions_digests_and_compiler(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "engine-1.5.dist-info").mkdir(parents=True)
    (site / "engine-1.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: engine\nVersion: 1.5\n")
    (site / "engine").mkdir()
    (site / FIRST.file).write_bytes(ORIGINAL)
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    nvcc.chmod(0o755)
    found = probe.probe(
        str(site),
        ["engine", "kernels"],
        [FIRST.file, SECOND.file],
        str(nvcc),
        str(tmp_path / "no"),
        str(tmp_path / "no"),
    )
    assert found == {
        "built": False,
        "versions": {"engine": "1.5", "kernels": None},
        "digests": {FIRST.file: sha256(ORIGINAL), SECOND.file: None},
        "nvcc": "13.0",
        "receipt": None,
    }
    nvcc.write_text("#!/bin/sh\necho release 13.0,; exit 1\n")
    assert probe.nvcc_release(str(nvcc)) is None and probe.nvcc_release(str(tmp_path / "none")) is None
