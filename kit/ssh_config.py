"""The inventory's ssh settings for the ssh program, for those that reach hosts without pyinfra.

The verify suite (through testinfra) and diagnose.py connect with OpenSSH itself: its agent, its known_hosts, and the
user's own ~/.ssh/config for whatever the inventory does not say.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from kit.inventory import HostEntry

CONNECT_SECONDS = 15

_OPTIONS = {
    "ssh_hostname": "HostName",
    "ssh_user": "User",
    "ssh_port": "Port",
    "ssh_key": "IdentityFile",
    "ssh_known_hosts_file": "UserKnownHostsFile",
}


def text(entries: Mapping[str, HostEntry], folder: Path) -> str:
    """An ssh_config in which every host of the inventory has its inventory name. The first connection to a host stays
    open in `folder` for the next ones, because testinfra connects anew for each command otherwise."""
    lines = []
    for entry in entries.values():
        lines.append(f"Host {entry.name}")
        lines += [f"  {option} {entry.ssh[key]}" for key, option in _OPTIONS.items() if entry.ssh.get(key)]
    lines += [
        "Host *",
        "  StrictHostKeyChecking yes",
        "  BatchMode yes",
        f"  ConnectTimeout {CONNECT_SECONDS}",
        "  ControlMaster auto",
        "  ControlPersist 60",
        f"  ControlPath {folder}/control-%C",
        "  LogLevel ERROR",
    ]
    user_config = Path("~/.ssh/config").expanduser()
    return "\n".join(lines) + "\n" + (f"Include {user_config}\n" if user_config.exists() else "")


@contextlib.contextmanager
def written(entries: Mapping[str, HostEntry]) -> Iterator[Path]:
    """The path of such a file, as long as the block lasts; with it end the connections that were kept open."""
    folder = Path(tempfile.mkdtemp(prefix="kimi-ssh-"))
    try:
        path = folder / "ssh_config"
        path.write_text(text(entries, folder))
        yield path
    finally:
        for socket in folder.glob("control-*"):
            closing = ["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "any"]
            subprocess.run(closing, capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def is_local(entry: HostEntry) -> bool:
    """Whether the host is this machine, by pyinfra's connector @local."""
    return entry.name.startswith("@local")


def argv(config: Path, entry: HostEntry, command: str) -> list[str]:
    """What runs a shell command on a host, as root where the inventory says _sudo. It never asks for anything."""
    if entry.ssh.get("_sudo"):
        command = f"sudo -n -- sh -c {shlex.quote(command)}"
    if is_local(entry):
        return ["sh", "-c", command]
    # No master for one command: its standard error would stay open after it.
    return ["ssh", "-n", "-F", str(config), "-o", "ControlMaster=no", "-o", "ControlPath=none", entry.name, command]
