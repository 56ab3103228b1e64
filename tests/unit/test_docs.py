"""What the pages tell a reader to type exists: files, links, commands with their options, keys of the inventory."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.inventory import pyinfra_keys
from node.inventory import KEYS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "files/locks/README.md",
]
OF_A_TOOLKIT = {"nvcc", "ptxas", "fatbinary", "cudafe", "nvlink", "python", "ninja"}  # programs in its own bin/
FOLDERS = "bin|benchmarks|docs|files|inventory|kit|node|roles|templates|tests"

# How a command begins in a page -> what prints its help.
HELP = {
    "bin/lab": ["-m", "tests.lab", "--help"],
    "bin/lock": ["bin/lock", "--help"],
    "bin/pin": ["-m", "roles.weights.pin", "--help"],
    "pyinfra": ["-m", "pyinfra", "--help"],
    "pytest": ["-m", "pytest", "tests/host", "--help"],
    "python -m node.render": ["-m", "node.render", "--help"],
    "python diagnose.py": ["diagnose.py", "--help"],
    "python3 /opt/kimi-nodes/tools/weights_agent.py": ["files/tools/weights_agent.py", "--help"],
}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(text: str) -> Iterator[str]:
    """Code of a page, an indented line or a piece between backticks, without what stands behind a #."""
    for indented in re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE):
        yield indented.split("  #")[0].strip()
    yield from re.findall(r"`([^`\n]+)`", text)


@functools.cache
def help_of(program: str) -> str:
    done = subprocess.run([sys.executable, *HELP[program]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link.split("#")[0]).exists()] == []


SOURCES = [path for folder in ("files", "kit", "node", "roles") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("page", [*PAGES, *SOURCES, *ROOT.glob("*.py")], ids=named)
def test_files_of_the_project_that_are_named_are_there(page: Path) -> None:
    """In pages, errors and comments. A name with capitals in it stands for another (NAME.txt)."""
    found = re.findall(rf"(?<![\w/.-])((?:{FOLDERS})/[a-z0-9_./*-]*[a-z0-9*])(?![\w/-])", page.read_text())
    found = [path for path in found if Path(path).name not in OF_A_TOOLKIT]
    missing = sorted({path for path in found if not list(ROOT.glob(path))} - {"files/manifests"})
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_options_that_are_named_are_the_programs_own(page: Path) -> None:
    unknown = []
    for command in commands(page.read_text()):
        for program in HELP:
            if (command + " ").startswith(program + " ") and not command.startswith("bin/lab ssh"):
                asked = re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", command)
                unknown += [f"{program} {option}" for option in asked if option not in help_of(program)]
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_keys_of_the_inventory_that_are_named_exist(page: Path) -> None:
    """`key = value` in code, and --data key=value."""
    text = page.read_text()
    settings = [re.match(r"([a-z_]+) = [\"'\[\d]", code) for code in commands(text)]
    asked = {found[1] for found in settings if found} | set(re.findall(r"--data '?([a-z_]+)=", text))
    assert sorted(asked - KEYS.keys() - pyinfra_keys()) == []


def test_subcommands_of_the_lab_are_its_own() -> None:
    asked = {found[1] for page in PAGES for found in re.finditer(r"bin/lab ([a-z]+)", page.read_text())}
    assert "up" in asked and [verb for verb in sorted(asked) if not re.search(rf"\b{verb}\b", help_of("bin/lab"))] == []


@pytest.mark.parametrize("path", sorted((ROOT / "inventory/group_data").glob("*.py")), ids=named)
def test_what_the_shipped_group_data_sets_are_keys(path: Path) -> None:
    assigned = {
        target.id
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    assert assigned and sorted(assigned - KEYS.keys() - pyinfra_keys()) == []
    assert (ROOT / "inventory" / path.name).exists() or path.stem == "all", "group data binds by the inventory's name"
