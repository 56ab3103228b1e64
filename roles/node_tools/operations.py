"""What node_tools does to a host."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit import files
from kit.command import QuoteString, StringCommand, host
from kit.program import act_command
from kit.refusal import refuse
from kit.role import operation
from node import layout
from node.problems import Problem
from node.tools import Tools
from roles.node_tools.facts import NodeToolsFacts

_HERE = Path(__file__).parent
NO_SHELL = "/usr/sbin/nologin"
_NO_SHELLS = (NO_SHELL, "/sbin/nologin", "/bin/false", "/usr/bin/false")


@operation("Lay the ground: packages, users, folders, programs")
def lay_ground(
    packages: Sequence[str],
    users: Mapping[str, Sequence[str]],
    wanted: Sequence[files.Item],
    tools: Tools,
    distributions: Mapping[str, str],
    tools_link: str,
    programs_folder: str,
) -> Generator[Any, Any, Any]:
    """Bring packages, users, files and the tools' environment to what is wanted; what is so already costs nothing.

    + packages: names of system packages. Any installed version is right.
    + users: system user -> further groups that it joins where they exist.
    + wanted: directories and files, in the order in which they are made; the programs of `programs_folder` among them.
    + tools: the tools' environment; `tools_link` is the link to it, `distributions` what it consists of.
    + programs_folder: where the programs lie; .py files there that are not in `wanted` are of an older version, and go.
    """
    link = files.Link(tools_link, tools.environment)
    paths = [item.path for item in (*wanted, link)] + [tools.uv]
    groups = sorted({group for further in users.values() for group in further})
    found = NodeToolsFacts.read(
        packages=list(packages),
        paths=paths,
        users=list(users),
        groups=groups,
        programs=programs_folder,
        receipt=tools.receipt,
    )
    refuse(_unusable(found["users"]))
    quiet = True

    missing = [name for name, version in found["packages"].items() if version is None]
    if missing or found["unfinished"]:
        quiet = False
        yield act_command(
            _HERE / "packages_on_host.py", {"packages": missing, "unfinished": found["unfinished"]}, shown=(*missing,)
        )
    for command in _users(users, found):
        quiet = False
        yield command
    stale = [
        files.Absent(path)
        for name in found["programs"]
        if (path := f"{programs_folder}/{name}") not in {item.path for item in wanted}
    ]
    everything = [*wanted, *stale]
    state = {**found["files"], **{item.path: {"kind": "file"} for item in stale}}
    if files.compare(state, everything):
        quiet = False
        yield from files.apply(everything, state)
    if found["receipt"] is None or found["files"][tools.uv] is None:
        quiet = False
        yield act_command(
            _HERE / "environment_on_host.py",
            {
                "environment": tools.environment,
                "link": tools_link,
                "python": f"/usr/bin/python{tools.python}",
                "lock": tools.lock.decode(),
                "site_packages": tools.site_packages,
                "distributions": dict(distributions),
                "receipt": tools.receipt,
                "uv": tools.uv,
                "machine_environment": layout.MACHINE_ENVIRONMENT,
            },
            shown=(tools.environment,),
        )
    if files.compare(found["files"], [link]):
        quiet = False
        yield from files.apply([link], found["files"])
    if quiet:
        host().noop(f"{len(packages)} packages, {len(users)} users, {len(paths)} paths: as wanted")


def _unusable(users: Mapping[str, Mapping[str, Any] | None]) -> list[Problem]:
    """Users that have the name of ours and are somebody's."""
    return [
        Problem(
            f"user {name}",
            f"an account to log in with (uid {found['uid']}, shell {found['shell']})",
            "a system account without a shell, or none, so that it can be made",
            f"usermod --shell {NO_SHELL} {name}, if it may be used for this, or rename it",
        )
        for name, found in users.items()
        if found is not None and (found["uid"] == 0 or found["shell"] not in _NO_SHELLS)
    ]


def _users(users: Mapping[str, Sequence[str]], found: Mapping[str, Any]) -> list[StringCommand]:
    commands = []
    for name, further in users.items():
        existing = found["users"][name]
        wanted = [group for group in further if group in found["groups"]]
        if existing is None:
            bits: list[Any] = [
                "useradd --system --user-group --no-create-home --home-dir /nonexistent --shell",
                NO_SHELL,
            ]
            if wanted:
                bits += ["--groups", ",".join(wanted)]
            commands.append(StringCommand(*bits, QuoteString(name)))
        elif absent := [group for group in wanted if group not in existing["groups"]]:
            commands.append(StringCommand("usermod --append --groups", ",".join(absent), QuoteString(name)))
    return commands
