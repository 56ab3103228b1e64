"""Operations are tested as data: what goes in is what a host would say, what comes out is what it would be told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kit import files, testing, units
from kit.command import QuoteString, StringCommand, host
from kit.probe import Probe
from kit.refusal import Refusal
from kit.role import operation


class Facts(Probe):
    program = "no-program-is-run.py"


WANTED = [files.File("/etc/a", "secret a", secret=True), files.Link("/current", "b")]


@operation("Serve")
def serve(wanted: list[files.Item], name: str) -> Iterator[Any]:
    found = Facts.read(paths=[item.path for item in wanted])
    if found.get("broken"):
        raise Refusal("is broken. Fix: mend it")
    yield from files.apply(wanted, found["files"])
    if name:
        yield StringCommand("touch --", QuoteString(name))
    else:
        host().noop("no name")
    yield from units.join("x.service", "X")


def test_commands_files_and_noops_come_out() -> None:
    facts = {Facts: {"files": {**testing.as_wanted(WANTED), "/etc/a": testing.file("old")}}}
    result = testing.prepare(serve, {"wanted": WANTED, "name": "it's"}, facts)
    assert result.commands == ["files: /etc/a", "touch -- 'it'\"'\"'s'", "Join(x.service)"]
    assert result.files == {"/etc/a": WANTED[0]}
    assert result.noop == []
    assert "secret a" not in repr(result)


def test_facts_may_depend_on_what_is_asked() -> None:
    result = testing.prepare(
        serve, {"wanted": WANTED, "name": ""}, {Facts: lambda paths: {"files": dict.fromkeys(paths)}}
    )
    assert result.commands[0] == "files: /etc/a /current"
    assert result.noop == ["no name"]


def test_a_refusal_comes_out_as_its_lines() -> None:
    result = testing.prepare(serve, {"wanted": WANTED, "name": ""}, {Facts: {"broken": True}})
    assert result.refused == ["is broken. Fix: mend it"]
    assert result.commands == []


def test_a_fact_that_was_not_given_is_an_error_of_the_test() -> None:
    with pytest.raises(KeyError):
        testing.prepare(files.apply, {"wanted": WANTED, "state": {}})
    assert testing.prepare(serve, {"wanted": WANTED, "name": ""}, {}).refused != []


def test_all_as_wanted_is_as_wanted() -> None:
    wanted: list[files.Item] = [
        *WANTED,
        files.Directory("/d", "700", "a", "b"),
        files.Absent("/gone"),
        files.File("/bytes", b"\xff", "755", "a", "b"),
    ]
    assert files.compare(testing.as_wanted(wanted), wanted) == {}
