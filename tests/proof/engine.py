"""The engine of a deployed lab machine, run in other ways than its service does: with another release's packages over
its environment, with other arguments, with another toolkit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.inventory import load
from kit.program import probe_command
from node import layout, systems
from node import plan as plan_module
from node.lock import distributions
from node.plan import Plan
from node.releases import RELEASES, Release
from node.render import read_file
from tests.proof.conftest import INVENTORY, PROJECT, Node

HERE = Path(__file__).parent
OVERLAYS = "/var/tmp/kimi-nodes-proof"

# What differs between a release and the deployed one and is imported before a GPU is needed. The rest of it, torch
# first of all, is the deployed release's; 0.5.12.post1 has the same torch, and its kernels too, since they are loaded.
LAID_OVER = {
    "sglang-0.5.12.post1": (
        *("sglang", "sglang-kernel", "flashinfer-python", "apache-tvm-ffi", "transformers", "huggingface-hub"),
        *("kernels", "xgrammar", "llguidance", "compressed-tensors", "anthropic"),
    ),
    "sglang-0.5.17": (),
    "sglang-0.5.23": ("sglang", "transformers", "tokenizers", "huggingface-hub", "xgrammar"),
}


@dataclass
class Engine:
    """A deployed machine and the Plan it was deployed by."""

    node: Node
    plan: Plan
    laid: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, node: Node) -> Engine:
        entry = load(PROJECT / INVENTORY)[node.name]
        plan = plan_module.make(node.name, entry.data, read_file, None, systems.SYSTEMS[0].as_system())
        assert isinstance(plan, Plan), [str(problem) for problem in plan]
        assert node.ssh(f"readlink {layout.CURRENT}") == plan.paths.environment, "another release is deployed"
        return cls(node, plan)

    def probe(self, file: str, **arguments: Any) -> Any:
        """Call `probe` of a file beside this one on the node."""
        command = probe_command(HERE / file, arguments).get_raw_value()
        said = json.loads(self.node.ssh(command).splitlines()[-1])
        assert "found" in said, said.get("problem") or said.get("traceback")
        return said["found"]

    def site(self, release: Release) -> str:
        """The folder that holds the release's own packages: an overlay, or the environment itself."""
        if release.name == self.plan.release.name:
            return self.plan.site_packages
        return f"{OVERLAYS}/{release.name}"

    def lay_over(self, release: Release) -> str:
        """Have the release's packages on the node, by the hashes of its lock; the folder to put into PYTHONPATH."""
        names = LAID_OVER[release.name]
        if release.name == self.plan.release.name or release.name in self.laid:
            return self.site(release)
        self.probe(
            "overlay_on_node.py",
            folder=self.site(release),
            uv=f"{layout.TOOLS_ENVIRONMENT}/bin/uv",
            python=self.plan.paths.python,
            requirements=requirements(release, names, self.plan.system.python),
        )
        self.laid.add(release.name)
        return self.site(release)

    def run(
        self, program: str, cases: list[dict[str, Any]], seconds: int = 400, at_once: int = 2
    ) -> dict[str, dict[str, Any]]:
        """Run a file beside this one in the release's environment, see engine_on_node.py. Case -> what came of it."""
        found: dict[str, dict[str, Any]] = self.probe(
            "engine_on_node.py",
            program=(HERE / program).read_text(),
            python=self.plan.paths.python,
            user=layout.SERVICE_USER,
            cases=cases,
            seconds=seconds,
            at_once=at_once,
        )
        return found

    def environment(self, plan: Plan, release: Release, **changes: str | None) -> dict[str, str]:
        """A plan's environment for the case, with caches in its own folder; a change to None takes a variable out."""
        made: dict[str, str | None] = {
            name: value.replace(plan.paths.cache, "$WORK/home").replace(plan.paths.bin, self.plan.paths.bin)
            for name, value in plan.service.environment.items()
        }
        over = [] if release.name == self.plan.release.name else [self.lay_over(release)]
        made |= {"PYTHONPATH": ":".join([*over, layout.TOOLS]), "PYTHONDONTWRITEBYTECODE": "1"}
        return {name: value for name, value in (made | changes).items() if value is not None}

    def clean(self) -> None:
        self.node.ssh(f"rm -rf {OVERLAYS}")


def requirements(release: Release, names: tuple[str, ...], python: str) -> str:
    """The lines of a release's lock for these distributions, hashes and all."""
    lock = read_file(release.lock)
    locked = distributions(lock, python)
    lines = lock.decode().replace("\\\n", " ").splitlines()
    chosen = [line for line in lines if line.split("==")[0].strip() in names and "==" in line]
    assert {line.split("==")[0].strip() for line in chosen} == set(names) <= set(locked)
    return "\n".join(chosen) + "\n"


def release_named(name: str) -> Release:
    return RELEASES[name]


def options_of(vector: tuple[str, ...]) -> Mapping[str, str | bool]:
    """An argument vector as option -> value; True for a bare flag."""
    found: dict[str, str | bool] = {}
    for at, word in enumerate(vector):
        if word.startswith("--"):
            following = vector[at + 1] if at + 1 < len(vector) else "--"
            found[word] = True if following.startswith("--") else following
    return found
