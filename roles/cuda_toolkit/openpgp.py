"""Read OpenPGP public keys far enough to say whose they are: armour off, fingerprints of primary keys (RFC 4880).

Nothing is verified here but the fingerprint: signatures are apt's work. No gpg is needed, on neither side.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator

from node.problems import Malformed

PUBLIC_KEY, SIGNATURE, USER_ID, USER_ATTRIBUTE, PUBLIC_SUBKEY = 6, 2, 13, 17, 14
_ALLOWED = (PUBLIC_KEY, SIGNATURE, USER_ID, USER_ATTRIBUTE, PUBLIC_SUBKEY)
_ARMOUR = re.compile(
    rb"-----BEGIN PGP PUBLIC KEY BLOCK-----[ \t]*\r?\n(?P<body>.*?)-----END PGP PUBLIC KEY BLOCK-----", re.DOTALL
)


def dearmour(data: bytes) -> bytes:
    """The packets of one or more armoured public key blocks; binary data as it is. Raises Malformed."""
    if data[:1] and data[0] & 0x80:
        return data
    blocks = [match["body"] for match in _ARMOUR.finditer(data)]
    if not blocks:
        raise Malformed("OpenPGP key: no public key block", data[:400].decode("utf-8", "replace"))
    return b"".join(_block(body) for body in blocks)


def _block(body: bytes) -> bytes:
    lines = [line.strip() for line in body.splitlines()]
    if b"" in lines:  # headers such as "Version: ..." end at the first empty line
        lines = lines[lines.index(b"") + 1 :]
    checksum = lines.pop() if lines and lines[-1].startswith(b"=") else None
    try:
        packets = base64.b64decode(b"".join(lines), validate=True)
        wanted = base64.b64decode(checksum[1:], validate=True) if checksum else None
    except ValueError:
        raise Malformed("OpenPGP key: not base64", body[:200].decode("utf-8", "replace")) from None
    if wanted is not None and wanted != _crc24(packets).to_bytes(3, "big"):
        raise Malformed("OpenPGP key: its checksum does not fit", (checksum or b"").decode("ascii", "replace"))
    return packets


def _crc24(data: bytes) -> int:
    """RFC 4880 section 6.1."""
    crc = 0xB704CE
    for byte in data:
        crc ^= byte << 16
        for _ in range(8):
            crc <<= 1
            if crc & 0x1000000:
                crc ^= 0x1864CFB
    return crc


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(tag, body) of each packet."""
    position = 0
    while position < len(data):
        first = data[position]
        position += 1
        try:
            if not first & 0x80:
                raise Malformed("OpenPGP key: not a packet", data[position - 1 : position + 31].hex())
            if first & 0x40:
                tag = first & 0x3F
                length, size = _new_length(data[position : position + 5])
            else:
                tag, kind = first >> 2 & 0x0F, first & 0x03
                if kind == 3:
                    raise Malformed("OpenPGP key: a packet without a length")
                size = 1 << kind
                length = int.from_bytes(data[position : position + size], "big")
        except IndexError:
            raise Malformed("OpenPGP key: cut off in a packet's head") from None
        position += size
        if position + length > len(data):
            raise Malformed("OpenPGP key: cut off in a packet")
        yield tag, data[position : position + length]
        position += length


def _new_length(head: bytes) -> tuple[int, int]:
    """(length of the body, bytes that say so)."""
    if head[0] < 192:
        return head[0], 1
    if head[0] < 224:
        return (head[0] - 192 << 8) + head[1] + 192, 2
    if head[0] == 255:
        return int.from_bytes(head[1:5], "big"), 5
    raise Malformed("OpenPGP key: a packet in parts")


def fingerprints(data: bytes) -> list[str]:
    """Fingerprints of the primary keys in a binary keyring: 40 hex digits, upper case.

    Raises Malformed where there is no key, something other than public keys, or a key that is not of version 4 (apt of
    the supported systems knows no other).
    """
    found = []
    for tag, body in _packets(data):
        if tag not in _ALLOWED:
            raise Malformed(f"OpenPGP key: a packet of type {tag} among public keys")
        if tag == PUBLIC_KEY:
            if body[:1] != b"\x04":
                raise Malformed("OpenPGP key: not of version 4", body[:8].hex())
            found.append(hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper())
    if not found:
        raise Malformed("OpenPGP key: none in it")
    return found
