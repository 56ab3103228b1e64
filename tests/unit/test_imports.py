"""What may import what: data flows one way, and what runs on a host finds there what it imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"node", "kit", "roles", "tests", "files", "inventory", "benchmarks"}
LOOKS_AROUND = {"asyncio", "glob", "http", "io", "os", "pathlib", "shutil", "socket", "ssl", "subprocess", "urllib"}
ENGINE = {"flashinfer", "requests", "sglang", "torch"}  # of the release's environment, which the warm-up runs in


def imports(path: Path) -> Iterator[str]:
    """Every name that a file imports, wherever in it: `from kit import files` as kit.files. Relative ones left out."""
    for found in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(found, ast.Import):
            yield from (alias.name for alias in found.names)
        elif isinstance(found, ast.ImportFrom) and found.level == 0:
            yield from (f"{found.module}.{alias.name}" for alias in found.names)


def below(name: str, parents: set[str]) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def others(path: Path, allowed: set[str]) -> list[str]:
    """What a file imports beside the standard library and what is allowed."""
    outside = {name for name in imports(path) if name.split(".")[0] not in sys.stdlib_module_names}
    return sorted(name for name in outside if not below(name, allowed))


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def sent_to_hosts() -> list[Path]:
    programs = [path for path in sources("roles", "kit", "tests/host") if path.name.endswith("_on_host.py")]
    probes = [path for path in sources("roles") if path.name.endswith("probe.py")]
    return [*programs, *probes, ROOT / "kit/on_host.py"]


@pytest.mark.parametrize("path", sources("node"), ids=named)
def test_what_a_node_should_be_is_decided_without_looking_around(path: Path) -> None:
    """node.render alone reads an inventory, and that in a child process."""
    assert others(path, {"node", "packaging"}) == []
    if path.name != "render.py":
        looks = {name for name in imports(path) if below(name, LOOKS_AROUND)} - {"pathlib.PurePosixPath"}
        assert not looks and "open(" not in path.read_text()


@pytest.mark.parametrize("path", sources("kit"), ids=named)
def test_kit_knows_pyinfra_and_nothing_of_nodes(path: Path) -> None:
    assert others(path, {"kit", "jinja2", "pyinfra", "pyinfra_cli", "typing_extensions"}) == []


@pytest.mark.parametrize("path", sources("roles"), ids=named)
def test_a_role_imports_node_and_kit_and_no_other_role(path: Path) -> None:
    """Nor anything of pyinfra. The weights' role and their agent's program share what they say to each other."""
    role = path.relative_to(ROOT / "roles").parts[0]
    assert others(path, {"node", "kit", f"roles.{role}", f"files.tools.{role}"}) == []


@pytest.mark.parametrize("path", sent_to_hosts(), ids=named)
def test_what_is_sent_to_a_host_imports_what_is_sent_along(path: Path) -> None:
    """kit.program sends kit.on_host and no other module; a host has Python's standard library and no more."""
    assert others(path, {"kit.on_host"}) == []


@pytest.mark.parametrize("path", sources("files/tools"), ids=named)
def test_programs_of_a_node_need_nothing_of_the_controller(path: Path) -> None:
    beside = {program.stem for program in (ROOT / "files/tools").iterdir()}
    assert others(path, beside | {"huggingface_hub", "libtorrent"} | ENGINE) == []


def test_only_kit_reaches_into_pyinfra() -> None:
    """So that a new pyinfra changes one folder. Tests of kit itself may."""
    insides = {"pyinfra", "pyinfra_cli", "paramiko", "gevent"}
    files = [path for path in [*sources(*OURS), *ROOT.glob("*.py")] if not path.is_relative_to(ROOT / "kit")]
    found = {named(path): {name for name in imports(path) if below(name, insides)} for path in files}
    assert {name for name, bad in found.items() if bad and not name.startswith("tests/unit/test_kit_")} == set()


def test_these_tests_see_an_import_wherever_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        "from kit import files\nif 1:\n    import roles.edge.deploy as e\ndef f():\n    from node.plan import make\n"
    )
    assert others(path, {"kit"}) == ["node.plan.make", "roles.edge.deploy"]
    assert others(path, {"kit.on_host", "node"}) == ["kit.files", "roles.edge.deploy"]
