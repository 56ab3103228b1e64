"""The whole way, driven as a user drives it: pyinfra and pytest as child processes, a lab machine looked at over
ssh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.proof.engine import Engine

PROJECT = Path(__file__).resolve().parents[2]
INVENTORY = "inventory/lab.py"


@dataclass(frozen=True)
class Deployed:
    """One run of deploy.py. changed, unchanged: names of the operations that did and did not change the host."""

    code: int
    output: str
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]


@dataclass(frozen=True)
class Verified:
    """One run of the verify suite. failed: "test_file.py::test_name" of what does not hold."""

    code: int
    output: str
    failed: tuple[str, ...]


class Node:
    """One lab machine and what a user does with it."""

    def __init__(self, name: str):
        self.name = name

    def ssh(self, command: str, check: bool = True) -> str:
        """Run a shell command on the machine as root; its output."""
        done = subprocess.run(
            [str(PROJECT / "bin/lab"), "ssh", self.name, command], capture_output=True, text=True, check=False
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def deploy(self, *data: str, verb: str = "deploy.py") -> Deployed:
        """pyinfra -y inventory/lab.py deploy.py --data ..."""
        command = [sys.executable, "-m", "pyinfra", "-y", "--json", INVENTORY, verb, "--limit", self.name]
        for item in data:
            command += ["--data", item]
        environment = {**os.environ, "PYINFRA_PROGRESS": "off", "KIMI_NODES_COUNT_COMMANDS": "1"}
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, env=environment, check=False)
        operations: list[dict[str, Any]] = []
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                operations = json.loads(line)["results"]["operations"]
        changed = tuple(operation["name"] for operation in operations if operation["success"])
        unchanged = tuple(operation["name"] for operation in operations if operation["no_change"])
        return Deployed(done.returncode, done.stdout + done.stderr, changed, unchanged)

    def verify(self, *files: str, data: tuple[str, ...] = ()) -> Verified:
        """pytest tests/host --inventory inventory/lab.py --data ..., all of it or only some roles' files."""
        paths = [f"tests/host/test_{name}.py" for name in files] or ["tests/host"]
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *paths]
        command += ["--inventory", INVENTORY, "--limit", self.name]
        for item in data:
            command += ["--data", item]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
        failed = tuple(
            line.split()[1].removeprefix("tests/host/")
            for line in done.stdout.splitlines()
            if line.startswith(("FAILED ", "ERROR "))
        )
        return Verified(done.returncode, done.stdout + done.stderr, failed)


def lab(*arguments: str) -> str:
    done = subprocess.run([str(PROJECT / "bin/lab"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def node() -> Node:
    """A fresh machine: nothing of ours is on it. bin/test takes the lab down at its end."""
    lab("up", "h1")
    lab("reset", "h1")
    return Node("h1")


@pytest.fixture(scope="session")
def deployed(request: pytest.FixtureRequest) -> Node:
    """A machine with a running service: the one that test_bare_to_answer deploys, where that runs in the same session;
    otherwise the one that KIMI_NODES_PROOF_MACHINE names (h1), deployed now where it is not yet."""
    if any(item.path.name == "test_bare_to_answer.py" for item in request.session.items):
        found: Node = request.getfixturevalue("node")
        return found
    name = os.environ.get("KIMI_NODES_PROOF_MACHINE", "h1")
    lab("up", name)
    machine = Node(name)
    deployment = machine.deploy()
    assert deployment.code == 0, deployment.output
    return machine


@pytest.fixture(scope="session")
def engine(deployed: Node) -> Iterator[Engine]:
    """Its engine, to be run in other ways; what was laid on the machine for that is taken away at the end."""
    from tests.proof.engine import Engine

    found = Engine.of(deployed)
    yield found
    found.clean()
