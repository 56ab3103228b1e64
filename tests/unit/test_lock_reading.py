"""A lock is read as what it installs, and anything that is not pinned by version and hash is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.lock import distributions
from node.problems import Malformed
from node.releases import RELEASES

PROJECT = Path(__file__).resolve().parents[2]
HASH = " \\\n    --hash=sha256:" + "0" * 64


def test_names_versions_and_markers() -> None:
    old, new = "a==1 ; python_version < '3.11'", "a==2 ; python_version >= '3.11'"
    lock = f"# made by\nB_b==2.0{HASH}{HASH}\n{old}{HASH}\n{new}{HASH}\n"
    assert distributions(lock.encode(), "3.10") == {"a": "1", "b-b": "2.0"}
    assert distributions(lock.encode(), "3.12") == {"a": "2", "b-b": "2.0"}


@pytest.mark.parametrize(
    ("lock", "says"),
    [
        ("a==1\n", "without sha256 hashes"),
        (f"a>=1{HASH}\n", "without one exact version"),
        (f"a==1.*{HASH}\n", "without one exact version"),
        ("a==1 --hash=md5:00\n", "without sha256 hashes"),
        (f"-r other.txt{HASH}\n", "not a requirement"),
        (f"a==1{HASH}\nA==2{HASH}\n", "a twice"),
    ],
)
def test_what_is_not_pinned_is_an_error(lock: str, says: str) -> None:
    with pytest.raises(Malformed, match=says):
        distributions(lock.encode(), "3.12")


@pytest.mark.parametrize("name", RELEASES)
def test_each_release_is_whole_on_each_of_its_pythons(name: str) -> None:
    release = RELEASES[name]
    for python in release.pythons:
        found = distributions((PROJECT / release.lock).read_bytes(), python)
        assert {key: found[key] for key in release.pins} == dict(release.pins) and "ninja" in found
