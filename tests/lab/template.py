"""The read-only root file system that machines start from: an ordinary Debian server plus the lab's peculiarities."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.lab import certificates, controller, driver_package
from tests.lab.settings import SUITES, Lab
from tests.lab.shell import LabError, key_of, made, remove_outdated, run, run_confined

PACKAGES = (
    "systemd,systemd-sysv,dbus,openssh-server,python3,iproute2,iputils-ping,curl,ca-certificates,sudo,procps,kmod,"
    "less,nano-tiny,rsync,xz-utils,zstd"
)
MASKED = (
    "apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer getty@tty1.service "
    "console-getty.service networking.service dpkg-db-backup.timer systemd-networkd.service systemd-networkd.socket "
    "systemd-networkd-wait-online.service"
)
"""Units that have nothing to do here; the apt timers would take the package lock at random."""
AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
UV_CACHE_INSIDE = "/var/cache/lab-uv"
ENVIRONMENT = {name: AUTHORITIES for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE")}
"""Python packages bring authorities of their own; these variables lead them to the system's, which know the lab's."""


def _sources(suite: str) -> str | None:
    """apt's sources of a template, None where mmdebstrap is left to choose."""
    mirror = controller.debian_mirror()
    if mirror is None:
        return None
    archive, security = mirror
    return f"deb {archive} {suite} main\ndeb {archive} {suite}-updates main\ndeb {security} {suite}-security main\n"


def _uv_configuration(index: str | None) -> str:
    lines = ["system-certs = true", f'cache-dir = "{UV_CACHE_INSIDE}"', 'link-mode = "copy"']
    if index:
        lines += ["[[index]]", f'url = "{index}"', "default = true"]
    return "\n".join(lines) + "\n"


def _hook(trusted: list[Path], packages: list[Path], index: str | None, folder: Path) -> Path:
    """The script that mmdebstrap runs on the finished tree ($1), with the files it copies beside it."""
    for number, certificate in enumerate(trusted):
        shutil.copy(certificate, folder / f"lab-{number:02}-{certificate.stem}.crt")
    for package in packages:
        shutil.copy(package, folder / package.name)
    (folder / "pip.conf").write_text(controller.pip_configuration(index, AUTHORITIES))
    (folder / "uv.toml").write_text(_uv_configuration(index))
    variables = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    (folder / "environment").write_text(variables.replace(" ", "\n") + "\n")
    (folder / "system.conf").write_text(f"[Manager]\nDefaultEnvironment={variables}\n")
    (folder / "sshd.conf").write_text("HostKey /etc/ssh/ssh_host_ed25519_key\nMaxStartups 200\n")
    script = folder / "hook.sh"
    script.write_text(f"""set -eu
from={folder} root=$1
cp $from/*.crt $root/usr/local/share/ca-certificates/
chroot $root update-ca-certificates >/dev/null 2>&1
cp $from/pip.conf $root/etc/pip.conf
mkdir -p $root/etc/uv $root{UV_CACHE_INSIDE} $root/etc/systemd/system.conf.d
cp $from/uv.toml $root/etc/uv/uv.toml
cat $from/environment >>$root/etc/environment
cp $from/system.conf $root/etc/systemd/system.conf.d/lab.conf
cp $from/sshd.conf $root/etc/ssh/sshd_config.d/lab.conf
rm -f $root/etc/ssh/ssh_host_* $root/etc/machine-id
mkdir -p -m700 $root/root/.ssh
mkdir -p $root/srv/weights
mkdir -p $root/tmp/lab && cp $from/*.deb $root/tmp/lab/
chroot $root sh -c 'dpkg -i /tmp/lab/*.deb' && rm -r $root/tmp/lab
chroot $root useradd -m -s /bin/bash owner
echo 'owner ALL=(ALL) NOPASSWD:ALL' >$root/etc/sudoers.d/owner && chmod 440 $root/etc/sudoers.d/owner
mkdir -p -m700 $root/home/owner/.ssh && chroot $root chown owner: /home/owner/.ssh
chroot $root systemctl -q mask {MASKED}
""")
    return script


def key(lab: Lab, suite: str) -> str:
    """Changes with whatever the template is made from."""
    trusted = [*controller.own_certificates(), certificates.authority(lab) / "ca.crt"]
    return key_of(
        Path(__file__).read_bytes(),
        suite,
        _sources(suite) or "",
        controller.pip_configuration(controller.python_index(), AUTHORITIES),
        *[file.read_bytes() for file in trusted],
        driver_package.key(),
    )


def folder(lab: Lab, suite: str) -> Path:
    return lab.parts / "templates" / f"{suite}-{key(lab, suite)}"


def build(lab: Lab, suite: str) -> Path:
    """The template's root folder; made when nothing with this key is there."""
    if suite not in SUITES:
        raise LabError(
            f"suite {suite!r} is unknown; wanted {' or '.join(SUITES)}", fix="bin/lab build --suite bookworm"
        )
    wanted = folder(lab, suite)

    def make(partial: Path) -> None:
        material = partial / "material"
        material.mkdir()
        trusted = [*controller.own_certificates(), certificates.authority(lab) / "ca.crt"]
        script = _hook(trusted, driver_package.build(lab), controller.python_index(), material)
        sources = _sources(suite)
        run_confined(
            "mmdebstrap", "--mode=root", "--variant=important", "--skip=cleanup/apt/lists", f"--include={PACKAGES}",
            "--dpkgopt=force-unsafe-io", f"--customize-hook=sh {script} $1", suite, partial / "root",
            *(["-"] if sources else []), log=lab.parts / f"template-{suite}.log", input=sources,
        )  # fmt: skip
        # apt's answer to the option above: written by mmdebstrap into the tree, of no use on a server.
        for left in (partial / "root/etc/dpkg/dpkg.cfg.d").glob("99mmdebstrap"):
            left.unlink()
        shutil.rmtree(material)

    built = made(wanted, make, lab.parts / f".template-{suite}.lock") / "root"
    remove_outdated(wanted, wanted.parent.glob(f"{suite}-*"))
    return built


def ready(lab: Lab, suite: str) -> Path:
    """The template's root folder, or LabError when it has not been built."""
    root = folder(lab, suite) / "root"
    if not root.is_dir():
        option = "" if suite == "bookworm" else f" --suite {suite}"
        raise LabError(f"no template for {suite} as the lab is now", fix=f"bin/lab build{option}")
    return root


def identity(lab: Lab) -> Path:
    """The ssh key of the lab's machines, made at the first need."""
    if not lab.identity.exists():
        lab.keys.mkdir(parents=True, exist_ok=True)
        os.chmod(lab.keys, 0o700)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "kimi-nodes lab", "-f", lab.identity)
    return lab.identity
