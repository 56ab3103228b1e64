"""What cuda_toolkit does to a host."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

from kit import files
from kit.command import StringCommand, host
from kit.program import act_command
from kit.refusal import refuse
from kit.role import operation
from node import toolkits
from node.plan import Plan
from node.problems import Problem
from roles.cuda_toolkit import judgement
from roles.cuda_toolkit.facts import Proof, RepositoryKey, ToolkitFacts
from roles.cuda_toolkit.judgement import Found, Work

_HERE = Path(__file__).parent
Commands = Generator[Any, Any, Any]


@operation("CUDA toolkits side by side, proved")
def stand_side_by_side(plan: Plan) -> Commands:
    """Bring the release's toolkit to its exact version beside the others, and prove each by a compiled program.

    + plan: says which repository and key, which toolkits, for which GPU architecture.

    `/usr/local/cuda` leads where it led before. Where there was none, NVIDIA's packages make it, and lead it to a
    toolkit beside where there is one, else to the release's; nothing of ours reads it.
    Toolkits beside that are in order are left alone, whatever installed them. Links across toolkits are refused.
    """
    found = ToolkitFacts.read(**judgement.questions(plan))
    refuse(judgement.refusals(found, plan))
    before = found["alternatives"]
    work = judgement.work(found, plan)
    if work:
        written: list[str] = []
        if work.trust:
            items = _trust(found, plan)
            written = [item.path for item in items if isinstance(item, files.File)]
            yield from files.apply(items)
        yield _install(work, written, judgement.source_in_use(found), plan)
        if not host().state.is_executing:
            return  # in Prepare nothing has been done, so there is nothing to look at again
        found = ToolkitFacts.read(**judgement.questions(plan))
        refuse(judgement.refusals(found, plan) + judgement.deviations(found, plan))
    quiet = not work
    pin = [files.File(toolkits.PREFERENCES, judgement.preferences_text(found, plan))]
    if files.compare(found["files"], pin):
        quiet = False
        yield from files.apply(pin, found["files"])
    if work or not judgement.is_proved(found, plan):
        quiet = False
        yield from _prove(found, plan, before)
    if quiet:
        versions = " and ".join(kit.version for kit in (plan.toolkit, *plan.toolkits_beside))
        host().noop(f"CUDA {versions}: as wanted, proved before")


def _trust(found: Found, plan: Plan) -> list[files.Item]:
    """The repository's key and source. The key is judged here, before anything of it is on the host."""
    if judgement.foreign_sources(found):
        return [files.Absent(toolkits.SOURCE_LIST)]
    source = files.File(toolkits.SOURCE_LIST, judgement.source_text(plan))
    if judgement.is_trusted(found, plan):
        return [source]
    fetched = RepositoryKey.read(address=f"{plan.repository.address}/{plan.repository.key_file}")
    if "error" in fetched and not host().state.is_executing:
        return [source]  # in Prepare an earlier role may still have to install https authorities
    key = judgement.keyring(fetched, plan)
    if isinstance(key, Problem):
        refuse(key)
        return []
    return [files.File(toolkits.KEYRING, key), source]


def _install(work: Work, written: list[str], source: str, plan: Plan) -> StringCommand:
    majors = sorted({kit.version.split(".")[0] for kit in (plan.toolkit, *plan.toolkits_beside)})
    return act_command(
        _HERE / "apt_on_host.py",
        {
            "address": plan.repository.address,
            "source": source,
            "written": written,
            "finish": list(work.finish),
            "steps": [{"packages": dict(step.packages), "reinstall": list(step.reinstall)} for step in work.steps],
            "preferences": toolkits.PREFERENCES,
            "alternatives": ["cuda", *(f"cuda-{major}" for major in majors)],
            "folder": str(Path(toolkits.ALTERNATIVE).parent),
        },
        shown=tuple(work.packages),
    )


def _prove(found: Found, plan: Plan, before: Any) -> Commands:
    """Compile with each toolkit; keep what was proved."""
    if not host().state.is_executing:
        yield StringCommand("true")  # stands for the receipt, whose content only the proof knows
        return
    proved = Proof.read(program=toolkits.PROOF, toolkits=judgement.proofs(found, plan))
    refuse(answer["problem"] for answer in proved.values() if not answer["proved"])
    receipt = judgement.receipt(found, plan, proved, before)
    yield from files.write(toolkits.RECEIPT, json.dumps(receipt, indent=1, sort_keys=True) + "\n")
