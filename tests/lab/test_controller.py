"""What the lab reads from the machine it runs on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.lab import controller, template
from tests.lab.shell import remove_outdated

DEB822 = "Types: deb\nURIs: http://mirror.example.net/debian/\nSuites: bookworm\n\nURIs: http://mirror.example.net/debian-security\n"
UBUNTU = "Types: deb\nURIs: http://archive.example.net/ubuntu/\nSuites: noble\n"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("sources.list", "deb http://m.example.net/debian bookworm main\n", "http://m.example.net/debian-security"),
        (
            "sources.list.d/a.list",
            "deb [x=y] https://m.example.net/debian trixie main\n",
            "https://m.example.net/debian-security",
        ),
        ("sources.list.d/debian.sources", DEB822, "http://mirror.example.net/debian-security"),
        ("sources.list.d/ubuntu.sources", UBUNTU, None),
        ("sources.list", "# deb http://m.example.net/debian bookworm main\n", None),
    ],
)
def test_the_machines_own_debian_mirror_is_found(tmp_path: Path, name: str, text: str, found: str | None) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    mirror = controller.debian_mirror(tmp_path)
    assert mirror == (None if found is None else (found.removesuffix("-security"), found))


def test_where_there_is_none_mmdebstrap_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Ubuntu. Not an empty list of sources, from which nothing can be installed."""
    monkeypatch.setattr(controller, "debian_mirror", lambda: None)
    assert template._sources("bookworm") is None


def test_what_other_checkouts_may_be_about_to_use_stays(tmp_path: Path) -> None:
    now = time.time()
    for name, age in {"wanted": 7200, "old": 7200, "young": 60}.items():
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (now - age, now - age))
    remove_outdated(tmp_path / "wanted", list(tmp_path.iterdir()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wanted", "young"]
