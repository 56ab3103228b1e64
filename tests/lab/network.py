"""A bridge with addresses of its own, a namespace and a cable for each member, and the way out to the registries.

Everything carries the lab's name (iptables rules in a comment), so that `down` finds all of it without a record.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from tests.lab.settings import RUNTIME, Lab, machine_number
from tests.lab.shell import LabError, run, succeeds

KERNEL_SETTINGS = {
    "net/ipv4/ip_forward": "1",
    "fs/inotify/max_user_instances": "4096",  # 128, the default, ends at 21 machines
}
BEFORE = RUNTIME / "kernel-settings.json"


def comment(lab: Lab) -> str:
    return f"kimi-nodes-lab-{lab.name}"


def rules(lab: Lab) -> list[list[str]]:
    """Out to anywhere by NAT, and what belongs to it back; also where the policy of FORWARD is DROP."""
    net = f"{lab.network}.0/24"
    return [
        ["-t", "nat", "-A", "POSTROUTING", "-s", net, "!", "-d", net, "-j", "MASQUERADE"],
        ["-t", "filter", "-I", "FORWARD", "-s", net, "-j", "ACCEPT"],
        [
            "-t",
            "filter",
            "-I",
            "FORWARD",
            "-d",
            net,
            "-m",
            "conntrack",
            "--ctstate",
            "ESTABLISHED,RELATED",
            "-j",
            "ACCEPT",
        ],
        ["-t", "filter", "-I", "FORWARD", "-s", net, "-d", net, "-j", "ACCEPT"],
    ]


def present_rules(lab: Lab) -> list[tuple[str, str]]:
    """(table, rule as iptables-save writes it) of this lab."""
    found = []
    for table in ("nat", "filter"):
        for line in run("iptables-save", "-t", table).splitlines():
            if line.startswith("-A ") and comment(lab) in shlex.split(line):
                found.append((table, line))
    return found


def up(lab: Lab) -> None:
    """The bridge, its address, the NAT rules. Repeating it changes nothing."""
    for line in run("ip", "-o", "-4", "address").splitlines():
        device, address = line.split()[1], line.split()[3]
        if address.rsplit(".", 1)[0] == lab.network and device != lab.bridge:
            raise LabError(
                f"network {lab.network}.0/24 is in use on {device} ({address})",
                fix="choose another: KIMI_NODES_LAB_NETWORK=10.78.0 bin/lab up 1",
            )
    if not succeeds("ip", "link", "show", lab.bridge):
        run("ip", "link", "add", lab.bridge, "type", "bridge")
    if f" {lab.gateway}/24 " not in run("ip", "-o", "-4", "address", "show", "dev", lab.bridge):
        run("ip", "address", "add", f"{lab.gateway}/24", "dev", lab.bridge)
    run("ip", "link", "set", lab.bridge, "up")
    if not BEFORE.exists():
        BEFORE.parent.mkdir(parents=True, exist_ok=True)
        BEFORE.write_text(json.dumps({name: Path("/proc/sys", name).read_text().strip() for name in KERNEL_SETTINGS}))
    for name, value in KERNEL_SETTINGS.items():
        Path("/proc/sys", name).write_text(value)
    wanted = rules(lab)
    if len(present_rules(lab)) != len(wanted):
        remove_rules(lab)
        for rule in wanted:
            run("iptables", *rule, "-m", "comment", "--comment", comment(lab))


def remove_rules(lab: Lab) -> None:
    for table, line in present_rules(lab):
        run("iptables", "-t", table, "-D", *shlex.split(line)[1:])


def down(lab: Lab) -> None:
    """Take away all that bears the lab's name. Kernel settings go back to what they were with the last lab."""
    for member in members(lab):
        unplug(lab, member)
    remove_rules(lab)
    if succeeds("ip", "link", "show", lab.bridge):
        run("ip", "link", "delete", lab.bridge)


def restore_kernel_settings() -> None:
    if BEFORE.exists():
        for name, value in json.loads(BEFORE.read_text()).items():
            Path("/proc/sys", name).write_text(value)
        BEFORE.unlink()


def members(lab: Lab) -> list[str]:
    """Who has a network namespace."""
    prefix = lab.namespace("")
    return [path.name[len(prefix) :] for path in Path("/run/netns").glob(prefix + "*")]


def plug(lab: Lab, member: str, address: str) -> None:
    """A namespace for `member` with the address on host0 and a cable to the bridge. Repeating it changes nothing."""
    namespace, outside = lab.namespace(member), lab.interface(member)
    if not Path("/run/netns", namespace).exists():
        run("ip", "netns", "add", namespace)
    if not succeeds("ip", "link", "show", outside):
        # A fixed MAC: with a fresh one, stale ARP on the bridge loses a re-created machine for 30 s.
        number = 2 if member == "services" else 10 + machine_number(member)
        mac = f"02:4c:41:42:00:{number:02x}"
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", "host0", "netns", namespace, "address", mac)
        run("ip", "link", "set", outside, "master", lab.bridge, "up")
    run("ip", "-n", namespace, "address", "replace", f"{address}/24", "dev", "host0")
    run("ip", "-n", namespace, "link", "set", "lo", "up")
    run("ip", "-n", namespace, "link", "set", "host0", "up")
    run("ip", "-n", namespace, "route", "replace", "default", "via", lab.gateway)


def unplug(lab: Lab, member: str) -> None:
    if succeeds("ip", "link", "show", lab.interface(member)):
        run("ip", "link", "delete", lab.interface(member))
    if Path("/run/netns", lab.namespace(member)).exists():
        run("ip", "netns", "delete", lab.namespace(member))


def cut(lab: Lab, machine: str) -> None:
    """A dead link: packets vanish both ways and no reset is sent."""
    run("bridge", "link", "set", "dev", lab.interface(machine), "state", "0")


def heal(lab: Lab, machine: str) -> None:
    run("bridge", "link", "set", "dev", lab.interface(machine), "state", "3")
