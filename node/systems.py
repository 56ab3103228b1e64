"""The operating systems that a node may run, and what a host says of its own.

Debian comes first in the table because the lab's machines run it. Python and glibc are those that a system installs
by itself and never changes within a release: packages.debian.org and packages.ubuntu.com, packages python3 and libc6.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from node.problems import Malformed, Problem

ARCHITECTURE = "x86_64"
"""The one machine type (`uname -m`) that the release locks hold wheels for."""


@dataclass(frozen=True)
class SupportedSystem:
    """One entry of SYSTEMS. distribution, version: ID and VERSION_ID of /etc/os-release. repository: the folder of
    https://developer.download.nvidia.com/compute/cuda/repos/ that is made for it. python: of /usr/bin/python3.
    """

    distribution: str
    version: str
    repository: str
    python: str
    glibc: str

    def as_system(self) -> System:
        """A host that runs it just as installed: for planning without a host."""
        return System(self.distribution, self.version, self.python, self.glibc, ARCHITECTURE)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


SYSTEMS: tuple[SupportedSystem, ...] = (
    SupportedSystem("debian", "12", repository="debian12", python="3.11", glibc="2.36"),
    SupportedSystem("debian", "13", repository="debian13", python="3.13", glibc="2.41"),
    SupportedSystem("ubuntu", "22.04", repository="ubuntu2204", python="3.10", glibc="2.35"),
    SupportedSystem("ubuntu", "24.04", repository="ubuntu2404", python="3.12", glibc="2.39"),
)
BY_NAME: Mapping[tuple[str, str], SupportedSystem] = {(entry.distribution, entry.version): entry for entry in SYSTEMS}


@dataclass(frozen=True)
class System:
    """What a host runs.

    distribution, version: ID and VERSION_ID of /etc/os-release; version is "" where there is none (Debian testing).
    python, glibc: major.minor ("3.11", "2.36"); python is "" where the host has no python3.
    architecture: `uname -m`.
    """

    distribution: str
    version: str
    python: str
    glibc: str
    architecture: str

    @property
    def supported(self) -> SupportedSystem | None:
        """The entry of SYSTEMS that this is; None for a system that is not supported."""
        return BY_NAME.get((self.distribution, self.version))

    @property
    def repository(self) -> str:
        """The folder of NVIDIA's repository for this system. Raises LookupError for one that is not supported."""
        if self.supported is None:
            raise LookupError(f"no NVIDIA repository is known for {self}")
        return self.supported.repository

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip()


def parse_os_release(text: str) -> dict[str, str]:
    """The assignments of /etc/os-release, unquoted as a shell would. Malformed for a line that is no assignment."""
    values: dict[str, str] = {}
    for line in text.lstrip("\ufeff").splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, quoted = stripped.partition("=")
        if not equals or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            raise Malformed("/etc/os-release: a line that is no assignment", stripped)
        try:
            values[name] = "".join(shlex.split(quoted, comments=False))
        except ValueError as error:
            raise Malformed(f"/etc/os-release: {error}", stripped) from None
    return values


def _major_minor(what: str, text: str) -> str:
    """ "3.11" from "3.11.2", "Python 3.11.2" or, of ldd's first line, the version at its end."""
    lines = text.strip().splitlines()
    match = (
        re.search(r"(?:^|\s)(\d{1,4}\.\d{1,4})(?:\.\d{1,4})?(?:[a-z+]\w*)?$", lines[0].strip(), re.ASCII)
        if lines
        else None
    )
    if match is None:
        raise Malformed(f"{what}: no version", text)
    return match.group(1)


def from_probe(os_release_text: str, python_version: str, glibc_version: str, machine: str) -> System:
    """What a host runs, from the text of /etc/os-release, `python3 --version` (or platform.python_version()),
    `getconf GNU_LIBC_VERSION` (or the first line of `ldd --version`), and `uname -m`.

    python_version may be empty: no python3. Raises Malformed for text in another form.
    """
    release = parse_os_release(os_release_text)
    distribution = release.get("ID", "").strip().lower()
    if not distribution:
        raise Malformed("/etc/os-release: no ID", os_release_text)
    if re.fullmatch(r"[a-z0-9_]+", machine.strip(), re.ASCII) is None:
        raise Malformed("uname -m: not a machine type", machine)
    return System(
        distribution=distribution,
        version=release.get("VERSION_ID", "").strip(),
        python=_major_minor("python3 --version", python_version) if python_version.strip() else "",
        glibc=_major_minor("glibc's version", glibc_version),
        architecture=machine.strip(),
    )


def problems(system: System) -> list[Problem]:
    """Why a node cannot run on this system; empty if it can."""
    found: list[Problem] = []
    names = ", ".join(str(entry) for entry in SYSTEMS)
    if system.architecture != ARCHITECTURE:
        found.append(
            Problem(
                "machine type",
                system.architecture,
                f"{ARCHITECTURE}, which the release locks hold wheels for",
                f"use an {ARCHITECTURE} machine",
            )
        )
    entry = system.supported
    if entry is None:
        version = str(system) if system.version else f"{system} without a VERSION_ID (testing or unstable?)"
        found.append(Problem("operating system", version, f"one of {names}", "install one of these on the host"))
        return found
    if not system.python:
        found.append(Problem("python3", "none", f"Python {entry.python}, {entry}'s own", "apt-get install python3"))
    elif system.python != entry.python:
        found.append(
            Problem(
                "python3",
                f"Python {system.python}",
                f"Python {entry.python}, {entry}'s own",
                "put /usr/bin before any other python3 in root's PATH, or undo the diversion of /usr/bin/python3",
            )
        )
    if system.glibc != entry.glibc:
        found.append(
            Problem(
                "glibc",
                system.glibc,
                f"{entry.glibc}, {entry}'s own",
                "take libc6 from the system's own release again: apt-cache policy libc6",
            )
        )
    return found
