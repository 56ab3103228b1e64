"""Runs on the host: refresh the repository's lists and install packages from it, while `/usr/local/cuda` stays put.

It lives on when the connection is lost; the next run waits for this one at the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from kit import on_host
from kit.on_host import Problem

LOCK = "/run/lock/kimi-nodes-cuda"
LOCK_SECONDS = 600
INSTALL = (
    "apt-get", "install", "-y", "--no-install-recommends", "--no-remove",
    "-o", f"DPkg::Lock::Timeout={LOCK_SECONDS}", "-o", "Acquire::Retries=3",
    "-o", "APT::Keep-Downloaded-Packages=false",  # 4 GB of them
    "-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold",
)  # fmt: skip
# What apt-get update says of a signature, some of it with exit code 0 because the lists of last time are still there.
UNTRUSTED = re.compile(
    r"GPG error|NO_PUBKEY|is not signed|EXPKEYSIG|KEYEXPIRED|REVKEYSIG|BADSIG|INVALIDSIG|[Ss]ignature|[Uu]nsigned"
)
# Said of signatures that are good today: apt 3 of what a later policy will refuse, apt 2 of keys in trusted.gpg.
FOR_LATER = re.compile(r"Policy will reject|uses weak algorithm|legacy trusted\.gpg")
STALE = re.compile(r"404 +Not Found|Unable to locate|Unable to fetch|no installation candidate|unmet dep")
LOCKED = re.compile(r"Could not get lock|Unable to lock|is locked by another process|is another process using it")
SPARE_BYTES = 500 * 10**6  # beyond what apt says, for dpkg's own files and the other steps of a deploy
UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def act(
    address: str,
    source: str,
    written: list[str],
    finish: list[str],
    steps: list[dict[str, Any]],
    preferences: str,
    alternatives: list[str],
    folder: str,
) -> None:
    """Raises Problem with apt's own words and, where one is known, the way out.

    source: the file of the repository's source. written: what this run wrote to trust it, taken back where the
    repository turns out to be unusable. finish: packages that dpkg was interrupted in. steps: one after the other,
    [{"packages": {name: exact version}, "reinstall": those of them to unpack anew}]. preferences: apt preferences of an
    earlier run. alternatives: names of links in `folder` that must not move.
    """
    with open(LOCK, "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if finish:
            _finish(finish)
        _update(address, source, written)
        for step in steps:
            kept = [held for name in alternatives if (held := hold(name, folder))]
            try:
                with _without(preferences if _moves(step["packages"]) else None):
                    _install(step["packages"], step["reinstall"], source)
            finally:
                for held in kept:
                    give_back(held)


@contextlib.contextmanager
def _without(preferences: str | None) -> Iterator[None]:
    """Preferences hold what belongs together at the versions of before; back they come where the installation fails."""
    aside = f"{preferences}.disabled"  # apt reads no file with such an ending
    if preferences and os.path.exists(preferences):
        os.rename(preferences, aside)
    try:
        yield
    except BaseException:
        if preferences and os.path.exists(aside):
            os.rename(aside, preferences)
        raise
    if preferences:
        _forget(aside)


# --- the repository --------------------------------------------------------------------------------------------------


def _update(address: str, source: str, written: list[str]) -> None:
    """Fetch this repository's lists and no others: what is wrong with others must neither stop nor hide it."""
    code, said = _patiently(
        [
            "apt-get", "update", "-o", f"Dir::Etc::sourcelist={source}", "-o", "Dir::Etc::sourceparts=-",
            "-o", "APT::Get::List-Cleanup=0", "-o", "Acquire::Retries=3", "-o", "APT::Update::Error-Mode=any",
        ]
    )  # fmt: skip
    complaints = [line for line in said.splitlines() if line.startswith(("W:", "E:", "Err:", "Warning:", "Error:"))]
    untrusted = [line for line in complaints if UNTRUSTED.search(line) and not FOR_LATER.search(line)]
    if code == 0 and not untrusted:
        return
    for path in written:
        _forget(path)
    words = " ".join((untrusted or complaints or [said.strip()[-400:]])[:3])
    keyring = "".join(f"rm {path}, " for path in _keyrings(source))
    if untrusted:
        raise Problem(
            f"{address}: found {words}; wanted lists signed by the pinned key (apt would use those of last time). "
            f"Fix: see that no proxy changes what it passes on; if the key was renewed, {keyring}deploy again: it is "
            "fetched anew"
        )
    raise Problem(f"{address}: found {words}; wanted its package lists. Fix: {fix(said, address)}")


def _keyrings(source: str) -> list[str]:
    """The keyrings that a source names."""
    try:
        with open(source, encoding="utf-8", errors="replace") as file:
            return sorted(set(re.findall(r"(?:Signed-By:\s*|signed-by=)(/\S+?)(?:[\s\]]|$)", file.read())))
    except OSError:
        return []


# --- packages --------------------------------------------------------------------------------------------------------


def _finish(packages: list[str]) -> None:
    """What looks unfinished may be another apt at work: dpkg does not wait for its lock, so this does."""
    print(f"dpkg was interrupted in {', '.join(packages)}: finishing that first", flush=True)
    # What this cannot mend, apt mends or names.
    _patiently(["dpkg", "--configure", "-a", "--force-confdef", "--force-confold"])


def _moves(packages: dict[str, str]) -> bool:
    """Whether a metapackage that is installed now goes to another version."""
    shown = on_host.output(["dpkg-query", "--show", "--showformat=${Package} ${Version}\n", *packages])[1]
    installed = dict(line.split(" ", 1) for line in shown.splitlines() if line.count(" ") == 1)
    return any(installed.get(name) not in (None, "", version) for name, version in packages.items())


def _install(packages: dict[str, str], reinstall: list[str], source: str) -> None:
    wanted = [f"{name}={version}" for name, version in packages.items() if name not in reinstall]
    again = [f"{name}={packages[name]}" for name in reinstall]
    argvs = [[*INSTALL, "--", *wanted]] if wanted else []
    argvs += [[*INSTALL, "--reinstall", "--", *again]] if again else []
    complaints = ""
    for argv in argvs:
        require_disk(on_host.output([*argv[:2], "--assume-no", *argv[3:]], on_host.PACKAGING)[1])
        code, said = _patiently(argv)
        if code and "--fix-broken" in said:  # a package was removed by force; apt mends that by itself or not at all
            _patiently([*INSTALL, "--fix-broken"])
            code, said = _patiently(argv)
        if code and STALE.search(said):
            # The distribution's own lists are missing or too old for build-essential.
            updated = _patiently(["apt-get", "update"])[1]
            complaints = " ".join(line for line in updated.splitlines() if line.startswith(("W:", "E:")))[:300]
            code, said = _patiently(argv)
        if code:
            errors = " ".join(line for line in said.splitlines() if line.startswith("E:")) or said.strip()[-500:]
            if detail := re.search(r"The following packages have unmet dependencies:(.*?)\nE:", said, re.DOTALL):
                errors += " " + " ".join(detail[1].split())[:400]
            before = f" (apt-get update before that: {complaints})" if complaints else ""
            what = ", ".join(wanted + again)
            raise Problem(f"apt-get: found {errors}{before}; wanted {what} installed. Fix: {fix(said, source)}")


def _free(folder: str) -> int:
    return shutil.disk_usage(folder).free


def require_disk(
    said: str,
    archives: str = "/var/cache/apt/archives",
    tree: str = "/usr/local",
    free_of: Callable[[str], int] = _free,
) -> None:
    """Compare apt's own figures with what is free; apt itself looks at its archive folder only. Raises Problem."""
    download = _bytes(re.search(r"Need to get ([\d.,]+) (\w+)", said))
    installed = _bytes(re.search(r"After this operation, ([\d.,]+) (\w+) of additional disk space", said))
    wanted = {tree: installed, archives: download}
    if os.stat(archives).st_dev == os.stat(tree).st_dev:
        wanted = {tree: installed + download}
    for folder, size in wanted.items():
        free = free_of(folder)
        if size and free < size + SPARE_BYTES:
            raise Problem(
                f"disk of {folder}: found {free / 1e9:.1f} GB free, wanted {(size + SPARE_BYTES) / 1e9:.1f} GB for "
                f"the toolkits. Fix: free space there (apt-get clean; df -h), or put /usr/local on a larger disk"
            )


def _bytes(match: re.Match[str] | None) -> int:
    """apt counts in powers of 1000 and writes 3,659 MB, or 1,234 kB/3,659 MB where some is downloaded already."""
    return int(float(match[1].replace(",", "")) * UNITS.get(match[2], 1)) if match else 0


def fix(said: str, what: str) -> str:
    """What to do about apt's words."""
    for sign, remedy in (
        (LOCKED, "wait until the other package manager has ended (fuser -v /var/lib/dpkg/lock-frontend)"),
        (r"No space left", "free space on / (df -h; apt-get clean), then deploy again"),
        (r"Version '.*' for '.*' was not found",
         f"apt-cache madison PACKAGE shows what {what} has; choose a release that fits it"),
        (r"downgraded",
         "a newer one is installed: apt-get remove 'cuda-*-13-0' 'lib*-13-0' (or its own numbers), then deploy again"),
        (r"Packages need to be removed",
         "apt would remove packages of yours: apt-get install --simulate says which; decide on that host"),
        (r"Held packages|held broken", "apt-mark showhold on that host, and release what stands in the way"),
        (r"Conflicting values set for option", "keep one of the sources that it names, rm the other, deploy again"),
        (r"unmet dep|Unable to locate|no installation candidate",
         "apt-get update && apt-cache policy PACKAGE, on that host"),
        (r"Could not resolve|Could not connect|Connection|timed out|[Cc]ertificate|Failed to fetch",
         f"see that this host reaches it: apt-get update (proxies: apt-config dump | grep proxy; {what})"),
    ):  # fmt: skip
        if re.search(sign, said):
            return remedy
    return "run that apt-get on the host and read what it says, then deploy again"


# --- alternatives ----------------------------------------------------------------------------------------------------


def query(name: str) -> dict[str, Any] | None:
    """{"mode", "value", "best", "choices": {path: priority}} of a link group; None where it is not managed."""
    code, said = on_host.output(["update-alternatives", "--query", name])
    if code:
        return None
    head, *blocks = re.split(r"\n\s*\n(?=Alternative:)", said)
    fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    choices = {}
    for block in blocks:
        entry = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        choices[entry["Alternative"]] = int(entry["Priority"])
    return {"mode": fields["Status"], "value": fields.get("Value"), "best": fields.get("Best"), "choices": choices}


def hold(name: str, folder: str) -> dict[str, Any] | None:
    """Make a link stay where it leads, before anything is installed: {"name", "link", "target", "mode"}.

    NVIDIA's packages register themselves with a priority that grows with the version, so that in automatic mode the
    newest takes the link, and with it the compiler of whatever uses the older one. A plain link, which they would
    replace, is registered as it is. Nothing is held where there is no link yet, where it leads nowhere, or where a
    directory has the name (update-alternatives leaves that alone).
    """
    link = f"{folder}/{name}"
    if not os.path.islink(link) or not os.path.isdir(link):
        return None
    target, state = os.path.realpath(link), query(name)
    if state is None or target not in state["choices"]:
        digits = re.search(r"cuda-(\d+)\.(\d+)$", target)
        priority = str(int(digits[1]) * 10 + int(digits[2])) if digits else "1"  # as NVIDIA's own packages: 128, 130
        _must(["update-alternatives", "--install", link, name, target, priority])
    _must(["update-alternatives", "--set", name, target])
    return {"name": name, "link": link, "target": target, "mode": state["mode"] if state else None}


def give_back(held: dict[str, Any]) -> None:
    """Back to automatic mode where it was so and that does not move the link; else manual mode stays, and holds it."""
    if os.path.realpath(held["link"]) != held["target"] and os.path.isdir(held["target"]):
        _must(["update-alternatives", "--set", held["name"], held["target"]])
    state = query(held["name"])
    if held["mode"] == "auto" and state and state["best"] == held["target"]:
        _must(["update-alternatives", "--auto", held["name"]])


# --- programs --------------------------------------------------------------------------------------------------------


def _forget(path: str) -> None:
    if os.path.lexists(path):
        os.unlink(path)


def _patiently(argv: list[str]) -> tuple[int, str]:
    """Run it, again while another package manager holds a lock that apt does not wait for (lists, archives, dpkg)."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        code, said = on_host.output(argv, on_host.PACKAGING)
        if code == 0 or not LOCKED.search(said) or time.monotonic() > until:
            sys.stdout.write(said)
            return code, said
        time.sleep(2)


def _must(argv: list[str]) -> None:
    code, said = on_host.output(argv)
    if code:
        found = said.strip()[-300:]
        raise Problem(f"{' '.join(argv)}: found {found}, wanted the link to stay. Fix: run it on that host")
