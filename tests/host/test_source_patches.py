"""Every source patch is in where it is needed, and nowhere else, and the receipt says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kit.program import probe_command
from node.patches import decide, wanted_digest
from node.plan import Plan
from roles.source_patches.facts import PatchFacts
from roles.source_patches.operations import evidence


@pytest.fixture(scope="module")
def found(host: Any, plan: Plan) -> dict[str, Any]:
    """Digests of the files, versions of their packages, the compiler and the receipt, in one round trip."""
    arguments = {
        "site_packages": plan.site_packages,
        "packages": sorted({patch.package for patch in plan.patches}),
        "files": sorted({patch.file for patch in plan.patches}),
        "nvcc": plan.toolkit.nvcc_path,
        "built": plan.paths.receipt,
        "receipt": plan.paths.patches_receipt,
    }
    said = host.run(probe_command(PatchFacts.source(), arguments).get_raw_value())
    assert said.rc == 0, f"the host gives no answer: {said.stderr.strip()[-300:]}"
    answer = json.loads(said.stdout.splitlines()[-1])
    assert "found" in answer, f"the host cannot be looked at: {answer}"
    return dict(answer["found"])


def test_patched_files_are_exactly_the_known_ones(found: dict[str, Any], plan: Plan) -> None:
    """A file edited by hand serves something that no receipt, no test and no other node knows."""
    for patch in plan.patches:
        seen = evidence(patch, found)
        decision = decide(patch, seen)
        assert decision.action != "conflict", decision.reason
        wanted = wanted_digest(patch, str(seen.version), seen.nvcc)
        assert seen.digest == wanted, (
            f"{plan.site_packages}/{patch.file}: found sha256 {seen.digest}, wanted {wanted} (patch {patch.id}: "
            f"{decision.action}, {decision.reason}). Fix: run deploy.py again"
        )


def test_receipt_tells_what_was_done_and_why(found: dict[str, Any], plan: Plan) -> None:
    """A patch that is not needed is recorded as such with its evidence, not silently left out."""
    receipt = found["receipt"]
    assert receipt is not None, f"{plan.paths.patches_receipt}: found none, wanted one. Fix: run deploy.py again"
    assert receipt["digest"] == plan.paths.digest
    entries = {entry["id"]: entry for entry in receipt["patches"]}
    assert set(entries) == {patch.id for patch in plan.patches}
    for patch in plan.patches:
        entry, seen = entries[patch.id], evidence(patch, found)
        decision = decide(patch, seen)
        in_use = "applied or already" if decision.action == "already" else decision.action
        assert entry["action"] in in_use.split(" or "), (
            f"{plan.paths.patches_receipt}: found {patch.id} {entry['action']}, wanted {in_use}: {decision.reason}. "
            "Fix: run deploy.py again"
        )
        assert (entry["version"], entry["nvcc"], entry["sha256"]) == (seen.version, seen.nvcc, seen.digest), (
            f"{plan.paths.patches_receipt}: found the evidence of another state for {patch.id}, wanted today's. "
            "Fix: run deploy.py again"
        )
        assert entry["reason"]
