"""One machine: an overlay on the template whose upper lies on disk, booted by systemd-nspawn in its own namespace.

systemd-nspawn runs here without systemd as our process 1: --register=no --keep-unit, and a cgroup of our own.
With --keep-unit it ends with 133 when the guest reboots, so a small loop starts it again.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from tests.lab import cgroup, controller, network, ssh_client, template
from tests.lab.settings import SERVED_NAMES, Lab, machine_number
from tests.lab.shell import LabError, remove_tree, run, succeeds

GPUS_INSIDE = "etc/nvidia-smi-stand-in.json"


def names(lab: Lab) -> list[str]:
    """Machines that exist, running or not."""
    return sorted((path.name for path in lab.machines.glob("h*")), key=machine_number)


def folder(lab: Lab, name: str) -> Path:
    machine_number(name)
    return lab.machines / name


def record(lab: Lab, name: str) -> dict[str, str]:
    """suite and template of a machine, as decided when it was created."""
    values: dict[str, str] = json.loads((folder(lab, name) / "machine.json").read_text())
    return values


def running(lab: Lab, name: str) -> bool:
    return bool(cgroup.processes(lab, name))


def mounted(path: Path) -> bool:
    return any(line.split()[4] == str(path) for line in Path("/proc/self/mountinfo").read_text().splitlines())


def start(lab: Lab, name: str, suite: str, gpus: dict[str, object] | None = None) -> None:
    """Create the machine unless it exists, then mount, plug in and boot what is not. Returns before ssh answers."""
    place = folder(lab, name)
    if not (place / "machine.json").exists():
        _create(lab, name, suite)
    if not mounted(place / "root"):
        lower = record(lab, name)["template"]
        if not Path(lower).is_dir():
            raise LabError(f"{name}: its template {lower} is gone", fix=f"bin/lab reset {name}")
        run(
            "mount", "-t", "overlay", lab.namespace(name), place / "root",
            "-o", f"lowerdir={lower},upperdir={place}/upper,workdir={place}/work",
        )  # fmt: skip
    _personalise(lab, name)
    if gpus is not None:
        describe_gpus(lab, name, gpus)
    network.plug(lab, name, lab.address(name))
    if not running(lab, name):
        _boot(lab, name)


def _create(lab: Lab, name: str, suite: str) -> None:
    """The folders and the host key. machine.json is written last: without it the machine does not exist."""
    root = template.ready(lab, suite)
    place = folder(lab, name)
    remove_tree(place)
    for part in ("upper", "work", "root"):
        (place / part).mkdir(parents=True)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", place / "host_key")
    values = {"suite": suite, "template": str(root), "machine_id": os.urandom(16).hex()}
    (place / "machine.json.new").write_text(json.dumps(values) + "\n")
    os.rename(place / "machine.json.new", place / "machine.json")


def _personalise(lab: Lab, name: str) -> None:
    """What makes this machine this one. Written only where it differs, so that a restart finds its own files again."""
    place = folder(lab, name)
    root = place / "root"
    public = template.identity(lab).with_suffix(".pub").read_text()
    hosts = f"127.0.0.1 localhost\n{lab.address(name)} {name}\n{lab.services_address} {' '.join(SERVED_NAMES)}\n"
    wanted = {
        "etc/machine-id": (record(lab, name)["machine_id"] + "\n", 0o444),
        "etc/hostname": (name + "\n", 0o644),
        "etc/hosts": (hosts, 0o644),
        "etc/resolv.conf": ("".join(f"nameserver {server}\n" for server in controller.name_servers()), 0o644),
        "etc/ssh/ssh_host_ed25519_key": ((place / "host_key").read_text(), 0o600),
        "etc/ssh/ssh_host_ed25519_key.pub": ((place / "host_key.pub").read_text(), 0o644),
        "root/.ssh/authorized_keys": (public, 0o600),
        "home/owner/.ssh/authorized_keys": (public, 0o644),
    }
    for path, (content, mode) in wanted.items():
        file = root / path
        if file.is_symlink():
            file.unlink()
        if not file.exists() or file.read_text() != content:
            file.write_text(content)
            file.chmod(mode)


def describe_gpus(lab: Lab, name: str, gpus: dict[str, object]) -> None:
    """Tell the machine's nvidia-smi and lspci stand-ins which GPUs it has. Takes effect at once, also while it runs."""
    root = folder(lab, name) / "root"
    if not mounted(root):
        raise LabError(f"{name} is not up", fix=f"bin/lab up {name}")
    (root / GPUS_INSIDE).write_text(json.dumps(gpus, indent=2) + "\n")


def _boot(lab: Lab, name: str) -> None:
    place = folder(lab, name)
    groups = cgroup.create(lab, name)
    lab.uv_cache.mkdir(parents=True, exist_ok=True)
    command = [
        "systemd-nspawn", "--quiet", f"--directory={place}/root", "--boot", "--register=no", "--keep-unit",
        f"--network-namespace-path=/run/netns/{lab.namespace(name)}", f"--machine={name}", "--resolv-conf=off",
        "--timezone=off", "--link-journal=no", "--console=pipe", "--kill-signal=SIGRTMIN+3",
        f"--bind={lab.uv_cache}:{template.UV_CACHE_INSIDE}",
        "--capability=CAP_NET_ADMIN",  # its own firewall, in its own namespace, as root has on a server
    ]  # fmt: skip
    environment = {
        **os.environ,
        "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",  # a view of cgroup v2 only: systemd 257 needs it
        "SYSTEMD_NSPAWN_TMPFS_TMP": "0",  # /tmp on disk, as on a server, not a tenth of the memory
    }
    with (place / "console.log").open("ab") as console:
        subprocess.Popen(
            ["sh", "-c", 'while :; do "$@"; [ $? = 133 ] || break; done', lab.namespace(name), *command],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: cgroup.enter(groups),
            env=environment,
            cwd="/",
        )


def poweroff(lab: Lab, name: str, limit_s: float = 30) -> None:
    """A clean shutdown; the disk stays, `up` boots it again."""
    if running(lab, name):
        succeeds(*ssh_client.command(lab, name), "systemctl", "poweroff")
        end = time.monotonic() + limit_s
        while running(lab, name) and time.monotonic() < end:
            time.sleep(0.05)
    cgroup.kill(lab, name)


def remove(lab: Lab, name: str) -> None:
    """Kill, unplug, unmount, delete the disk."""
    cgroup.kill(lab, name)
    network.unplug(lab, name)
    unmount_below(folder(lab, name))
    remove_tree(folder(lab, name))


def unmount_below(place: Path) -> None:
    """Undo every mount at or under a folder, the deepest first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in sorted((p for p in points if p == str(place) or p.startswith(f"{place}/")), key=len, reverse=True):
        if not succeeds("umount", point):
            run("umount", "--lazy", point)
