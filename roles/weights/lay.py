"""What is laid on a node: the agent's parts, and for each repository its manifest, configuration and unit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from files.tools.weights.commands import CREDENTIAL
from files.tools.weights.errors import PERMANENT
from kit import files, templates
from node import layout
from node import sharing as between_nodes
from node.plan import Plan, Weights
from node.sharing import Sharing

ROOT = Path(__file__).resolve().parents[2]
PARTS = ROOT / "files" / "tools" / "weights"

UNIT_PREFIX = "kimi-weights-"
WATCHDOG_SECONDS = 300  # without a byte fetched or hashed
FILES_AT_ONCE = 2  # a file is hashed while the next ones come
CONNECTIONS_PER_FILE = 8  # content networks limit the rate of one connection
SHARED_FILES_AT_ONCE = 1  # the sooner a file is whole, the sooner the other nodes can have it
SHARED_CONNECTIONS_PER_FILE = 16
STALL_SECONDS = 30


def items(plan: Plan, token: str | None) -> list[files.Item]:
    """Everything, in the order in which it is made. token: of the hub, where the inventory names one."""
    wanted: list[files.Item] = [
        files.Directory(layout.WEIGHTS_AGENT_PARTS),
        *(
            files.File(f"{layout.WEIGHTS_AGENT_PARTS}/{path.name}", path.read_bytes())
            for path in sorted(PARTS.glob("*.py"))
        ),
        files.Directory(layout.WEIGHTS_STATE, user=layout.WEIGHTS_USER, group=layout.WEIGHTS_USER),
        files.Directory(layout.MANIFESTS),
        files.Directory(layout.KEYS, mode="700"),
        files.File(layout.HUB_TOKEN, token + "\n", mode="600", secret=True)
        if token is not None
        else files.Absent(layout.HUB_TOKEN),
    ]
    for weights in plan.weights:
        wanted += folders(weights)
    for weights in plan.weights:
        wanted += described(weights, plan.sharing)
    wanted += shared(plan) if plan.sharing else [files.Absent(path) for path in SHARING_FILES]
    return list({item.path: item for item in wanted}.values())


def folders(weights: Weights) -> list[files.Item]:
    """What the agent writes in is its user's; the owner's own weights directory above stays as it is, or is made."""
    own = {"user": layout.WEIGHTS_USER, "group": layout.WEIGHTS_USER}
    paths = (parent(weights.paths.staging), parent(weights.paths.snapshot))
    return [files.Directory(path, **own) for path in paths]


def described(weights: Weights, sharing: Sharing | None = None) -> list[files.File]:
    """Manifest, configuration and unit of one repository."""
    return [
        files.File(weights.paths.manifest, weights.manifest.dumps()),
        files.File(weights.paths.configuration, configuration(weights, sharing)),
        files.File(f"{layout.UNITS}/{weights.paths.unit}", unit(weights, sharing)),
    ]


SHARING_UNIT_FILE = f"{layout.UNITS}/{layout.SHARING_UNIT}"
SHARING_FILES = (layout.SHARING, layout.SHARING_FIREWALL, SHARING_UNIT_FILE)


def shared(plan: Plan) -> list[files.Item]:
    """What the sharer is told, its firewall and its unit."""
    sharing = plan.sharing
    assert sharing is not None
    own = {"user": layout.WEIGHTS_USER, "group": layout.WEIGHTS_USER}
    told = {
        "name": sharing.name,
        "port": sharing.port,
        "members": [[member.name, member.address] for member in sharing.members],
        "socket": f"{layout.SHARING_RUNTIME}/agents.sock",
        "tables": layout.SHARING_TABLES,
        "weights": [weights.paths.configuration for weights in plan.weights],
        "poll": between_nodes.POLL_SECONDS,
        "silence": between_nodes.SILENCE_SECONDS,
        "settle": between_nodes.SETTLE_SECONDS,
        "stuck": between_nodes.STUCK_SECONDS,
        "takeover": between_nodes.TAKEOVER_SECONDS,
    }
    names: dict[str, Any] = {
        "sharing": sharing,
        "table": layout.SHARING_TABLE,
        "firewall": layout.SHARING_FIREWALL,
        "python": f"{plan.tools.environment}/bin/python",  # by its own path: another environment is a reason to restart
        "agent": layout.WEIGHTS_AGENT,
        "configuration": layout.SHARING,
        "user": layout.WEIGHTS_USER,
        "runtime": layout.SHARING_RUNTIME.rpartition("/")[2],
        "writable": sorted({layout.WEIGHTS_STATE, *(weights.paths.directory for weights in plan.weights)}),
    }
    return [
        files.Directory(layout.SHARING_TABLES, **own),
        files.File(layout.SHARING, json.dumps(told, indent=1) + "\n"),
        files.File(layout.SHARING_FIREWALL, templates.render("kimi-share.nft.j2", names)),
        files.File(SHARING_UNIT_FILE, templates.render("kimi-share.service.j2", names)),
    ]


def parent(path: str) -> str:
    return path.rpartition("/")[0]


def configuration(weights: Weights, sharing: Sharing | None = None) -> str:
    """For files/tools/weights/configuration.py."""
    told = {
        "repository": weights.manifest.repository,
        "revision": weights.manifest.revision,
        "hub": weights.hub,
        "directory": weights.paths.directory,
        "snapshot": weights.paths.snapshot,
        "staging": weights.paths.staging,
        "manifest": weights.paths.manifest,
        "status": weights.paths.status,
        "user": layout.WEIGHTS_USER,
        "token_file": layout.HUB_TOKEN if weights.hub_token_file else "",
        "client": f"{layout.TOOLS_ENVIRONMENT}/bin/python",
        "sharing": layout.SHARING if sharing else "",
        "files_at_once": SHARED_FILES_AT_ONCE if sharing else FILES_AT_ONCE,
        "connections_per_file": SHARED_CONNECTIONS_PER_FILE if sharing else CONNECTIONS_PER_FILE,
        "stall_seconds": STALL_SECONDS,
    }
    return json.dumps(told, indent=1) + "\n"


def unit(weights: Weights, sharing: Sharing | None = None) -> str:
    """The unit that fetches this repository."""
    values = {
        "sharer": layout.SHARING_UNIT if sharing else "",
        "repository": weights.manifest.repository,
        "revision": weights.manifest.revision,
        "directory": weights.paths.directory,
        "configuration": weights.paths.configuration,
        "agent": layout.WEIGHTS_AGENT,
        "user": layout.WEIGHTS_USER,
        "credential": CREDENTIAL,
        "token_file": layout.HUB_TOKEN if weights.hub_token_file else "",
        "machine_environment": layout.MACHINE_ENVIRONMENT,
        "permanent": PERMANENT,
        "watchdog_seconds": WATCHDOG_SECONDS,
        "writable": [weights.paths.directory, layout.WEIGHTS_STATE],
    }
    return templates.render("kimi-weights.service.j2", values)
