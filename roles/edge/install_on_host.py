"""Runs on the host: Caddy from the distribution's archive, without its own service, and the user that the edge runs as.

It lives on when the connection is lost; the next run waits for this one at the lock.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import sys

from kit import on_host
from kit.on_host import Problem

LOCK = "/run/lock/kimi-nodes-edge"
UNITS = "/etc/systemd/system"
INSTALL = (
    "apt-get", "install", "-y", "--no-install-recommends", "--no-remove", "-o", "DPkg::Lock::Timeout=600",
    "-o", "Acquire::Retries=3", "-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold",
)  # fmt: skip
STALE = re.compile(r"404 +Not Found|Unable to locate|Unable to fetch|no installation candidate|unmet dep")


def act(package: str, user: str) -> None:
    """Raises Problem with apt's or useradd's own words."""
    with open(LOCK, "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if on_host.packages([package])[package] is None:
            _install(package)
        try:
            pwd.getpwnam(user)
        except KeyError:
            code, said = _shown(
                [
                    "useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent",
                    "--shell", "/usr/sbin/nologin", user,
                ]
            )  # fmt: skip
            if code:
                raise Problem(
                    f"useradd: found {said.strip()[-300:]}, wanted user {user}. Fix: run it on that host"
                ) from None


def _install(package: str) -> None:
    # The package starts a service of its own that listens on port 80. Masked before, it never comes up.
    mask = f"{UNITS}/{package}.service"
    if not os.path.lexists(mask):
        os.symlink("/dev/null", mask)
    code, said = _shown([*INSTALL, "--", package])
    if code and STALE.search(said):
        _shown(["apt-get", "update"])
        code, said = _shown([*INSTALL, "--", package])
    if code:
        errors = " ".join(line for line in said.splitlines() if line.startswith("E:")) or said.strip()[-500:]
        raise Problem(
            f"apt-get: found {errors}; wanted {package} installed, of Debian's main or Ubuntu's universe. "
            f"Fix: apt-get update && apt-get install {package}, on that host"
        )


def _shown(argv: list[str]) -> tuple[int, str]:
    code, said = on_host.output(argv, on_host.PACKAGING)
    sys.stdout.write(said)
    return code, said
