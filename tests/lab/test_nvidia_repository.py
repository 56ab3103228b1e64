"""The stand-in for NVIDIA's repository: complete in itself, rightly signed, and its tables without contradictions."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

import pytest

from node.toolkits import REPOSITORY_KEYS, TOOLKITS
from tests.lab import nvidia_packages, nvidia_repository, settings


@pytest.mark.parametrize("kit", nvidia_packages.TOOLKITS, ids=lambda kit: kit.version)
def test_every_dependency_is_a_package_of_the_toolkit(kit: nvidia_packages.Toolkit) -> None:
    packages = {package.name: package for package in nvidia_packages.packages(kit)}
    wanted = {name for package in packages.values() for name in package.depends}
    assert wanted - set(packages) == {"build-essential"}
    assert {wheel for package in packages.values() for wheel, _, _ in package.files} == set(kit.wheels)


@pytest.mark.parametrize("version", TOOLKITS)
def test_the_metapackage_that_a_node_installs_is_there_in_that_version(version: str) -> None:
    wanted = TOOLKITS[version]
    (kit,) = [kit for kit in nvidia_packages.TOOLKITS if kit.version == version]
    found = {package.name: kit.deb_version(package.component) for package in nvidia_packages.packages(kit)}
    assert found[wanted.package] == wanted.apt_version


@pytest.fixture(params=sorted(settings.SUITES.values()))
def distribution(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(distribution: str) -> Path:
    """One distribution's part of the built repository."""
    return nvidia_repository.build(settings.read()) / nvidia_repository.PATH / distribution / "x86_64"


@pytest.mark.lab
def test_the_index_is_signed_by_the_key_of_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    lab = settings.read()
    keyring = tmp_path / "key.gpg"
    key = folder / nvidia_repository.key_file(nvidia_repository.fingerprint(lab))
    subprocess.run(["gpg", "--dearmor", "-o", keyring, key], check=True, capture_output=True)
    for signed in (["InRelease"], ["Release.gpg", "Release"]):
        said = subprocess.run(
            ["gpgv", "--status-fd", "1", "--keyring", keyring, *[folder / name for name in signed]],
            capture_output=True,
            text=True,
        )
        assert said.returncode == 0, said.stderr
        assert f"VALIDSIG {nvidia_repository.fingerprint(lab)}" in said.stdout


@pytest.mark.lab
def test_the_index_names_every_package_with_its_digest(folder: Path) -> None:
    index = (folder / "Packages").read_text()
    release = (folder / "Release").read_text()
    assert hashlib.sha256(index.encode()).hexdigest() in release
    listed = dict(re.findall(r"^Filename: \./(\S+)(?:\n.+)*?\nSHA256: (\w{64})", index, re.MULTILINE))
    assert set(listed) == {file.name for file in folder.glob("*.deb")}
    assert len(listed) > 35
    for name, digest in listed.items():
        if (folder / name).stat().st_size < 10_000_000:
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.lab
def test_nvidias_own_key_file_holds_a_key_that_a_node_must_refuse(folder: Path, distribution: str) -> None:
    nvidias = REPOSITORY_KEYS[distribution]
    said = subprocess.run(
        ["gpg", "--show-keys", "--with-colons", folder / nvidias.file], capture_output=True, text=True, check=True
    )
    assert nvidias.fingerprint not in said.stdout
    assert nvidia_repository.fingerprint(settings.read()) in said.stdout
