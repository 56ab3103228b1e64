"""The benchmark that restarts a node's server leaves its cache as it was."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NODE: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks/first_request_on_node.py"))
CONTROLLER: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks/first_request.py"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    for name in ("flashinfer/sampling/sampling.so", "cubins/11aa/kernel.cubin", "warmed.json"):
        path = tmp_path / "cache" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "cache/flashinfer/link").symlink_to("sampling")
    return tmp_path / "cache"


def content(cache: Path) -> dict[str, str]:
    return {str(path.relative_to(cache)): path.read_text() for path in cache.rglob("*") if path.is_file()}


def test_a_cache_that_is_set_aside_comes_back_whole_after_a_failure(cache: Path) -> None:
    before = content(cache)
    with pytest.raises(SystemExit, match="died"), NODE["emptied"](cache):
        assert set(content(cache)) - {name for name in content(cache) if name.startswith(NODE["ASIDE"])} == {
            "cubins/11aa/kernel.cubin"
        }
        (cache / "flashinfer").mkdir()
        (cache / "flashinfer/new.so").write_text("compiled meanwhile")
        raise SystemExit("died")
    assert content(cache) == before and (cache / "flashinfer/link").is_symlink()


def test_what_an_earlier_run_left_aside_is_not_run_over(cache: Path) -> None:
    (cache / NODE["ASIDE"]).mkdir()
    with pytest.raises(SystemExit, match="Fix: "):
        NODE["settled_or_stop"](cache)


def test_what_is_compiled_is_seen_by_name_and_by_time(cache: Path) -> None:
    before = NODE["compiled"](cache)
    assert set(before) == {"flashinfer/sampling/sampling.so"}, "neither cubins, which nobody compiles, nor receipts"
    (cache / "triton").mkdir()
    (cache / "triton/kernel.cubin").write_text("for this GPU")
    assert set(NODE["compiled"](cache)) - set(before) == {"triton/kernel.cubin"}


def test_the_node_s_part_travels_whole(tmp_path: Path) -> None:
    """Quotes and line ends of a program of two hundred lines, through a shell: it ends where it looks for a server."""
    units = tmp_path / "systemctl"
    units.write_text("#!/bin/sh\nexit 0\n")
    units.chmod(0o755)
    told = {"requests": 1, "words": 1, "ways": ["ours"], "prefix": str(tmp_path), "seconds": 1}
    command = CONTROLLER["command"](told)
    done = subprocess.run(["/bin/sh", "-c", command], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1 and "found no active sglang-*.service" in done.stderr
