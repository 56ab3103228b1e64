"""Locks: complete, hashed, without an address; of one CUDA; and they resolve on every Python they are for."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.utils import canonicalize_name

from node.releases import RELEASES, Release

PROJECT = Path(__file__).resolve().parents[2]
HEAD = re.compile(r"([a-z0-9.-]+)==([A-Za-z0-9.!+]+)(?: ; (.+?))? \\")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
each_release = pytest.mark.parametrize("release", RELEASES.values(), ids=lambda release: release.name)


def load_lock_command() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("lock_command", str(PROJECT / "bin" / "lock"))
    spec = importlib.util.spec_from_loader("lock_command", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lock_command"] = module
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    return module


command: Any = load_lock_command()
each_lock = pytest.mark.parametrize("target", command.TARGETS.values(), ids=lambda target: target.name)


def entries(text: str) -> list[tuple[str, str, str | None]]:
    """(distribution, version, marker) of a lock. Raises ValueError at the first line that is not of a hashed pin."""
    found: list[tuple[str, str, str | None]] = []
    continued = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#") and not continued:
            continue
        match = (HASH if continued else HEAD).fullmatch(line)
        if not match:
            raise ValueError(f"line {number}: found {line!r}, wanted {'a hash' if continued else 'name==version'}")
        if not continued:
            found.append((match[1], match[2], match[3]))
        continued = line.endswith("\\")
    if continued:
        raise ValueError("the last line is continued")
    return found


def versions(text: str, python: str) -> dict[str, list[str]]:
    """Distribution -> versions that this Python would install, on a node."""
    found: dict[str, list[str]] = {}
    environment = {**command.NODE_ENVIRONMENT, "python_version": python, "python_full_version": f"{python}.6"}
    for name, version, marker in entries(text):
        if marker is None or Marker(marker).evaluate(environment):
            found.setdefault(name, []).append(version)
    return found


@each_lock
def test_every_line_is_a_hashed_pin_and_none_names_an_address(target: Any) -> None:
    text = target.answer.read_text()
    assert len(entries(text)) > 10
    assert "://" not in text
    assert not re.search(r"^\s*--(?!hash=)", text, re.MULTILINE)


@pytest.mark.parametrize(
    "text",
    [
        "torch==2.11.0\n",
        "torch>=2 \\\n    --hash=sha256:" + "0" * 64 + "\n",
        "torch==2.11.0 \\\n    --hash=md5:" + "0" * 32 + "\n",
        "torch==2.11.0 \\\n    --hash=sha256:" + "0" * 64 + " \\\n",
        "--index-url somewhere\n",
    ],
)
def test_the_reader_of_these_tests_takes_nothing_else(text: str) -> None:
    with pytest.raises(ValueError):
        entries(text)


@each_lock
def test_every_python_gets_one_version_of_each_distribution(target: Any) -> None:
    for python in target.pythons:
        found = versions(target.answer.read_text(), python)
        assert {name: several for name, several in found.items() if len(several) != 1} == {}


@each_lock
def test_what_was_asked_for_is_in_the_answer(target: Any) -> None:
    asked = re.findall(r"^[A-Za-z0-9_.-]+", target.question.read_text(), re.MULTILINE)
    for python in target.pythons:
        assert {canonicalize_name(name) for name in asked} <= set(versions(target.answer.read_text(), python))


@each_release
def test_the_release_s_versions_are_those_of_its_lock(release: Release) -> None:
    for python in release.pythons:
        found = versions((PROJECT / release.lock).read_text(), python)
        assert {name: found[name] for name in release.pins} == {name: [pin] for name, pin in release.pins.items()}


@each_release
def test_the_lock_says_which_date_and_which_pythons_it_is_for(release: Release) -> None:
    header = "\n".join((PROJECT / release.lock).read_text().splitlines()[:3])
    assert f"bin/lock --before {release.resolved} {release.name}" in header
    assert f"CPython {', '.join(release.pythons)} on x86_64 Linux, glibc 2.34" in header


@each_release
def test_compiler_and_headers_of_the_wheels_are_of_the_release_s_toolkit(release: Release) -> None:
    found = versions((PROJECT / release.lock).read_text(), release.pythons[-1])
    parts = ["nvidia-cuda-runtime", "nvidia-cuda-nvrtc", "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"]
    minors = {part: ".".join(found[part][0].split(".")[:2]) for part in parts if part in found}
    assert minors["nvidia-cuda-runtime"] == release.cuda_toolkit
    assert set(minors.values()) == {release.cuda_toolkit}


@each_release
def test_a_compiler_in_the_lock_is_known_to_the_release_and_the_other_way_round(release: Release) -> None:
    found = versions((PROJECT / release.lock).read_text(), release.pythons[-1])
    assert bool(release.wheel_nvcc_directories) == ("nvidia-cuda-nvcc" in found)


@each_release
def test_the_release_says_whether_compiled_kernels_are_in_its_lock(release: Release) -> None:
    found = versions((PROJECT / release.lock).read_text(), release.pythons[-1])
    assert found.get("flashinfer-cubin") == ([release.flashinfer] if release.cubins_in_lock else None)


@each_release
def test_only_what_has_no_wheel_is_left_out_and_only_where_it_has_none(release: Release) -> None:
    text = (PROJECT / release.lock).read_text()
    assert [python for python in release.pythons if "outlines-core" not in versions(text, python)] == ["3.13"]


def test_wheels_of_newer_systems_other_libraries_and_other_pythons_are_not_for_nodes() -> None:
    tags = {str(tag) for tag in command.compatible_tags("3.12")}
    assert {"cp312-cp312-manylinux_2_34_x86_64", "cp310-abi3-manylinux2014_x86_64", "py3-none-any"} <= tags
    assert not tags & {
        "cp312-cp312-manylinux_2_35_x86_64",
        "cp312-cp312-musllinux_1_2_x86_64",
        "cp312-cp312t-manylinux_2_34_x86_64",
        "cp313-cp313-manylinux_2_34_x86_64",
        "cp312-cp312-manylinux_2_34_aarch64",
    }


def package(*wheels: str, **more: str) -> dict[str, Any]:
    listed = [{"url": f"folder/{wheel}", "hashes": {"sha256": f"{number:064x}"}} for number, wheel in enumerate(wheels)]
    return {"name": "engine", "version": "1.0", "wheels": listed, **more}


def test_an_entry_lists_the_wheels_that_nodes_can_install_and_no_other() -> None:
    given = package(
        "engine-1.0-cp310-cp310-manylinux_2_28_x86_64.whl",
        "engine-1.0-cp310-cp310-win_amd64.whl",
        "engine-1.0-cp311-abi3-manylinux_2_28_x86_64.whl",
        "engine-1.0-cp311-abi3-manylinux_2_35_x86_64.whl",
    )
    pythons, text = command.entry(given, command.TARGETS["tools"])
    assert pythons == command.PYTHONS
    assert text == f"engine==1.0 \\\n    --hash=sha256:{0:064x} \\\n    --hash=sha256:{2:064x}\n"


def test_a_package_without_a_wheel_for_some_python_is_refused_by_name() -> None:
    given = package("engine-1.0-cp310-cp310-manylinux_2_28_x86_64.whl")
    with pytest.raises(command.Failed, match=r"no wheel of engine 1\.0 for CPython 3\.11.*\. Fix: "):
        command.entry(given, command.TARGETS["tools"])


def test_a_marker_is_cut_down_to_the_pythons_it_chooses() -> None:
    given = package(
        "engine-1.0-py3-none-any.whl",
        marker="python_full_version < '3.11' and sys_platform == 'linux' or os_name == 'nt'",
    )
    pythons, text = command.entry(given, command.TARGETS["tools"])
    assert pythons == ("3.10",)
    assert text.startswith("engine==1.0 ; python_version < '3.11' \\\n")


@pytest.mark.parametrize("wanted", [("3.10",), ("3.11", "3.12"), ("3.13",), ("3.10", "3.12"), command.PYTHONS])
def test_a_marker_is_true_on_what_it_was_made_for_and_nowhere_else(wanted: tuple[str, ...]) -> None:
    marker = command.marker_for(wanted, command.PYTHONS)
    assert tuple(python for python in command.PYTHONS if not marker or command.holds(marker, python)) == wanted


def test_a_lock_that_names_an_address_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "node_lock", lambda target, before: "engine @ https://example.invalid/engine.whl\n")
    with pytest.raises(command.Failed, match=r"https://example\.invalid"):
        command.make(command.TARGETS["tools"], "2026-11-29T00:00:00Z")


def test_a_check_that_fails_says_which_lock_on_which_python_and_how_to_mend_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(target: Any, python: str) -> str:
        if python == "3.12":
            raise command.Failed("no such wheel")
        return "Would install 1 package"

    monkeypatch.setattr(command, "forged", lambda target: ["engine==1.0 " + "0" * 64])
    monkeypatch.setattr(command, "check", check)
    assert command.check_all([command.TARGETS["tools"]]) == 1
    told = capsys.readouterr().out
    assert "tools: found files that are not published" in told and "engine==1.0 " + "0" * 64 in told
    assert "tools on Python 3.12: does not resolve. Fix: bin/lock tools\nno such wheel" in told
    assert "tools on Python 3.11: Would install 1 package" in told


def test_a_check_that_finds_nothing_wrong_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "forged", lambda target: [])
    monkeypatch.setattr(command, "check", lambda target, python: "Would install 1 package")
    assert command.check_all([command.TARGETS["tools"]]) == 0


@pytest.mark.slow
def test_every_lock_resolves_on_every_python_it_is_for() -> None:
    checked = subprocess.run([sys.executable, str(PROJECT / "bin/lock"), "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    expected = [f"{name} on Python {python}: " for name, t in command.TARGETS.items() for python in t.pythons]
    lines = checked.stdout.splitlines()
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert re.fullmatch(re.escape(start) + r"Would install \d+ packages", line)


@pytest.mark.slow
def test_a_lock_that_lacks_something_its_packages_need_does_not_resolve(tmp_path: Path) -> None:
    target = command.TARGETS["tools"]
    spoilt = re.sub(r"^idna==.*\n(    --hash.*\n)+", "", target.answer.read_text(), flags=re.MULTILINE)
    assert spoilt != target.answer.read_text()
    (tmp_path / "lock.txt").write_text(spoilt)
    with pytest.raises(command.Failed, match="idna"):
        command.check(dataclasses.replace(target, answer=tmp_path / "lock.txt"), "3.12")


@pytest.mark.slow
def test_a_hash_that_no_published_file_has_is_found(tmp_path: Path) -> None:
    target = command.TARGETS["tools"]
    spoilt = re.sub(r"(idna==.*\n    --hash=sha256:)[0-9a-f]{64}", r"\g<1>" + "0" * 64, target.answer.read_text())
    (tmp_path / "lock.txt").write_text(spoilt)
    version = versions(spoilt, "3.12")["idna"][0]
    assert command.forged(target) == []
    assert command.forged(dataclasses.replace(target, answer=tmp_path / "lock.txt")) == [f"idna=={version} {'0' * 64}"]


@pytest.mark.slow
def test_the_date_in_a_lock_makes_the_same_bytes_again() -> None:
    target = command.TARGETS["tools"]
    text = target.answer.read_text()
    found = re.search(r"--before (\S+) tools", text)
    assert found is not None
    assert command.make(target, found[1]) == text
