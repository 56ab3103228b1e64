"""The pages of profiles say what the plan does, and what the servers log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from node.profile_pages import BEGIN, END, KINDS, made, planned
from node.profiles import PROFILES, SPECULATIVE
from node.releases import FORBIDDEN, RELEASES
from tests.unit.test_patches import unpacked

PROJECT = Path(__file__).resolve().parents[2]
PAGES = PROJECT / "docs" / "profiles"
PAGED = [name for name, profile in PROFILES.items() if profile.device == "cuda" and profile.cuda_graphs]


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


@pytest.mark.parametrize("name", PAGED)
def test_arguments_and_memory_on_the_page_are_the_plans(name: str) -> None:
    found = re.search(re.escape(BEGIN) + r".*?" + re.escape(END), page(name), re.DOTALL)
    assert found, f"{name}.md has no part that is made"
    assert found[0] == made(name), f"python -m node.profile_pages {name} says otherwise"


@pytest.mark.parametrize("name", PAGED)
def test_every_page_tells_when_how_and_how_back(name: str) -> None:
    text = page(name)
    for heading in ("When to choose it", "What the log says", "Time to ready", "Switch to it, and back"):
        assert f"## {heading}\n" in text
    assert (
        f"--data profile={name} " in text
        and f"journalctl -f -u {planned(name, KINDS['8 x B300']).service.unit}" in text
    )


def test_every_profile_has_a_page_and_stands_in_the_overview() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*PAGED, "README"}
    overview = page("README")
    assert [name for name in PAGED if f"[{name}]({name}.md)" not in overview] == []


def test_drafting_that_no_release_has_is_told_as_such() -> None:
    assert "ddtree" in SPECULATIVE
    assert not any("ddtree" in release.speculative for release in RELEASES.values())
    assert "No release of SGLang has it" in page("ep8-dflash")


@pytest.mark.parametrize("option", FORBIDDEN)
def test_options_that_are_forbidden_exist_and_stand_in_no_plan(option: str) -> None:
    for release in RELEASES.values():
        assert option in (PROJECT / release.options_file).read_text().split(), release.name
        assert option not in release.dialect.values()
    for name in PAGED:
        for gpu in KINDS.values():
            assert option not in planned(name, gpu).service.arguments


LOGGED = [
    pytest.param(name, line, id=f"{name}-{line[:40]}", marks=pytest.mark.slow)
    for name in PAGED
    for line in re.findall(r"^\| `([^-`][^`]*)` \| ", page(name).partition("## What the log says")[2], re.MULTILINE)
]


@pytest.mark.parametrize(("name", "line"), LOGGED)
def test_lines_that_the_page_promises_are_in_every_release_or_are_ours(name: str, line: str) -> None:
    text = line.partition("...")[0].strip()
    if text == "loaded":
        assert "loaded %s, sha256 %s" in (PROJECT / "files" / "tools" / "engine_log.py").read_text()
        return
    for release in RELEASES:
        folder = unpacked(release, "sglang") / "sglang" / "srt"
        assert any(text in file.read_text(errors="replace") for file in folder.rglob("*.py")), release
