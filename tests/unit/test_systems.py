"""A host's system is read from what it says, and an unsupported one is told why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node import systems
from node.problems import Malformed
from node.systems import SYSTEMS, System

DEBIAN_12 = """PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
NAME="Debian GNU/Linux"
VERSION_ID="12"
VERSION="12 (bookworm)"
VERSION_CODENAME=bookworm
ID=debian
HOME_URL="https://www.debian.org/"
"""
UBUNTU_24 = 'NAME="Ubuntu"\nVERSION_ID="24.04"\nVERSION="24.04.3 LTS (Noble Numbat)"\nID=ubuntu\nID_LIKE=debian\n'


def test_debian_is_read_from_what_its_own_commands_print() -> None:
    system = systems.from_probe(DEBIAN_12, "Python 3.11.2\n", "ldd (Debian GLIBC 2.36-9+deb12u10) 2.36\n", "x86_64\n")
    assert system == System("debian", "12", "3.11", "2.36", "x86_64")
    assert system.repository == "debian12"
    assert systems.problems(system) == []


def test_ubuntu_is_read_in_the_short_forms_too() -> None:
    system = systems.from_probe(UBUNTU_24.replace("\n", "\r\n"), "3.12.3", "glibc 2.39", "x86_64")
    assert system == System("ubuntu", "24.04", "3.12", "2.39", "x86_64")
    assert system.repository == "ubuntu2404"
    assert systems.problems(system) == []


def test_the_table_holds_the_supported_systems_and_nothing_else() -> None:
    assert {str(entry): (entry.repository, entry.python, entry.glibc) for entry in SYSTEMS} == {
        "debian 12": ("debian12", "3.11", "2.36"),
        "debian 13": ("debian13", "3.13", "2.41"),
        "ubuntu 22.04": ("ubuntu2204", "3.10", "2.35"),
        "ubuntu 24.04": ("ubuntu2404", "3.12", "2.39"),
    }


@pytest.mark.parametrize("entry", SYSTEMS, ids=str)
def test_every_supported_system_has_no_problems_as_installed(entry: systems.SupportedSystem) -> None:
    assert systems.problems(entry.as_system()) == []
    assert entry.as_system().supported is entry


@pytest.mark.parametrize(
    ("system", "subject", "found"),
    [
        (System("debian", "11", "3.9", "2.31", "x86_64"), "operating system", "debian 11"),
        (System("debian", "", "3.13", "2.42", "x86_64"), "operating system", "debian without a VERSION_ID"),
        (System("rocky", "9.4", "3.9", "2.34", "x86_64"), "operating system", "rocky 9.4"),
        (System("debian", "12", "3.11", "2.36", "aarch64"), "machine type", "aarch64"),
        (System("debian", "12", "", "2.36", "x86_64"), "python3", "none"),
        (System("debian", "12", "3.13", "2.36", "x86_64"), "python3", "Python 3.13"),
        (System("debian", "12", "3.11", "2.41", "x86_64"), "glibc", "2.41"),
    ],
)
def test_what_cannot_run_a_node_is_one_problem_that_names_it(system: System, subject: str, found: str) -> None:
    (problem,) = systems.problems(system)
    assert problem.subject == subject
    assert problem.found.startswith(found)
    assert re.search(r"\. Fix: \S", str(problem))


def test_an_unsupported_system_has_no_repository() -> None:
    with pytest.raises(LookupError, match="debian 11"):
        _ = System("debian", "11", "3.9", "2.31", "x86_64").repository


def test_both_the_machine_and_the_system_are_told() -> None:
    subjects = [problem.subject for problem in systems.problems(System("fedora", "42", "3.13", "2.41", "aarch64"))]
    assert subjects == ["machine type", "operating system"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("", "3.11.2", "2.36", "x86_64"),
        ("VERSION_ID=12\n", "3.11.2", "2.36", "x86_64"),
        ("ID=debian\nnot an assignment\n", "3.11.2", "2.36", "x86_64"),
        ("ID='debian\n", "3.11.2", "2.36", "x86_64"),
        (DEBIAN_12, "command not found", "2.36", "x86_64"),
        (DEBIAN_12, "3.11.2", "", "x86_64"),
        (DEBIAN_12, "3.11.2", "2.36", ""),
        (DEBIAN_12, "3.11.2", "2.36", "rm -rf /"),
    ],
)
def test_other_text_is_malformed(arguments: tuple[str, str, str, str]) -> None:
    with pytest.raises(Malformed):
        systems.from_probe(*arguments)


@given(st.text(), st.text(), st.text(), st.text())
def test_no_text_raises_anything_but_malformed(release: str, python: str, glibc: str, machine: str) -> None:
    for text in (release, DEBIAN_12):
        try:
            systems.problems(systems.from_probe(text, python, glibc, machine))
        except Malformed as error:
            assert str(error)


def test_the_system_that_runs_these_tests_is_read() -> None:
    text = Path("/etc/os-release").read_text(encoding="utf-8")
    values = systems.parse_os_release(text)
    assert values["ID"] and f"ID={values['ID']}" in text.replace('"', "")
