"""Runs on the host: mend an interrupted dpkg, then install packages. It lives on when the connection is lost."""

from __future__ import annotations

import sys
import time

from kit import on_host
from kit.on_host import Problem

LOCK_SECONDS = 600
OPTIONS = (
    "-y",
    "--no-install-recommends",
    "-o",
    f"DPkg::Lock::Timeout={LOCK_SECONDS}",
    "-o",
    "Dpkg::Options::=--force-confdef",
    "-o",
    "Dpkg::Options::=--force-confold",
)


def act(packages: list[str], unfinished: list[str]) -> None:
    """Raises Problem with apt's own words and, where one is known, the way out."""
    if unfinished:
        print(f"dpkg was interrupted in {', '.join(unfinished)}: finishing that first", flush=True)
        _finish()
    if packages:
        complaints = _update()
        _run(["apt-get", "install", *OPTIONS, "--", *packages], f"install {', '.join(packages)}", complaints)


def _finish() -> None:
    until = time.monotonic() + LOCK_SECONDS
    while True:
        code, said = _shown(["dpkg", "--configure", "-a", "--force-confdef", "--force-confold"])
        # dpkg itself never waits for its lock; what looked unfinished may be another apt at work.
        if code == 0 or "lock" not in said or time.monotonic() > until:
            break
        time.sleep(2)
    # --configure -a leaves behind what was unpacked without its dependencies, or only in part; this mends both.
    _run(["apt-get", "install", "--fix-broken", *OPTIONS], "finish what dpkg was interrupted in", said if code else "")


def _update() -> str:
    """apt's complaints. A broken repository of somebody else must not stop a node: the installation tells."""
    _, said = _shown(["apt-get", "update", "-o", f"DPkg::Lock::Timeout={LOCK_SECONDS}"])
    return "\n".join(line for line in said.splitlines() if line.startswith(("W:", "E:")))


def _run(argv: list[str], purpose: str, said_before: str) -> None:
    code, said = _shown(argv)
    if code:
        errors = "; ".join(line for line in said.splitlines() if line.startswith("E:")) or said.strip()[-600:]
        before = f" Before that: {said_before.strip()[-600:]}" if said_before.strip() else ""
        raise Problem(f"apt-get exited {code}: {errors}; wanted to {purpose}.{before} Fix: {fix(said + said_before)}")


def fix(said: str) -> str:
    """What to do about apt's words."""
    for sign, remedy in (
        (
            "Unable to locate package",
            "see that main (on Ubuntu universe too) is in the apt sources of that host, then deploy again",
        ),
        ("Could not get lock", "wait until the other package manager has ended (fuser -v /var/lib/dpkg/lock-frontend)"),
        (
            "is locked by another process",
            "wait until the other package manager has ended (fuser -v /var/lib/dpkg/lock-frontend)",
        ),
        ("No space left on device", "free space on / (df -h; apt-get clean), then deploy again"),
        ("held broken packages", "apt-mark showhold on that host, and release what stands in the way"),
    ):
        if sign in said:
            return remedy
    return "apt-get update && apt-get install --fix-broken, on that host, and read what it says"


def _shown(argv: list[str]) -> tuple[int, str]:
    code, said = on_host.output(argv, on_host.PACKAGING)
    sys.stdout.write(said)
    return code, said
