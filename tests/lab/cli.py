"""bin/lab: throw-away machines for this project. Needs root.

  bin/lab build [--suite bookworm|trixie]    what machines and services are made of; takes a minute or two, once
  bin/lab up N | h1 h3 [--suite S] [--gpus JSON]    machines, ready for ssh in seconds (builds first where needed)
  bin/lab ls                                 machines, addresses, processes, memory, disk
  bin/lab ssh h1 [COMMAND ...]
  bin/lab ask h1                             the known question to the model served there, and its answer
  bin/lab reset h1 ...                       back to the template: everything written is dropped
  bin/lab poweroff h1 ...                    a clean shutdown; the disk stays, `up h1` boots it again
  bin/lab cut h1 | heal h1                   a dead link (packets vanish both ways) | the link again
  bin/lab gpus h1 '{"model": "B300 SXM6 AC", "links": "nvlink"}'    what nvidia-smi and lspci print there
  bin/lab hub show | clear | token on|off | rate N | signed N | log | fault KIND FILE OFFSET [COUNT]
  bin/lab down [h1 ...]                      remove them; without names everything of this lab, after a crash as well

KIMI_NODES_LAB names the lab (lab), KIMI_NODES_LAB_NETWORK its network (10.77.0), KIMI_NODES_CACHE the cache folder
(~/.cache/kimi-nodes). Labs of different name and network live side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab import (
    cgroup,
    controller,
    hub,
    machine,
    network,
    nvidia_repository,
    served,
    services,
    settings,
    ssh_client,
    template,
    tiny_model,
)
from tests.lab.settings import RUNTIME, Lab, machine_number
from tests.lab.shell import LabError, lock, remove_tree
from tests.lab.stand_ins.gpu_stand_in.machine import DescriptionError, parse

LOCK = Path("/run/lock/kimi-nodes-lab")
"""One lab command at a time changes the machine's network; waiting for ssh is done outside of it."""


def build(lab: Lab, suite: str) -> None:
    """Everything that is made once and kept."""
    controller.install_packages()
    if not (lab.keys.is_dir() and is_built(lab, suite)):
        controller.require_disk_for_a_release(lab, controller.BUILD_BYTES)
    controller.require_overlay(lab)
    began = time.monotonic()
    steps: list[tuple[str, Callable[[], object]]] = [
        ("NVIDIA repository stand-in", lambda: nvidia_repository.build(lab)),
        (f"template {suite}", lambda: template.build(lab, suite)),
        ("tiny model", lambda: tiny_model.build(lab)),
    ]
    with lock(lab.parts / ".build.lock"):  # a second builder waits, then finds all made
        template.identity(lab)
        for what, step in steps:
            start = time.monotonic()
            step()
            print(f"{what}: {time.monotonic() - start:.1f} s", flush=True)
    print(f"built in {time.monotonic() - began:.1f} s")


def is_built(lab: Lab, suite: str) -> bool:
    return (template.folder(lab, suite) / "root").is_dir() and tiny_model.is_built(lab)


def up(lab: Lab, names: list[str], suite: str, gpus: dict[str, object] | None) -> None:
    controller.install_packages()
    if not is_built(lab, suite):
        build(lab, suite)
    elif not set(names) <= set(machine.names(lab)):
        controller.require_disk_for_a_release(lab)
    began = time.monotonic()
    with lock(LOCK):
        lab.machines.mkdir(parents=True, exist_ok=True)
        lab.runtime.mkdir(parents=True, exist_ok=True, mode=0o700)
        network.up(lab)
        services.start(lab)
        for name in names:
            machine.start(lab, name, suite, gpus)
        write_client_files(lab)
    started = time.monotonic() - began
    ssh_client.wait(lab, names)
    print(f"{', '.join(names)}: started in {started:.1f} s, ready for ssh after {time.monotonic() - began:.1f} s")


def write_client_files(lab: Lab) -> None:
    ssh_client.write(lab, {name: machine.folder(lab, name) / "host_key.pub" for name in machine.names(lab)})


def reset(lab: Lab, names: list[str], suite: str | None, gpus: dict[str, object] | None) -> None:
    known = {name: machine.record(lab, name)["suite"] for name in existing(lab, names)}
    down(lab, names)
    for name in names:
        up(lab, [name], suite or known[name], gpus)


def existing(lab: Lab, names: list[str]) -> list[str]:
    """The names, all of machines that exist. Raises LabError for another."""
    for name in names:
        machine_number(name)
        if name not in machine.names(lab):
            raise LabError(
                f"{name} does not exist; there are: {', '.join(machine.names(lab)) or 'none'}", fix=f"bin/lab up {name}"
            )
    return names


def down(lab: Lab, names: list[str]) -> None:
    began = time.monotonic()
    with lock(LOCK):
        if names:
            for name in names:
                ssh_client.close_connections(lab, name)
                machine.remove(lab, name)
            write_client_files(lab)
        else:
            ssh_client.close_connections(lab)
            for name in {*machine.names(lab), *network.members(lab)} - {services.MEMBER}:
                machine.remove(lab, name)
            services.stop(lab)
            cgroup.kill(lab, "")
            cgroup.remove_lab(lab)
            network.down(lab)
            machine.unmount_below(lab.state)
            remove_tree(lab.state)
            remove_tree(lab.runtime)
            if RUNTIME.is_dir() and not any(path.is_dir() for path in RUNTIME.iterdir()):
                network.restore_kernel_settings()
                RUNTIME.rmdir()
    print(f"{', '.join(names) if names else f'lab {lab.name!r}'}: removed in {time.monotonic() - began:.1f} s")


def show(lab: Lab) -> None:
    for name in machine.names(lab):
        running = len(cgroup.processes(lab, name))
        memory = cgroup.memory_mib(lab, name)
        disk = disk_bytes(machine.folder(lab, name) / "upper") / 1e6
        print(
            f"{name}  {lab.address(name)}  {machine.record(lab, name)['suite']}  "
            f"{f'{running} processes' if running else 'off'}  memory {memory or '-'} MiB  disk {disk:.0f} MB"
        )


def disk_bytes(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, file)).st_blocks * 512
    return total


def hub_command(lab: Lab, words: list[str]) -> None:
    """Read or change the control file of the hub stand-in, or print its log."""
    control = lab.state / "hub.json"
    if not lab.state.is_dir():
        raise LabError(f"lab {lab.name!r} is not up", fix="bin/lab up 1")
    values: dict[str, Any] = {**hub.DEFAULTS, **(json.loads(control.read_text()) if control.exists() else {})}
    verb, rest = (words[0], words[1:]) if words else ("show", [])
    if verb == "log":
        log = lab.state / "requests.jsonl"
        for line in log.read_text().splitlines() if log.exists() else []:
            if json.loads(line)["host"] in (hub.FRONT, hub.CDN):
                print(line)
        return
    if verb == "show" and not rest:
        shown = {**values, "token": "set (see hub-token)" if values["token"] else None}
        print(json.dumps(shown, indent=1))
        return
    token_file = lab.state / "hub-token"
    if verb == "clear" and not rest:
        values = dict(hub.DEFAULTS)
    elif verb == "token" and rest in (["on"], ["off"]):
        values["token"] = f"hf_{secrets.token_hex(17)}" if rest == ["on"] else None
    elif verb == "rate" and len(rest) == 1:
        values["rate"] = float(rest[0])
    elif verb == "signed" and len(rest) == 1:
        values["signed_s"] = float(rest[0])
    elif verb == "fault" and len(rest) in (3, 4) and rest[0] in hub.KINDS:
        fault = {"kind": rest[0], "file": rest[1], "offset": int(rest[2]), "count": int((rest[3:] or ["1"])[0])}
        values["faults"] = [*values["faults"], fault]
    else:
        raise LabError(f"hub {' '.join(words)}: not understood", fix="bin/lab --help")
    write_private(control, json.dumps(values, indent=1) + "\n")
    if values["token"]:
        write_private(token_file, f"{values['token']}\n")
    else:
        token_file.unlink(missing_ok=True)


def write_private(file: Path, text: str) -> None:
    """The token is in it: for root only, and replaced as a whole."""
    new = file.with_name(file.name + ".new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(text)
    os.rename(new, file)


def wanted_names(lab: Lab, words: list[str]) -> list[str]:
    """`3` -> h1 h2 h3; names stay names."""
    if len(words) == 1 and words[0].isdigit():
        return [f"h{number}" for number in range(1, int(words[0]) + 1)]
    for word in words:
        machine_number(word)
    return words


def gpus_of(text: str | None) -> dict[str, object] | None:
    if text is None:
        return None
    try:
        parse(text)
    except DescriptionError as error:
        raise LabError(f"--gpus: {error}", fix="docs/lab.md has the keys") from None
    values: dict[str, object] = json.loads(text)
    return values


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bin/lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    counts: tuple[tuple[str, int | str], ...] = (
        ("build", 0), ("up", "+"), ("down", "*"), ("reset", "+"), ("ls", 0), ("poweroff", "+"), ("cut", "+"),
        ("heal", "+"), ("ssh", argparse.REMAINDER), ("gpus", 2), ("hub", "*"), ("ask", 1),
    )  # fmt: skip
    for verb, count in counts:
        sub = verbs.add_parser(verb)
        if count:
            sub.add_argument("words", nargs=count)
        if verb in ("build", "up", "reset"):
            sub.add_argument("--suite", choices=list(settings.SUITES), default=None if verb == "reset" else "bookworm")
        if verb in ("up", "reset"):
            sub.add_argument("--gpus")
    options = parser.parse_args(arguments)
    words: list[str] = getattr(options, "words", [])
    try:
        controller.require_root()
        act(settings.read(), options, words)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lab: interrupted. Fix: `bin/lab down` removes what was begun", file=sys.stderr)
        return 130
    return 0


def act(lab: Lab, options: argparse.Namespace, words: list[str]) -> None:
    verb = options.verb
    if verb == "build":
        build(lab, options.suite)
    elif verb == "up":
        up(lab, wanted_names(lab, words), options.suite, gpus_of(options.gpus))
    elif verb == "reset":
        reset(lab, words, options.suite, gpus_of(options.gpus))
    elif verb == "down":
        down(lab, existing(lab, words))
    elif verb == "ls":
        show(lab)
    elif verb == "hub":
        hub_command(lab, words)
    elif verb == "gpus":
        machine.describe_gpus(lab, existing(lab, words[:1])[0], gpus_of(words[1]) or {})
    elif verb == "ask":
        served.ask(lab, existing(lab, words)[0])
    elif verb == "ssh":
        existing(lab, words[:1])
        os.execvp("ssh", ["ssh", "-F", str(lab.ssh_config), *words])
    else:
        deeds: dict[str, Callable[[Lab, str], None]] = {
            "cut": network.cut, "heal": network.heal, "poweroff": machine.poweroff
        }  # fmt: skip
        for name in existing(lab, words):
            deeds[verb](lab, name)
