"""ssh_config and known_hosts of the lab: for ssh, testinfra and pyinfra alike. Host keys are true and checked."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from tests.lab.settings import Lab
from tests.lab.shell import LabError


def write(lab: Lab, machines: dict[str, Path]) -> None:
    """machines: name -> the public host key's file."""
    known, config = [], []
    for name, public in machines.items():
        kind, key = public.read_text().split()[:2]
        known.append(f"{name},{lab.address(name)} {kind} {key}\n")
        config.append(f"Host {name}\n  HostName {lab.address(name)}\n")
    # One connection for many commands: testinfra's ssh backend connects anew for each one otherwise.
    config.append(
        f"Host h*\n  User root\n  IdentityFile {lab.identity}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {lab.known_hosts}\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
        f"  HashKnownHosts no\n  UpdateHostKeys no\n  LogLevel ERROR\n"
        f"  ControlMaster auto\n  ControlPersist 60\n  ControlPath {lab.runtime}/%C\n"
    )
    lab.known_hosts.write_text("".join(known))
    lab.ssh_config.write_text("".join(config))


def command(lab: Lab, machine: str, *options: str) -> list[str]:
    """ssh to a machine on a connection of its own (no control socket is left behind)."""
    return ["ssh", "-F", str(lab.ssh_config), "-o", "ControlPath=none", "-o", "ConnectTimeout=5", *options, machine]


def wait(lab: Lab, machines: list[str], limit_s: float = 90) -> None:
    """Until ssh answers on all of them."""
    end = time.monotonic() + limit_s
    for name in machines:
        while True:
            done = subprocess.run([*command(lab, name, "-o", "BatchMode=yes"), "true"], capture_output=True, text=True)
            if done.returncode == 0:
                break
            if time.monotonic() > end:
                log = lab.machines / name / "console.log"
                raise LabError(f"{name}: no ssh within {limit_s:.0f} s ({done.stderr.strip()})", fix=f"read {log}")
            time.sleep(0.05)


def close_connections(lab: Lab, machine: str | None = None) -> None:
    """End the masters behind the control sockets, of one machine or of all."""
    if not lab.runtime.is_dir():
        return
    if machine is not None:
        subprocess.run(["ssh", "-F", str(lab.ssh_config), "-O", "exit", machine], capture_output=True)
        return
    for socket in lab.runtime.iterdir():
        said = subprocess.run(
            ["ssh", "-o", f"ControlPath={socket}", "-O", "check", "any"], capture_output=True, text=True
        )
        subprocess.run(["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "any"], capture_output=True)
        if found := re.search(r"pid=(\d+)", said.stderr):
            end = time.monotonic() + 5
            while Path("/proc", found[1]).exists() and time.monotonic() < end:
                time.sleep(0.02)
        socket.unlink(missing_ok=True)
