"""Look at the host, decide about it, and refuse it with every reason at once before anything is changed."""

from __future__ import annotations

from typing import Any

from kit.command import host as current_host
from kit.inventory import host_neighbours, node_data
from kit.refusal import refuse, warn
from kit.role import role
from node import hardware, inventory, plan, systems
from node.hardware import QUERY_FIELDS
from node.plan import Observed, Plan
from node.problems import Malformed, Problem
from node.render import read_file
from node.sharing import Neighbour
from roles.preflight.facts import HostFacts


@role("Preflight")
def check() -> Plan | None:
    """The Plan of the current host, after its warnings. Raises Refusal with all Problems of its inventory, system and
    hardware."""
    host = current_host()
    data = node_data(host)
    refuse(inventory.read(data)[1])  # an inventory that says nothing right is no reason to ask the host
    found = HostFacts.read(query_fields=list(QUERY_FIELDS), weights_directory=data["weights_directory"])
    problems = host_problems(found)
    observed = observe(found)
    neighbours = [Neighbour(*each) for each in host_neighbours(host)]
    made = plan.make(host.name, data, read_file, observed, neighbours=neighbours)
    refuse(problems + (made if isinstance(made, list) else []))
    assert isinstance(made, Plan)
    warn(made.warnings)
    return made


def observe(found: dict[str, Any]) -> Observed:
    """What the probe's texts mean. Raises Refusal for text that no known program prints."""
    try:
        return Observed(systems.from_probe(**found["system"]), hardware.from_probe(found["hardware"]))
    except Malformed as error:
        refuse(error.problem())
        raise


def host_problems(found: dict[str, Any]) -> list[Problem]:
    """What makes a host unfit whatever the plan."""
    problems = []
    if found["uid"] != 0:
        problems.append(
            Problem(
                "user on the host",
                f"uid {found['uid']}",
                "root",
                "set ssh_user to root, or _sudo to True, in the inventory",
            )
        )
    if not found["systemd"]:
        problems.append(Problem("init system", "no systemd", "systemd", "use a machine that boots with systemd"))
    if found["weights_behind"]:
        problems.append(
            Problem(
                "weights_directory",
                f"it behind {found['weights_behind']}",
                "folders that every user may go through: weights are fetched by a user of their own",
                "choose another weights_directory, or open that folder to be gone through (chmod o+x)",
            )
        )
    network = ("nfs", "cifs", "smb", "lustre", "fuse.", "9p", "ceph", "gpfs", "beegfs")
    kind = found["weights_file_system"] or ""
    if kind.startswith(network):
        problems.append(
            Problem(
                "weights_directory",
                f"a {kind} file system",
                "a local disk: locks and renames on network file systems lose weights",
                "choose a weights_directory on a local disk",
            )
        )
    return problems
