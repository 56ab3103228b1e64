"""A template that names what nobody gave fails before anything is laid down, and every template is laid down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest

from kit import templates


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(templates, "FOLDER", tmp_path)
    templates._environment.cache_clear()
    yield tmp_path
    templates._environment.cache_clear()


def shouted(text: str) -> str:
    return text.upper()


def test_blocks_leave_no_lines_and_the_last_line_ends(folder: Path) -> None:
    (folder / "unit.j2").write_text("[Unit]\n  {% if wanted %}\nA={{ name | shouted }}\n  {% endif %}\nB=<&>\n")
    values = {"wanted": True, "name": "x"}
    assert templates.render("unit.j2", values, [shouted]) == "[Unit]\nA=X\nB=<&>\n"
    assert templates.render("unit.j2", {**values, "wanted": False}, [shouted]) == "[Unit]\nB=<&>\n"


def test_a_name_that_means_nothing_is_an_error(folder: Path) -> None:
    (folder / "unit.j2").write_text("A={{ value }}\n")
    with pytest.raises(jinja2.UndefinedError, match="'value' is undefined"):
        templates.render("unit.j2", {})


def test_every_template_of_the_project_is_used() -> None:
    project = Path(templates.__file__).parents[1]
    users = [*(project / "roles").rglob("*.py"), *(project / "templates").iterdir()]
    used = "".join(path.read_text() for path in users)
    assert [path.name for path in (project / "templates").iterdir() if f'"{path.name}"' not in used] == []
