"""A signed flat apt repository like NVIDIA's, at NVIDIA's own paths.

compute/cuda/repos/<debian12|debian13>/x86_64/{*.deb, Packages, Packages.gz, Release, InRelease, Release.gpg, <key>.pub,
cuda-keyring_1.1-1_all.deb}. Signed by a key of the lab's own: its fingerprint is data of the lab's inventory, as
NVIDIA's is of a real one.
"""

from __future__ import annotations

import contextlib
import email.utils
import gzip
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.lab import debian_package, nvidia_packages
from tests.lab.settings import SUITES, Lab
from tests.lab.shell import key_of, made, remove_outdated, run

HOST = "https://developer.download.nvidia.com"
PATH = "compute/cuda/repos"
NVIDIAS_KEY_FILES = {"debian12": "3bf863cc.pub", "debian13": "8793F200.pub"}
"""The names under which a node looks for NVIDIA's key. Here they hold the lab's, which must be refused as NVIDIA's."""
PIN = (
    "Package: nsight-compute\nPin: origin *ubuntu.com*\nPin-Priority: -1\n\n"
    "Package: nsight-systems\nPin: origin *ubuntu.com*\nPin-Priority: -1\n\n"
    "Package: *\nPin: release l=NVIDIA CUDA\nPin-Priority: 600\n\n"
)


def key_folder(lab: Lab) -> Path:
    """The folder with the signing key, the public key in both forms and its fingerprint. Made once."""
    return made(lab.keys / "repository", _make_key, lab.keys / ".repository.lock")


@contextlib.contextmanager
def _gpg_home() -> Iterator[dict[str, str]]:
    """The environment for gpg with a home of its own, in /tmp: its sockets want a short path. Its agent ends too."""
    with tempfile.TemporaryDirectory(prefix="kimi-lab-gpg-") as home:
        environment = {**os.environ, "GNUPGHOME": home}
        try:
            yield environment
        finally:
            run("gpgconf", "--kill", "all", env=environment)


def _make_key(folder: Path) -> None:
    folder.chmod(0o700)
    with _gpg_home() as environment:
        run(
            "gpg", "--batch", "--quiet", "--passphrase", "", "--pinentry-mode", "loopback", "--quick-generate-key",
            "cudatools stand-in of the kimi-nodes lab", "rsa3072", "sign", "never", env=environment,
        )  # fmt: skip
        listed = run("gpg", "--list-keys", "--with-colons", env=environment)
        fingerprint = next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr:"))
        (folder / "fingerprint").write_text(fingerprint + "\n")
        run("gpg", "--batch", "--export", "-o", folder / "keyring.gpg", env=environment)
        run("gpg", "--batch", "--armor", "--export", "-o", folder / "key.pub", env=environment)
        run("gpg", "--batch", "--export-secret-keys", "-o", folder / "secret.gpg", env=environment)


def fingerprint(lab: Lab) -> str:
    """40 hex digits, upper case."""
    return (key_folder(lab) / "fingerprint").read_text().strip()


def key_file(fingerprint: str) -> str:
    """The name of the public key's file in the repository: the last eight digits, as NVIDIA does."""
    return f"{fingerprint[-8:].lower()}.pub"


def build(lab: Lab) -> Path:
    """The folder to serve as the root of developer.download.nvidia.com."""
    keys, packages = key_folder(lab), nvidia_packages.build(lab)
    name = key_of(Path(__file__).read_bytes(), nvidia_packages.key(), (keys / "fingerprint").read_bytes())

    def make(out: Path) -> None:
        for distribution in SUITES.values():
            _make_distribution(out / PATH / distribution / "x86_64", distribution, packages, keys)

    wanted = made(lab.parts / "nvidia-repository" / name, make, lab.parts / ".repository.lock")
    remove_outdated(wanted, wanted.parent.iterdir())
    remove_outdated(packages, packages.parent.iterdir())
    return wanted


def _make_distribution(folder: Path, distribution: str, packages: Path, keys: Path) -> None:
    folder.mkdir(parents=True)
    for package in packages.glob("*.deb"):
        os.link(package, folder / package.name)
    own = key_file((keys / "fingerprint").read_text().strip())
    for name in (own, NVIDIAS_KEY_FILES[distribution]):
        (folder / name).write_bytes((keys / "key.pub").read_bytes())
    _make_keyring_package(folder, distribution, keys)

    index = run("dpkg-scanpackages", "--multiversion", "--hash", "sha256", folder).replace(f"{folder}/", "./")
    (folder / "Packages").write_text(index)
    (folder / "Packages.gz").write_bytes(gzip.compress(index.encode(), mtime=0))
    sums = []
    for name in ("Packages", "Packages.gz"):
        content = (folder / name).read_bytes()
        sums.append(f" {hashlib.sha256(content).hexdigest()} {len(content)} {name}\n")
    head = f"Origin: NVIDIA\nLabel: NVIDIA CUDA\nArchitectures: amd64\nDate: {email.utils.formatdate(usegmt=True)}\n"
    (folder / "Release").write_text(f"{head}SHA256:\n{''.join(sums)}")
    with _gpg_home() as environment:
        run("gpg", "--batch", "--quiet", "--import", keys / "secret.gpg", env=environment)
        for form, name in (("--clearsign", "InRelease"), ("--detach-sign", "Release.gpg")):
            run("gpg", "--batch", "--armor", form, "-o", folder / name, folder / "Release", env=environment)


def _make_keyring_package(folder: Path, distribution: str, keys: Path) -> None:
    """cuda-keyring 1.1-1: the key, the source line, the pin."""
    tree = folder / "tree-cuda-keyring"
    files = {
        "usr/share/keyrings/cuda-archive-keyring.gpg": (keys / "keyring.gpg").read_bytes(),
        f"etc/apt/sources.list.d/cuda-{distribution}-x86_64.list": (
            "deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] "
            f"{HOST}/{PATH}/{distribution}/x86_64/ /\n".encode()
        ),
        "etc/apt/preferences.d/cuda-repository-pin-600": PIN.encode(),
    }
    for path, content in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(content)
    about = "GPG keyring for the CUDA repository (stand-in)"
    debian_package.build(tree, folder, "cuda-keyring", "1.1-1", about, architecture="all")
