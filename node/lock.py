"""What a lock of `files/locks` installs, read without a package manager: `name==version ; marker`, then its hashes."""

from __future__ import annotations

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from node.problems import Malformed

NODE_MARKERS = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "sys_platform": "linux",
}
"""The environment markers that are the same on every node."""


def distributions(lock: bytes, python: str) -> dict[str, str]:
    """Distribution -> version that a lock installs on a node: names in canonical form ("huggingface-hub"), sorted.

    python: minor version, "3.12". Raises Malformed for a line without an exact version or without a hash, and for a
    distribution that is locked twice for this Python.
    """
    found: dict[str, str] = {}
    for line in lock.decode().replace("\\\n", " ").splitlines():
        words = line.split("#", 1)[0].split(" --hash=")
        text = words[0].strip()
        if not text:
            continue
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise Malformed(f"lock: not a requirement ({error})", line) from None
        pins = list(requirement.specifier)
        if len(pins) != 1 or pins[0].operator != "==" or "*" in pins[0].version:
            raise Malformed("lock: a requirement without one exact version", line)
        if len(words) < 2 or not all(word.strip().startswith("sha256:") for word in words[1:]):
            raise Malformed("lock: a requirement without sha256 hashes", line)
        environment = {**NODE_MARKERS, "python_version": python, "python_full_version": f"{python}.99", "extra": ""}
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        name = canonicalize_name(requirement.name)
        if name in found:
            raise Malformed(f"lock: {name} twice for Python {python}", line)
        found[name] = pins[0].version
    return dict(sorted(found.items()))
