"""A unit is restarted when it has not seen what is on disk, and only then."""

from __future__ import annotations

from typing import Any

import pytest

from kit import testing
from kit.signals import reasons_to_restart

BEFORE, AFTER = testing.file("x", changed=900.0), testing.file("x", changed=1001.0)


@pytest.mark.parametrize(
    ("unit", "files", "reasons"),
    [
        (testing.unit(), {"/a": BEFORE, "/b": None}, []),
        (testing.unit(), {"/a": BEFORE, "/b": AFTER}, ["/b changed after the start"]),
        (
            testing.unit("activating"),
            {"/current": testing.link("x", changed=2000.0)},
            ["/current changed after the start"],
        ),
        (testing.unit(NeedDaemonReload="yes"), {"/a": BEFORE}, ["its unit file changed"]),
        (testing.unit("inactive"), {"/a": AFTER}, []),
        (testing.unit("failed"), {"/a": AFTER}, []),
    ],
)
def test_reasons(unit: dict[str, Any], files: dict[str, Any], reasons: list[str]) -> None:
    assert reasons_to_restart(unit, files) == reasons
