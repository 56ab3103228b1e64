"""What every other role stands on: packages, users, folders, programs, and the programs' own environment."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from kit import files
from kit.program import probe_command
from node import layout, packages
from node.lock import distributions
from node.plan import Plan
from roles.node_tools import deploy
from roles.node_tools.facts import NodeToolsFacts

FIX = "Fix: run deploy.py again"


@pytest.fixture(scope="module")
def found(host: Any, plan: Plan) -> dict[str, Any]:
    """What the host says of all of it, in one round trip."""
    arguments = {
        "packages": list(packages.BASE),
        "paths": [
            *(item.path for item in (*deploy.FOLDERS, *deploy.programs())),
            packages.APT_CONFIGURATION_FILE,
            layout.TOOLS_ENVIRONMENT,
        ],
        "users": list(deploy.USERS),
        "groups": list(packages.DEVICE_GROUPS),
        "programs": layout.TOOLS,
        "receipt": plan.tools.receipt,
    }
    said = host.run(probe_command(NodeToolsFacts.source(), arguments).get_raw_value())
    assert said.rc == 0, f"the host gives no answer: {said.stderr.strip()[-300:]}"
    answer = json.loads(said.stdout.splitlines()[-1])
    assert "found" in answer, f"the host cannot be looked at: {answer}"
    return dict(answer["found"])


def test_packages_are_installed(found: dict[str, Any]) -> None:
    """Without Python.h Triton compiles no launcher, without g++ nvcc nothing: both show at the first request only."""
    missing = [f"{name} ({packages.BASE[name]})" for name, version in found["packages"].items() if version is None]
    assert not missing, f"packages: found none of {'; '.join(missing)}, wanted them installed. {FIX}"
    unfinished = ", ".join(found["unfinished"])
    assert not unfinished, f"dpkg: found {unfinished} half installed, wanted all whole. Fix: dpkg --configure -a"


def test_programs_are_those_of_this_project(found: dict[str, Any]) -> None:
    """A program of another version understands another configuration."""
    wanted = {file.path: hashlib.sha256(file.data).hexdigest() for file in deploy.programs()}
    here = {path: (found["files"][path] or {}).get("sha256") for path in wanted}
    wrong = sorted(path for path in wanted if here[path] != wanted[path])
    assert not wrong, f"programs: found {', '.join(wrong)} missing or of other content, wanted this project's. {FIX}"


def test_folders_are_closed_as_planned(found: dict[str, Any]) -> None:
    """The folder of keys is readable by root alone, and nothing that root runs may be written by others."""
    wrong = files.compare(found["files"], deploy.FOLDERS)
    assert not wrong, "; ".join(f"{path}: {reason}" for path, reason in wrong.items()) + f". {FIX}"
    for path, state in found["files"].items():
        assert state is not None, f"{path}: found nothing, wanted it there. {FIX}"
        assert state["kind"] == "link" or not int(state["mode"], 8) & 0o022, (
            f"{path}: found mode {state['mode']}, wanted it writable by root alone. {FIX}"
        )


def test_users_can_do_little(found: dict[str, Any]) -> None:
    """The engine runs code from the model's repository: its user has no shell, no root, and no group but the GPUs'."""
    for name, groups in deploy.USERS.items():
        user = found["users"][name]
        assert user is not None, f"user {name}: found none, wanted a system user. {FIX}"
        assert user["uid"] != 0 and user["shell"] == "/usr/sbin/nologin", (
            f"user {name}: found uid {user['uid']} with shell {user['shell']}, wanted a user without one. "
            f"Fix: usermod --shell /usr/sbin/nologin {name}"
        )
        wanted = sorted(set(groups) & set(found["groups"]))
        assert user["groups"] == wanted, (
            f"user {name}: found it in groups {user['groups']}, wanted {wanted}. "
            f"Fix: usermod --groups '{','.join(wanted)}' {name}"
        )


def test_the_tools_are_those_of_the_lock(host: Any, plan: Plan) -> None:
    """uv builds releases and huggingface_hub asks the hub, as root: only versions that were pinned by hash may."""
    wanted = distributions(plan.tools.lock, plan.tools.python)
    program = (
        "import importlib.metadata as m, json, re; "
        "print(json.dumps({re.sub('[-_.]+', '-', d.metadata['Name']).lower(): d.version for d in m.distributions()}))"
    )
    said = host.run("%s -I -c %s", f"{layout.TOOLS_ENVIRONMENT}/bin/python", program)
    assert said.rc == 0, f"{layout.TOOLS_ENVIRONMENT}: found no Python that runs, wanted the tools' own. {FIX}"
    here = json.loads(said.stdout)
    wrong = [
        f"{name} {here.get(name)}, wanted {version}" for name, version in wanted.items() if here.get(name) != version
    ]
    assert not wrong, (
        f"{layout.TOOLS_ENVIRONMENT}: found {'; '.join(wrong)}. Fix: remove {plan.tools.receipt}, deploy again"
    )


def test_apt_waits_for_its_lock(host: Any) -> None:
    """unattended-upgrades takes the lock at random; an apt-get that does not wait fails a deploy for nothing."""
    said = host.run("apt-config dump --format '%f=%v%n' DPkg::Lock::Timeout")
    found = said.stdout.strip().rpartition("=")[2]
    assert found and int(found) >= 60, f"apt: found lock timeout {found or 'none'}, wanted a minute or more. {FIX}"
