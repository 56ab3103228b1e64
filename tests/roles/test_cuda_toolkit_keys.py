"""The fingerprint that cuda_toolkit finds in a key is the one that gpg finds, and damaged keys are refused."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.problems import Malformed
from roles.cuda_toolkit import openpgp

pytestmark = pytest.mark.skipif(shutil.which("gpg") is None, reason="gpg is what fingerprints are compared with")


class Keyring:
    """gpg with a home of its own."""

    def __init__(self, home: Path) -> None:
        self.environment = {**os.environ, "GNUPGHOME": str(home)}

    def gpg(self, *arguments: str) -> bytes:
        return subprocess.run(
            ["gpg", "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", "", *arguments],
            env=self.environment,
            capture_output=True,
            check=True,
        ).stdout

    def fingerprint(self, name: str) -> str:
        lines = self.gpg("--list-keys", "--with-colons", name).decode().splitlines()
        return next(line.split(":")[9] for line in lines if line.startswith("fpr:"))


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyring]:
    home = Path("/tmp") / f"kimi-gpg-{os.getpid()}"  # gpg's sockets want a short path
    home.mkdir(mode=0o700)
    made = Keyring(home)
    try:
        # One as NVIDIA's (RSA, no subkey), one with a subkey and another algorithm.
        made.gpg("--quick-generate-key", "rsa", "rsa2048", "sign", "never")
        made.gpg("--quick-generate-key", "curve", "default", "default", "never")
        yield made
    finally:
        subprocess.run(["gpgconf", "--kill", "all"], env=made.environment, check=False)
        shutil.rmtree(home, ignore_errors=True)


@pytest.mark.parametrize("name", ["rsa", "curve"])
def test_the_fingerprint_is_gpgs(keyring: Keyring, name: str) -> None:
    binary, armoured = keyring.gpg("--export", name), keyring.gpg("--armor", "--export", name)
    assert openpgp.dearmour(armoured) == binary == openpgp.dearmour(binary)
    assert openpgp.fingerprints(binary) == [keyring.fingerprint(name)]


def test_every_key_of_a_file_is_seen(keyring: Keyring) -> None:
    both = [keyring.fingerprint("rsa"), keyring.fingerprint("curve")]
    assert openpgp.fingerprints(keyring.gpg("--export")) == both
    blocks = keyring.gpg("--armor", "--export", "rsa") + b"\n" + keyring.gpg("--armor", "--export", "curve")
    assert openpgp.fingerprints(openpgp.dearmour(blocks)) == both


def test_a_flipped_letter_in_the_armour_is_noticed(keyring: Keyring) -> None:
    text = keyring.gpg("--armor", "--export", "rsa")
    at = text.index(b"\n\n") + 100
    flipped = text[:at] + (b"A" if text[at : at + 1] != b"A" else b"B") + text[at + 1 :]
    with pytest.raises(Malformed, match="checksum"):
        openpgp.dearmour(flipped)


def test_a_cut_key_and_a_secret_key_are_refused(keyring: Keyring) -> None:
    with pytest.raises(Malformed, match="cut off"):
        openpgp.fingerprints(keyring.gpg("--export", "rsa")[:-20])
    with pytest.raises(Malformed, match="type 5"):
        openpgp.fingerprints(keyring.gpg("--export-secret-keys", "rsa"))


@given(st.binary(max_size=300))
def test_nonsense_is_malformed_and_nothing_worse(data: bytes) -> None:
    for read in (openpgp.dearmour, openpgp.fingerprints):
        try:
            read(data)
        except Malformed:
            continue


@given(st.binary(max_size=80))
def test_nonsense_in_armour_is_malformed_and_nothing_worse(data: bytes) -> None:
    armoured = b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n" + data + b"\n-----END PGP PUBLIC KEY BLOCK-----\n"
    try:
        openpgp.dearmour(armoured)
    except Malformed:
        return
