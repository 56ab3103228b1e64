"""Runs on the host: Caddy from the distribution's archive, without its own service, and the user that the edge runs as.

apt's output is read by this program, which lives on when the connection is lost: apt would die of a closed pipe in the
middle of an installation. The next run waits at the lock.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import subprocess
import sys

from kit import on_host
from kit.on_host import Problem

LOCK = "/run/lock/kimi-nodes-edge"
UNITS = "/etc/systemd/system"
INSTALL = (
    "apt-get", "install", "-y", "--no-install-recommends", "--no-remove", "-o", "DPkg::Lock::Timeout=600",
    "-o", "Acquire::Retries=3", "-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold",
)  # fmt: skip
# needrestart would restart services of the owner behind the back of apt-get.
ENVIRONMENT = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1", "LC_ALL": "C"}
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
            code, said = _output(
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
    code, said = _output([*INSTALL, "--", package])
    if code and STALE.search(said):
        _output(["apt-get", "update"])
        code, said = _output([*INSTALL, "--", package])
    if code:
        errors = " ".join(line for line in said.splitlines() if line.startswith("E:")) or said.strip()[-500:]
        raise Problem(
            f"apt-get: found {errors}; wanted {package} installed, of Debian's main or Ubuntu's universe. "
            f"Fix: apt-get update && apt-get install {package}, on that host"
        )


def _output(argv: list[str]) -> tuple[int, str]:
    done = subprocess.run(
        argv,
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    sys.stdout.write(done.stdout)
    return done.returncode, done.stdout
