"""Lay the ground that the other roles stand on."""

from __future__ import annotations

from pathlib import Path

from kit import files
from kit.role import role
from node import layout, packages
from node.lock import distributions
from node.plan import Plan
from roles.node_tools.operations import lay_ground

PROGRAMS = Path(__file__).resolve().parents[2] / "files" / "tools"

FOLDERS = (
    files.Directory(layout.ROOT),
    files.Directory(layout.RELEASES),
    files.Directory(layout.TOOLS),
    files.Directory(layout.CONFIGURATION),
    files.Directory(layout.KEYS, mode="700"),
    files.Directory(layout.MANIFESTS),
    files.Directory(layout.STATE),
    files.Directory(layout.RECEIPTS),
    files.Directory(layout.BUILDS),
    files.Directory(layout.CACHE),
)

USERS = {layout.SERVICE_USER: packages.DEVICE_GROUPS, layout.WEIGHTS_USER: ()}


@role("Node tools")
def install(plan: Plan) -> None:
    """System packages, users, folders, the programs that run on the node, and their environment."""
    lay_ground(
        packages=list(packages.BASE),
        users=USERS,
        wanted=[files.File(packages.APT_CONFIGURATION_FILE, packages.APT_CONFIGURATION), *FOLDERS, *programs()],
        tools=plan.tools,
        distributions=distributions(plan.tools.lock, plan.tools.python),
        tools_link=layout.TOOLS_ENVIRONMENT,
        programs_folder=layout.TOOLS,
    )


def programs() -> list[files.File]:
    """The programs of `files/tools`, as they lie on the node."""
    return [
        files.File(f"{layout.TOOLS}/{path.name}", path.read_bytes(), mode="755")
        for path in sorted(PROGRAMS.glob("*.py"))
    ]
