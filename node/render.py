"""Show what would run on a host, with no host touched: python -m node.render INVENTORY [--host H] [--data KEY=VALUE]

The one module of node that reads anything: an inventory, through pyinfra in a child process, and the project's own
locks and manifests. It plans for the machine that the inventory declares; --system says which operating system to plan
for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from node import plan as plan_module
from node import systems
from node.plan import Plan
from node.problems import Problem
from node.sharing import Neighbour
from node.systems import System

PROJECT = Path(__file__).resolve().parents[1]


def read_file(path: str) -> bytes:
    """A file of the controller, relative to the project. Raises OSError."""
    return (PROJECT / path).read_bytes()


def inventory_hosts(inventory: str, overrides: Sequence[str] = ()) -> tuple[dict[str, dict[str, Any]], list[Neighbour]]:
    """(host name -> its inventory data, pyinfra's own keys left out; the hosts as each other's neighbours).

    overrides: KEY=VALUE, as pyinfra's --data. Raises ValueError for an inventory that cannot be read.
    """
    path = str(Path(inventory).resolve())
    command = [sys.executable, "-m", "kit.inventory", path, *(f"--data={text}" for text in overrides)]
    found = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise ValueError(found.stderr.strip())
    hosts = json.loads(found.stdout)
    neighbours = [Neighbour(name, entry["address"], entry["data"]) for name, entry in hosts.items()]
    return {name: entry["data"] for name, entry in hosts.items()}, neighbours


def shown(plan: Plan) -> dict[str, Any]:
    """A plan as plain data, without the lock's and the manifests' content."""
    return {
        "host": plan.host,
        "system": str(plan.system),
        "release": {"name": plan.release.name, "digest": plan.paths.digest, "environment": plan.paths.environment},
        "toolkit": {
            "version": plan.toolkit.version,
            "package": f"{plan.toolkit.package}={plan.toolkit.apt_version}",
            "beside": [kit.version for kit in plan.toolkits_beside],
            "repository": dataclasses.asdict(plan.repository),
        },
        "patches": [patch.id for patch in plan.patches],
        "profile": plan.profile.name,
        "model": plan.model.key,
        "drafter": plan.drafter.key if plan.drafter else None,
        "weights": [
            {
                "role": part.role,
                "repository": part.manifest.repository,
                "revision": part.manifest.revision,
                "bytes": part.manifest.bytes,
                "files": len(part.manifest.files),
                "snapshot": part.paths.snapshot,
            }
            for part in plan.weights
        ],
        "weights_peers": {peer.name: peer.address for peer in plan.sharing.peers} if plan.sharing else {},
        "unit": plan.service.unit,
        "address": f"http://{plan.service.host}:{plan.service.port}",
        "edge": {
            "address": plan.edge.origin,
            "listens": f"{plan.edge.address or 'every address'}, port {plan.edge.port}",
            "served": [str(served) for served in plan.edge.served],
        }
        if plan.edge
        else None,
        "environment": dict(plan.service.environment),
        "arguments": list(plan.service.arguments),
        "cache": plan.paths.cache,
        "fit": {
            "memory_fraction": plan.fit.memory_fraction,
            "tokens": plan.fit.tokens,
            "gpus": [dataclasses.asdict(gpu) for gpu in plan.fit.gpus],
        }
        if plan.fit
        else None,
    }


def text(plan: Plan) -> str:
    """A plan for a reader."""
    lines = [
        f"{plan.host}: {plan.model.key} by {plan.release.name}, profile {plan.profile.name}",
        f"  unit         {plan.service.unit}",
        f"  release      {plan.paths.environment}",
        f"  toolkit      {plan.toolkit.package}={plan.toolkit.apt_version} in {plan.toolkit.prefix}",
    ]
    for part in plan.weights:
        lines.append(f"  {part.role:12} {part.paths.snapshot} ({part.manifest.bytes / 1e9:.1f} GB)")
    if plan.sharing:
        peers = ", ".join(f"{peer.name} ({peer.address})" for peer in plan.sharing.peers)
        lines.append(f"  peers        {peers}")
    if plan.edge:
        lines.append(f"  edge         {plan.edge.origin}: {', '.join(map(str, plan.edge.served))}")
    lines += ["  environment", *(f"    {name}={value}" for name, value in plan.service.environment.items())]
    lines += ["  arguments", *(f"    {line}" for line in _argument_lines(plan.service.arguments))]
    if plan.fit:
        lines.append(f"  memory       fraction {plan.fit.memory_fraction}, KV cache for {plan.fit.tokens} tokens")
        lines += [f"    {line}" for line in plan.fit.lines()]
    return "\n".join(lines)


def _argument_lines(arguments: tuple[str, ...]) -> list[str]:
    """The argument vector as shell words, a flag with its values a line."""
    lines: list[str] = []
    for argument in arguments:
        if argument.startswith("--") or not lines:
            lines.append(shlex.quote(argument))
        else:
            lines[-1] += " " + shlex.quote(argument)
    return lines


def main(arguments: list[str] | None = None) -> int:
    """0: every host has a plan. 1: some have problems, on stderr. 2: the inventory or the call is wrong."""
    parser = argparse.ArgumentParser(prog="python -m node.render", description=__doc__.splitlines()[0])
    parser.add_argument("inventory", metavar="INVENTORY")
    parser.add_argument("--host", help="only this one")
    parser.add_argument(
        "--data", action="append", default=[], metavar="KEY=VALUE", help="as pyinfra's: one key for all hosts"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, host names as keys")
    names = [str(system) for system in systems.SYSTEMS]
    parser.add_argument(
        "--system", type=str.lower, choices=names, default=names[0], help="the operating system to plan for"
    )
    options = parser.parse_args(arguments)
    system: System = systems.SYSTEMS[names.index(options.system)].as_system()
    try:
        hosts, neighbours = inventory_hosts(options.inventory, options.data)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.host and options.host not in hosts:
        print(
            f"{options.host} is not in {options.inventory}, which has: {', '.join(hosts) or 'no host'}. "
            f"Fix: name one of them",
            file=sys.stderr,
        )
        return 2
    made: Mapping[str, Plan | list[Problem]] = {
        name: plan_module.make(name, data, read_file, None, system, neighbours)
        for name, data in hosts.items()
        if options.host in (None, name)
    }
    plans = {name: plan for name, plan in made.items() if isinstance(plan, Plan)}
    if options.json:
        print(json.dumps({name: shown(plan) for name, plan in plans.items()}, indent=2))
    elif plans:
        print("\n\n".join(text(plan) for plan in plans.values()))
    for name, problems in made.items():
        if not isinstance(problems, Plan):
            for problem in problems:
                print(f"[{name}] {problem}", file=sys.stderr)
    return 0 if len(plans) == len(made) else 1


if __name__ == "__main__":
    sys.exit(main())
