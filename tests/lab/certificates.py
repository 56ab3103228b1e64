"""A certificate authority of the lab's own, trusted inside its machines only, and the certificate of its services."""

from __future__ import annotations

from pathlib import Path

from tests.lab.settings import SERVED_NAMES, Lab
from tests.lab.shell import made, run

DAYS = "3650"


def authority(lab: Lab) -> Path:
    """The folder with ca.crt (what machines trust), service.crt and service.key. Made once, then kept."""
    folder = lab.keys / "https"
    return made(folder, _make, lab.keys / ".https.lock")


def _make(folder: Path) -> None:
    folder.chmod(0o700)
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    # Subject and authority key identifiers and keyUsage: Python 3.13 refuses certificates without them.
    run(
        "openssl", "req", "-x509", *new_key, "-days", DAYS, "-subj", "/CN=kimi-nodes lab stand-in authority",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign", "-keyout", folder / "ca.key", "-out", folder / "ca.crt",
    )  # fmt: skip
    run(
        "openssl", "req", "-new", *new_key, "-subj", f"/CN={SERVED_NAMES[0]}",
        "-keyout", folder / "service.key", "-out", folder / "service.csr",
    )  # fmt: skip
    extensions = folder / "service.ext"
    extensions.write_text(
        "subjectAltName=" + ",".join(f"DNS:{name}" for name in SERVED_NAMES) + "\nbasicConstraints=critical,CA:FALSE\n"
        "keyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth\n"
        "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
    )
    run(
        "openssl", "x509", "-req", "-in", folder / "service.csr", "-CA", folder / "ca.crt", "-CAkey", folder / "ca.key",
        "-CAcreateserial", "-days", DAYS, "-extfile", extensions, "-out", folder / "service.crt",
    )  # fmt: skip
