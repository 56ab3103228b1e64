"""What python_release does to a host."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit import files, units
from kit.command import host
from kit.program import act_command
from kit.refusal import Refusal
from kit.role import operation
from kit.watch_on_host import working
from node.problems import Problem
from roles.python_release.facts import CurrentFacts, ReleaseFacts

_HERE = Path(__file__).parent


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def reasons_to_build(found: Mapping[str, Any], digest: str, lock: str, distributions: Mapping[str, str]) -> list[str]:
    """Why a release is not whole; [] if it is. found: what the probe found."""
    receipt = found["receipt"]
    if receipt is None:
        return ["half built" if found["there"] else "not built"]
    if not found["there"]:
        return ["its folder is gone"]
    reasons = []
    if receipt.get("digest") != digest or receipt.get("lock_sha256") != hashlib.sha256(lock.encode()).hexdigest():
        reasons.append("its receipt is of something else")
    installed = {}
    for folder in found["installed"]:
        name, _, version = folder.removesuffix(".dist-info").rpartition("-")
        installed[_normal(name)] = version
    for name in sorted({*installed, *distributions}):
        # A folder's version may be spelt otherwise than the lock's (a local part with _ for -), so both are made alike.
        here, wanted = installed.get(name), distributions.get(name)
        if here is None or wanted is None or _normal(here) != _normal(wanted):
            reasons.append(f"{name} {here or 'missing'}, wanted {wanted or 'nothing'}")
    return reasons


@operation("Build the release")
def build(
    request: Mapping[str, Any], request_file: str, unit_file: str, unit_text: str, unit: str, release_digest: str
) -> Generator[Any, Any, Any]:
    """Build a release in place by a unit of the host, unless it is whole; wait for it.

    + request: what files/tools/release_builder.py is asked for, and where `request_file` lies.
    + unit_file, unit_text: the template of the unit. unit: its instance for this release.
    + release_digest: the name of the release's folder.
    """
    wanted = [
        files.File(unit_file, unit_text),
        files.File(request_file, json.dumps(request, indent=1, sort_keys=True) + "\n"),
    ]
    found = ReleaseFacts.read(
        environment=request["environment"],
        site_packages=request["site_packages"],
        receipt=request["receipts"][0],
        paths=[item.path for item in wanted],
        unit=unit,
    )
    reasons = reasons_to_build(found, release_digest, request["lock"], request["distributions"])
    if not reasons:
        host().noop(f"release {release_digest} is whole: {len(request['distributions'])} distributions")
        return
    if not working(dict(found["unit"])):
        if not found["there"] and found["free"] < request["bytes"]:
            raise Refusal(
                Problem(
                    f"disk space at {request['environment']}",
                    f"{found['free'] / 1e9:.1f} GB free",
                    f"{request['bytes'] / 1e9:.1f} GB to build release {request['release']}",
                    "free space on that file system (df -h), then run deploy.py again",
                )
            )
        more = f" and {len(reasons) - 5} more" if len(reasons) > 5 else ""
        host().log(f"release {request['release']} ({release_digest}): {'; '.join(reasons[:5])}{more}")
        if files.compare(found["files"], wanted):
            yield from files.apply(wanted, found["files"])
        # Also where the files are as wanted: a run that was killed may have written them and not told systemd.
        yield f"systemctl daemon-reload && systemctl restart --no-block -- {unit}"
    yield from units.join(unit, f"release {request['release']}", status_file=request["status"])


@operation("Make the release current")
def make_current(
    digest: str, link: str, releases: str, receipts: Sequence[str], keep: int, belongings: Sequence[str]
) -> Generator[Any, Any, Any]:
    """Point `link` to a whole, patched release by rename, and remove what is older than the kept ones.

    + digest: the release, a folder below `releases`.
    + receipts: of its building and of its patching; without both nothing is switched. The host looks for them when it
      switches, because earlier steps of the same run write them.
    + keep: how many releases stay, the current one included. belongings: what goes with one; see switch_on_host.py.
    """
    wanted = files.Link(link, f"{releases}/{digest}")
    found = CurrentFacts.read(link=link, releases=releases)
    others = [name for name in found["releases"] if name != digest]
    if not files.compare(found["files"], [wanted]) and len(others) < keep:
        host().noop(f"{link} points to {wanted.target}")
        return
    yield act_command(
        _HERE / "switch_on_host.py",
        {
            "link": link,
            "releases": releases,
            "digest": digest,
            "receipts": list(receipts),
            "keep": keep,
            "belongings": list(belongings),
        },
        shown=(link, wanted.target),
    )
