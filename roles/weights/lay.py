"""What is laid on a node: the agent's parts, and for each repository its manifest, configuration and unit."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2

from files.tools.weights.commands import CREDENTIAL
from files.tools.weights.errors import PERMANENT
from kit import files
from node import layout
from node.plan import Plan, Weights

ROOT = Path(__file__).resolve().parents[2]
PARTS = ROOT / "files" / "tools" / "weights"
TEMPLATE = ROOT / "templates" / "kimi-weights.service.j2"
PROXY_FILE = f"{layout.CONFIGURATION}/proxy.env"

UNIT_PREFIX = "kimi-weights-"
WATCHDOG_SECONDS = 300  # without a byte fetched or hashed
FILES_AT_ONCE = 8
CONNECTIONS_PER_FILE = 2  # content networks limit the rate of one connection
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
        wanted += described(weights)
    return list({item.path: item for item in wanted}.values())


def folders(weights: Weights) -> list[files.Item]:
    """What the agent writes in is its user's; the owner's own weights directory above stays as it is, or is made."""
    own = {"user": layout.WEIGHTS_USER, "group": layout.WEIGHTS_USER}
    paths = (parent(weights.paths.staging), parent(weights.paths.snapshot))
    return [files.Directory(path, **own) for path in paths]


def described(weights: Weights) -> list[files.File]:
    """Manifest, configuration and unit of one repository."""
    return [
        files.File(weights.paths.manifest, weights.manifest.dumps()),
        files.File(weights.paths.configuration, configuration(weights)),
        files.File(f"{layout.UNITS}/{weights.paths.unit}", unit(weights)),
    ]


def parent(path: str) -> str:
    return path.rpartition("/")[0]


def configuration(weights: Weights) -> str:
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
        "files_at_once": FILES_AT_ONCE,
        "connections_per_file": CONNECTIONS_PER_FILE,
        "stall_seconds": STALL_SECONDS,
    }
    return json.dumps(told, indent=1) + "\n"


def unit(weights: Weights) -> str:
    """The unit that fetches this repository."""
    template = jinja2.Template(
        TEMPLATE.read_text(encoding="utf-8"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    text: str = template.render(
        repository=weights.manifest.repository,
        revision=weights.manifest.revision,
        directory=weights.paths.directory,
        configuration=weights.paths.configuration,
        agent=layout.WEIGHTS_AGENT,
        user=layout.WEIGHTS_USER,
        credential=CREDENTIAL,
        token_file=layout.HUB_TOKEN if weights.hub_token_file else "",
        proxy_file=PROXY_FILE,
        permanent=PERMANENT,
        watchdog_seconds=WATCHDOG_SECONDS,
        writable=[weights.paths.directory, layout.WEIGHTS_STATE],
    )
    return text
