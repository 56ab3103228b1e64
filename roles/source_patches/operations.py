"""What source_patches does to a host."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.command import host
from kit.program import act_command
from kit.refusal import refuse
from kit.role import operation
from node.patches import Decision, Evidence, Patch, decide
from roles.source_patches.facts import PatchFacts

_HERE = Path(__file__).parent
_DONE = {"apply": "applied", "already": "already", "not needed": "not needed"}


def evidence(patch: Patch, found: Mapping[str, Any]) -> Evidence:
    """What the probe found about one patch."""
    return Evidence(found["versions"][patch.package], found["digests"][patch.file], found["nvcc"])


def undecided(patch: Patch, seen: Evidence, built: bool) -> bool:
    """Whether evidence is still to come: earlier steps of the same run build the release and install the compiler."""
    return not built or seen.version is None or (patch.nvcc_below is not None and seen.nvcc is None)


def record(patch: Patch, seen: Evidence, decision: Decision, former: Mapping[str, Any] | None) -> dict[str, Any]:
    """A patch's entry in the receipt. former: its entry before, whose "applied" an "already" of a later run keeps."""
    result = seen.digest
    if decision.action == "apply":
        assert seen.version is not None
        result = patch.digests[seen.version].after
    action = _DONE[decision.action]
    before = seen.digest if decision.action != "already" else None
    if decision.action == "already" and former and former.get("sha256") == result:
        action, before = former.get("action", action), former.get("sha256_before")
    return {
        "id": patch.id,
        "action": action,
        "reason": decision.reason,
        "file": patch.file,
        "package": patch.package,
        "version": seen.version,
        "nvcc": seen.nvcc,
        "sha256_before": before,
        "sha256": result,
        "retired_by": patch.retired_by,
    }


@operation("Patch the release")
def patch_release(
    patches: Sequence[Patch], digest: str, python: str, site_packages: str, nvcc: str, built: str, receipt: str
) -> Generator[Any, Any, Any]:
    """Apply what is needed to files that are known, and say in the receipt what was done to each and why.

    + patches: those that are considered for this release.
    + digest: the release. python, site_packages: of it. built: the receipt of its building.
    + nvcc: path of the compiler that the service will use: the evidence for patches that depend on it.
    + receipt: where the decisions are recorded, one a patch.

    A file that is neither the known original nor the known result refuses the host.
    """
    found = PatchFacts.read(
        site_packages=site_packages,
        packages=sorted({patch.package for patch in patches}),
        files=sorted({patch.file for patch in patches}),
        nvcc=nvcc,
        built=built,
        receipt=receipt,
    )
    former = {entry["id"]: entry for entry in (found["receipt"] or {}).get("patches", [])}
    problems, conflicts, edits, compiled, records = [], [], [], [], []
    for patch in patches:
        seen = evidence(patch, found)
        decision = decide(patch, seen)
        if undecided(patch, seen, found["built"]):
            problems.append(
                decision.reason
                if decision.action == "conflict"
                else f"{built}: found none, wanted the release built before it is patched. Fix: run deploy.py again"
            )
            continue
        if decision.action == "conflict":
            conflicts.append(decision.reason)
            continue
        records.append(record(patch, seen, decision, former.get(patch.id)))
        if patch.module and decision.action in ("apply", "already"):
            compiled.append(patch.file)
        if decision.action == "apply":
            assert seen.version is not None
            known = patch.digests[seen.version]
            edits.append(
                {
                    "id": patch.id,
                    "file": patch.file,
                    "before": known.before,
                    "after": known.after,
                    "old": patch.old,
                    "new": patch.new,
                }
            )
    refuse(conflicts)
    content = {"digest": digest, "patches": records}
    if not problems and found["receipt"] is not None:
        said = {name: value for name, value in found["receipt"].items() if name != "patched"}
        if said == content:
            host().noop("; ".join(f"{entry['id']}: {entry['action']}" for entry in records) or "no patches")
            return
    yield act_command(
        _HERE / "patch_on_host.py",
        {
            "problems": problems,
            "python": python,
            "site_packages": site_packages,
            "edits": edits,
            "compiled": compiled,
            "receipt": receipt,
            "record": content,
        },
        shown=tuple(f"{entry['id']}: {entry['action']}" for entry in records),
    )
