"""What is to be done about a host's toolkits: facts and Plan in, Problems and Work out. No host is touched."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from node import layout, toolkits
from node.plan import Plan
from node.problems import Malformed, Problem
from node.toolkits import Toolkit
from roles.cuda_toolkit import openpgp

Found = Mapping[str, Any]  # what probe.py returns
AGAIN = "deploy again"


@dataclass(frozen=True)
class Step:
    """One toolkit to install or mend. packages: name -> exact version; reinstall: those that must be unpacked anew."""

    packages: Mapping[str, str]
    reinstall: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    """What is to be done. trust: the repository's key and source; finish: packages that dpkg was interrupted in."""

    trust: bool
    finish: tuple[str, ...]
    steps: tuple[Step, ...]

    def __bool__(self) -> bool:
        return bool(self.trust or self.finish or self.steps)

    @property
    def packages(self) -> list[str]:
        """As apt names them: cuda-toolkit-13-0=13.0.2-1."""
        return [f"{name}={version}" for step in self.steps for name, version in step.packages.items()]


def questions(plan: Plan) -> dict[str, Any]:
    """The arguments of ToolkitFacts."""
    return {
        "paths": [toolkits.KEYRING, toolkits.SOURCE_LIST, toolkits.PREFERENCES, toolkits.RECEIPT, toolkits.PROOF],
        "address": plan.repository.address,
        "keyring": toolkits.KEYRING,
        "receipt": toolkits.RECEIPT,
        "toolkits": [
            {
                "version": kit.version,
                "prefix": kit.prefix,
                "suffix": kit.suffix,
                "headers": list(kit.headers),
                "libraries": list(kit.libraries),
            }
            for kit in (plan.toolkit, *plan.toolkits_beside)
        ],
    }


# --- the repository --------------------------------------------------------------------------------------------------


def keys_of(source: Mapping[str, Any]) -> list[str]:
    """Fingerprints of all keys that a source accepts; what cannot be read says so in its place."""
    named = [name for name in source["signed_by"] if not name.startswith("/") and name != "the key inside it"]
    read = []
    for key in source["keys"]:
        try:
            read += openpgp.fingerprints(openpgp.dearmour(base64.b64decode(key)))
        except Malformed as error:
            read.append(str(error))
    return [name.rstrip("!").upper() for name in named] + read


def foreign_sources(found: Found) -> list[Mapping[str, Any]]:
    """Sources for the same repository that somebody else wrote, such as the package cuda-keyring."""
    return [source for source in found["sources"] if source["file"] != toolkits.SOURCE_LIST]


def repository_problems(found: Found, plan: Plan) -> list[Problem]:
    """A second source for one repository must accept the pinned key and no other: two that differ stop all of apt."""
    problems = []
    for source in foreign_sources(found):
        keys = keys_of(source)
        accepted = "any signature (trusted=yes)" if source["trusted"] else _some(keys) or "apt's own keys"
        if source["trusted"] or keys != [plan.repository.fingerprint]:
            problems.append(
                Problem(
                    source["file"],
                    f"{plan.repository.address} signed by {accepted}",
                    f"the key {plan.repository.fingerprint} and no other",
                    f"rm {source['file']} (or apt-get purge cuda-keyring, where it is of that package), then deploy "
                    "again: a source of our own takes its place",
                )
            )
    return problems


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def source_in_use(found: Found) -> str:
    """The file whose source is used: somebody else's where there is one, because apt wants one Signed-By in all."""
    return foreign_sources(found)[0]["file"] if foreign_sources(found) else toolkits.SOURCE_LIST


def source_text(plan: Plan) -> str:
    return (
        "# Laid down by kimi-nodes. CUDA toolkits; no key but the pinned one is accepted.\n"
        f"Types: deb\nURIs: {plan.repository.address}/\nSuites: /\nSigned-By: {toolkits.KEYRING}\n"
    )


def is_trusted(found: Found, plan: Plan) -> bool:
    """Whether the keyring of ours holds the pinned key and no other."""
    if found["keyring"] is None:
        return False
    try:
        return openpgp.fingerprints(base64.b64decode(found["keyring"])) == [plan.repository.fingerprint]
    except Malformed:
        return False


def keyring(fetched: Mapping[str, str], plan: Plan) -> bytes | Problem:
    """The fetched key without its armour, or why it is not to be trusted."""
    repository = plan.repository
    address = f"{repository.address}/{repository.key_file}"
    if "error" in fetched:
        return Problem(
            f"key of NVIDIA's repository, {address}",
            fetched["error"],
            "the key, fetched by this host",
            f"see that this host reaches it: {'/usr/lib/apt/apt-helper download-file'} {address} /tmp/key",
        )
    try:
        packets = openpgp.dearmour(base64.b64decode(fetched["key"]))
        prints = openpgp.fingerprints(packets)
    except Malformed as error:
        return error.problem("an OpenPGP public key", f"look at {address}: a proxy may answer in its place")
    if prints != [repository.fingerprint]:
        return Problem(
            f"key of NVIDIA's repository, {address}",
            f"fingerprint {', '.join(prints)}",
            f"{repository.fingerprint} and no other; the key was not installed",
            "ask whoever runs the repository why the key changed; for a mirror signed by a key of its own set "
            "cuda_repository_fingerprint in the inventory",
        )
    return packets


# --- toolkits --------------------------------------------------------------------------------------------------------


def refusals(found: Found, plan: Plan) -> list[Problem]:
    """What is not ours to change: these hosts are refused before anything is done."""
    return [*link_problems(found), *unowned_problems(found, plan), *repository_problems(found, plan)]


def link_problems(found: Found) -> list[Problem]:
    """A toolkit with another one's header compiles today and miscompiles after the next upgrade of either."""
    problems = []
    for link in found["links"]:
        remedy = f" && apt-get install --reinstall {link['package']}" if link["package"] else ", then deploy again"
        problems.append(
            Problem(
                link["path"],
                f"a link into another toolkit, {link['target']}",
                "every file of a toolkit to be its own",
                f"rm {link['path']}{remedy}",
            )
        )
    return problems


def unowned_problems(found: Found, plan: Plan) -> list[Problem]:
    """Files of a .run installer, or copied by hand, where apt would install a toolkit: it would write over them."""
    problems = []
    for kit in (plan.toolkit, *plan.toolkits_beside):
        state = found["toolkits"][kit.version]
        paths = state["unowned"]
        if paths and (kit is plan.toolkit or not is_usable(state, kit)):
            problems.append(
                Problem(
                    f"CUDA toolkit {kit.version}",
                    f"{_some(paths)} of no package (a .run installer, or copied there)",
                    f"{kit.prefix} of the package {kit.package}",
                    f"{kit.prefix}/bin/cuda-uninstaller where there is one, else mv {kit.prefix} {kit.prefix}.before, "
                    f"then {AGAIN}",
                )
            )
    return problems


def is_usable(state: Mapping[str, Any], kit: Toolkit) -> bool:
    """Whether the files are there and are their packages' own."""
    return state["nvcc"] == kit.nvcc and not (
        state["headers"] or state["libraries"] or state["missing"] or state["changed"]
    )


def work(found: Found, plan: Plan) -> Work:
    """What brings the host to the plan; all empty where it is there.

    The release's toolkit comes last: /usr/local/cuda is then that of one beside, where both are new on the host.
    """
    steps = []
    for kit in (*plan.toolkits_beside, plan.toolkit):
        state = found["toolkits"][kit.version]
        installed = {name: entry["version"] for name, entry in found["packages"].items() if entry["installed"]}
        exact = installed.get(kit.package) == kit.apt_version
        if is_usable(state, kit) and (exact or kit is not plan.toolkit):
            continue  # a toolkit beside is its owner's: in order is enough, whatever its exact version
        version = kit.apt_version if kit is plan.toolkit else installed.get(kit.package, kit.apt_version)
        again = tuple(sorted({*state["missing"], *state["changed"]}))
        steps.append(Step({kit.package: version} | {name: state["packages"][name] for name in again}, again))
    return Work(trust=not is_in_place(found, plan), finish=tuple(found["unfinished"]), steps=tuple(steps))


def is_in_place(found: Found, plan: Plan) -> bool:
    """Whether apt knows the repository, by our source or by somebody else's, and not by both."""
    ours = any(source["file"] == toolkits.SOURCE_LIST for source in found["sources"])
    if foreign_sources(found):
        return found["files"][toolkits.SOURCE_LIST] is None
    return ours and is_trusted(found, plan)


def deviations(found: Found, plan: Plan) -> list[Problem]:
    """Everything that is not as planned, links aside: what is left after the work, and what the verify suite names."""
    problems = []
    for kit in (plan.toolkit, *plan.toolkits_beside):
        problems += toolkit_deviations(found, kit, exact=kit is plan.toolkit)
    return problems


def toolkit_deviations(found: Found, kit: Toolkit, exact: bool) -> list[Problem]:
    """exact: whether the metapackage must have the plan's very version."""
    state, package = found["toolkits"][kit.version], f"{kit.package}={kit.apt_version}"
    entry = found["packages"].get(kit.package)
    installed = entry["version"] if entry and entry["installed"] else None
    install = f"apt-get install {package}, or {AGAIN}"
    problems = []
    if state["nvcc"] != kit.nvcc:
        release = f"release {state['nvcc']}" if state["nvcc"] else "no nvcc that says its release"
        problems.append(Problem(kit.nvcc_path, release, f"release {kit.nvcc}", install))
    for path in (*state["headers"], *state["libraries"]):
        owner = next((name for name, paths in state["missing"].items() if path in paths), None)
        fix = f"apt-get install --reinstall {owner}, or {AGAIN}" if owner else install
        problems.append(Problem(f"CUDA toolkit {kit.version}", f"no {path}", "it, readable", fix))
    for name, paths in state["missing"].items():
        problems.append(
            Problem(
                f"package {name}",
                f"installed, but without its {', '.join(paths)}",
                "all of its files",
                f"apt-get install --reinstall {name}={state['packages'][name]}, or {AGAIN}",
            )
        )
    for name, paths in state["changed"].items():
        problems.append(
            Problem(
                f"package {name}",
                f"other content in {', '.join(paths)}",
                "its own (md5sums of the package)",
                f"apt-get install --reinstall {name}={state['packages'][name]}, or {AGAIN}",
            )
        )
    if exact and installed != kit.apt_version:
        problems.append(Problem(f"package {kit.package}", installed or "not installed", kit.apt_version, install))
    return problems


# --- what is kept ----------------------------------------------------------------------------------------------------


def preferences_text(found: Found, plan: Plan) -> str:
    """apt preferences that keep the release's toolkit at the versions that were proved.

    The metapackage is exact, but what it depends on is only bounded from below, so that `apt-get upgrade` would move
    nvcc by itself. 990 is above NVIDIA's own 600 and below 1000: apt never downgrades because of it, and removing this
    file gives everything back. Other toolkits are their owners' and are not named here.
    """
    kit = plan.toolkit
    reason = f"Explanation: laid down by kimi-nodes: CUDA {kit.version} stays as proved; remove this file to free it\n"
    pins = {**found["toolkits"][kit.version]["packages"], kit.package: kit.apt_version}
    stanzas = [f"Package: {name}\nPin: version {version}\nPin-Priority: 990" for name, version in sorted(pins.items())]
    return reason + "\n\n".join(stanzas) + "\n"


def proofs(found: Found, plan: Plan) -> list[dict[str, Any]]:
    """What files/tools/toolkit_proof.py is asked, once a toolkit.

    The release's toolkit must compile for the node's own GPU architecture with its own nvcc. Another may be proved by
    the host's compiler where its packages hold no device compiler at all (the lab's stand-in for 12.8).
    """
    asked = []
    for kit in (plan.toolkit, *plan.toolkits_beside):
        own = kit is plan.toolkit
        architectures = plan.service.architectures if own else ()
        asked.append(
            {
                "version": kit.version,
                "prefix": kit.prefix,
                "includes": list(kit.compiles_with),
                "architecture": architectures[0] if architectures else None,
                "needs_nvcc": own or found["toolkits"][kit.version]["device_compiler"],
                "scratch": layout.CACHE,
            }
        )
    return asked


def evidence(found: Found, plan: Plan) -> dict[str, Any]:
    """What a proof depends on: it holds as long as this is the same."""
    proof = found["files"][toolkits.PROOF]
    return {
        "asked": proofs(found, plan),
        "host": dict(found["host"]),
        "program": proof["sha256"] if proof else None,
        "toolkits": {
            version: {"packages": state["packages"], "files": state["files"]}
            for version, state in found["toolkits"].items()
        },
    }


def is_proved(found: Found, plan: Plan) -> bool:
    receipt = found["receipt"] or {}
    return bool(receipt.get("evidence") == evidence(found, plan))


def receipt(found: Found, plan: Plan, proved: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What was done and proved. before: the alternatives as they were before this run installed anything."""
    return {
        "toolkits": {version: dict(proved[version]) for version in sorted(proved)},
        "repository": {**asdict(plan.repository), "source": source_in_use(found)},
        "alternatives": {"before": dict(before), "after": dict(found["alternatives"])},
        "evidence": evidence(found, plan),
        "seals": {path: seal for state in found["toolkits"].values() for path, seal in state["seals"].items()},
    }
