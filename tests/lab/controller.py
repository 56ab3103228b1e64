"""What the lab needs of the machine it runs on, and what it reads from it: packages, disk, mirrors, certificates."""

from __future__ import annotations

import configparser
import os
import re
import shutil
from pathlib import Path

from tests.lab.settings import Lab
from tests.lab.shell import LabError, run, succeeds

PACKAGES = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "ip": "iproute2",
    "iptables-save": "iptables",
    "dpkg-deb": "dpkg",
    "dpkg-scanpackages": "dpkg-dev",
    "gpg": "gnupg",
    "openssl": "openssl",
    "ssh": "openssh-client",
    "gcc": "gcc",
    "zstd": "zstd",
    "pip3": "python3-pip",
    "unshare": "util-linux",
}
"""Program -> the package that has it, of Debian and Ubuntu alike."""
DEBIAN_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
BUILD_BYTES = 3 * 10**9
"""What a build wants free: wheels 0.4 GB, packages 0.4, a template of 0.4 for each suite, and room."""
RELEASE_BYTES = 13 * 10**9
"""What a machine that takes a whole release wants free: 8.5 GB of release, 2 of toolkits and compilers, JIT caches."""
DOWNLOADS_BYTES = 7 * 10**9
"""What uv keeps of a release's downloads, once for all machines."""


def require_root() -> None:
    if os.geteuid() != 0:
        raise LabError(
            f"the lab mounts, boots and routes: it needs root, this is user {os.geteuid()}", fix="sudo bin/lab ..."
        )


def install_packages() -> None:
    """apt-get what is missing here. Nothing is asked of apt when nothing is missing."""
    missing = {package for program, package in PACKAGES.items() if not shutil.which(program)}
    if not succeeds("/usr/bin/python3", "-c", "import numpy"):
        missing.add("python3-numpy")
    if not DEBIAN_KEYS.exists():
        missing.add("debian-archive-keyring")  # Ubuntu has it as a package
    if not any(Path("/usr/lib").glob("*/openblas-*/libblas.so.3")):
        missing.add("libopenblas0-pthread")  # the reference BLAS trains the tiny model in minutes, this in seconds
    if not missing:
        return
    print(f"installing {' '.join(sorted(missing))}", flush=True)
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    run("apt-get", "update", "-q", env=environment)
    run("apt-get", "install", "-q", "-y", "--no-install-recommends", *sorted(missing), env=environment)


def require_disk(folder: Path, wanted: int, what_for: str) -> None:
    """Say that the disk is too small before anything is written to it."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < wanted:
        raise LabError(
            f"{existing}: {free / 1e9:.1f} GB free, {what_for} wants {wanted / 1e9:.0f} GB",
            fix="free some disk, or name a folder on a larger one: KIMI_NODES_CACHE=/large/disk bin/lab ...",
        )


def require_disk_for_a_release(lab: Lab, more: int = 0) -> None:
    """Room for one machine with a whole release; less where uv has its downloads already. more: bytes wanted beside."""
    warm = lab.uv_cache.is_dir() and any(lab.uv_cache.glob("archive-v*/*"))
    require_disk(lab.parts, RELEASE_BYTES + (0 if warm else DOWNLOADS_BYTES) + more, "a machine with a whole release")


def require_overlay(lab: Lab) -> None:
    """The cache folder carries the machines' disks as overlay uppers, which another overlay cannot."""
    lab.parts.mkdir(parents=True, exist_ok=True)
    kind = run("stat", "-f", "-c", "%T", lab.parts).strip()
    if kind in ("overlayfs", "nfs", "tmpfs", "fuseblk"):
        raise LabError(
            f"{lab.parts} is on {kind}; machine disks want a local disk file system such as ext4 or xfs",
            fix="KIMI_NODES_CACHE=/folder/on/a/disk bin/lab ...",
        )


def debian_mirror(apt: Path = Path("/etc/apt")) -> tuple[str, str] | None:
    """(archive, security archive) as this machine's own apt sources name them; None on a machine that names no Debian
    archive, such as Ubuntu, where mmdebstrap takes Debian's own."""
    text = []
    sources = [*apt.glob("sources.list"), *apt.glob("sources.list.d/*.list"), *apt.glob("sources.list.d/*.sources")]
    for file in sources:
        text += [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    addresses = [word.rstrip("/") for word in " ".join(text).split() if re.match(r"https?://", word)]
    archive = next((address for address in addresses if address.endswith("/debian")), None)
    if archive is None:
        return None
    security = next((address for address in addresses if address.endswith("/debian-security")), archive + "-security")
    return archive, security


def python_index() -> str | None:
    """The address of the package index, where this machine's pip is told another than pip's own default."""
    for line in run("pip3", "config", "list").splitlines():
        name, _, value = line.partition("=")
        address = value.strip().strip("'\"")
        if name in (":env:.index-url", "global.index-url") and address.startswith("http"):
            return address
    return None


def own_certificates() -> list[Path]:
    """Authorities that this machine trusts beside Debian's, such as a proxy's: its guests must trust them too."""
    return sorted(Path("/usr/local/share/ca-certificates").rglob("*.crt"))


def name_servers() -> list[str]:
    """Name servers that a guest can reach: a resolver on this machine's loopback is none."""
    for file in (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf")):
        if file.exists():
            found = [line.split()[1] for line in file.read_text().splitlines() if line.startswith("nameserver")]
            reachable = [address for address in found if not address.startswith("127.") and address != "::1"]
            if reachable:
                return reachable
    raise LabError(
        "/etc/resolv.conf names no server that a lab machine could reach",
        fix="name one that is not on the loopback there",
    )


def pip_configuration(index: str | None, authorities: str) -> str:
    """A guest's /etc/pip.conf: read also under sudo, which drops the environment."""
    parser = configparser.ConfigParser()
    parser["global"] = {"cert": authorities, "disable-pip-version-check": "true", "no-cache-dir": "true"}
    if index:
        parser["global"]["index-url"] = index
    lines = [f"[{section}]" for section in parser.sections()]
    lines += [f"{name} = {value}" for name, value in parser["global"].items()]
    return "\n".join(lines) + "\n"
