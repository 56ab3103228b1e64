"""cuda_toolkit: what is in order costs one look, what is not is mended, and nothing that is somebody's is touched."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kit import files, testing
from node import toolkits
from node.manifest import File, Manifest
from node.models import MODELS
from node.plan import Plan, make
from node.render import read_file
from node.systems import SYSTEMS
from roles.cuda_toolkit import judgement, openpgp
from roles.cuda_toolkit.facts import Proof, RepositoryKey, ToolkitFacts
from roles.cuda_toolkit.operations import stand_side_by_side


def packets(seed: int) -> bytes:
    """One public key packet of version 4: it has a fingerprint, which is all that is looked at."""
    body = b"\x04" + seed.to_bytes(4, "big") + b"\x01" + b"\x00\x08\xff" + b"\x00\x02\x03"
    return b"\xc6" + bytes([len(body)]) + body


KEY, OTHER_KEY = packets(1), packets(2)
FINGERPRINT = openpgp.fingerprints(KEY)[0]


def encoded(key: bytes) -> str:
    return base64.b64encode(key).decode()


def planned(**data: Any) -> Plan:
    model = MODELS["kimi-k2.6"]
    manifest = Manifest(model.repository, model.revision or "e" * 40, (File("config.json", 10, "a" * 64),)).dumps()

    def read(path: str) -> bytes:
        return manifest.encode() if path.startswith("files/manifests/") else read_file(path)

    made = make(
        "gpu-1",
        {
            "gpu": "rtx-pro-6000-blackwell-server",
            "gpu_count": 8,
            "weights_directory": "/srv/weights",
            "toolkits_beside": ["12.8"],
            "cuda_repository_fingerprint": FINGERPRINT,
            **data,
        },
        read,
        None,
        SYSTEMS[0].as_system(),
    )
    assert isinstance(made, Plan), made
    return made


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def whole(kit: toolkits.Toolkit) -> dict[str, Any]:
    """The state of a toolkit in order."""
    names = {kit.package: kit.apt_version, f"libcurand-dev-{kit.suffix}": "10.4.0.35-1"}
    return {
        "nvcc": kit.nvcc,
        "headers": [],
        "libraries": [],
        "missing": {},
        "changed": {},
        "unowned": [],
        "device_compiler": True,
        "files": {kit.nvcc_path: "0" * 32},
        "seals": {kit.nvcc_path: [1, 2, "0" * 32]},
        "packages": names,
    }


def absent(kit: toolkits.Toolkit) -> dict[str, Any]:
    """The state of a toolkit that is not there."""
    return {
        **whole(kit),
        "nvcc": None,
        "headers": [f"{kit.prefix}/include/{name}" for name in kit.headers],
        "libraries": [f"{kit.prefix}/lib64/{name}" for name in kit.libraries],
        "device_compiler": False,
        "files": {},
        "seals": {},
        "packages": {},
    }


def packages_of(states: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {"version": version, "installed": True}
        for state in states.values()
        for name, version in state["packages"].items()
    }


def source(**changes: Any) -> dict[str, Any]:
    return {
        "file": toolkits.SOURCE_LIST,
        "trusted": False,
        "signed_by": [toolkits.KEYRING],
        "keys": [encoded(KEY)],
        **changes,
    }


def settled(plan: Plan) -> dict[str, Any]:
    """A host on which everything is as planned and proved."""
    states = {kit.version: whole(kit) for kit in (plan.toolkit, *plan.toolkits_beside)}
    link = {"target": "/usr/local/cuda-12.8", "mode": "manual"}
    found: dict[str, Any] = {
        "files": {
            toolkits.KEYRING: testing.file(KEY),
            toolkits.SOURCE_LIST: testing.file(judgement.source_text(plan)),
            toolkits.PREFERENCES: None,
            toolkits.RECEIPT: testing.file("{}"),
            toolkits.PROOF: testing.file("proof", mode="755"),
        },
        "keyring": encoded(KEY),
        "sources": [source()],
        "packages": packages_of(states),
        "unfinished": [],
        "toolkits": states,
        "links": [],
        "alternatives": {"cuda": link, "cuda-12": link, "cuda-13": link},
        "receipt": None,
        "host": {"compiler": "12.2.0", "libc": "glibc 2.36"},
    }
    found["files"][toolkits.PREFERENCES] = testing.file(judgement.preferences_text(found, plan))
    # Through JSON, as it comes back from the host.
    found["receipt"] = json.loads(json.dumps(judgement.receipt(found, plan, {}, found["alternatives"])))
    return found


def bare(plan: Plan) -> dict[str, Any]:
    """A host with nothing of it."""
    found = settled(plan)
    found["files"] = {**dict.fromkeys(found["files"]), toolkits.PROOF: found["files"][toolkits.PROOF]}
    found["toolkits"] = {kit.version: absent(kit) for kit in (plan.toolkit, *plan.toolkits_beside)}
    nowhere = {"target": None, "mode": None}
    found.update(
        keyring=None, sources=[], packages={}, receipt=None, alternatives=dict.fromkeys(found["alternatives"], nowhere)
    )
    return found


def proved(program: str, toolkits: list[dict[str, Any]]) -> dict[str, Any]:
    return {asked["version"]: {"proved": True, "version": asked["version"], "nvcc": "x"} for asked in toolkits}


def run(plan: Plan, *looks: dict[str, Any], key: dict[str, str] | None = None, proof: Any = proved) -> testing.Result:
    """The operation against what the host says at each look."""
    answers: Iterator[dict[str, Any]] = iter(looks)
    facts: dict[Any, Any] = {ToolkitFacts: lambda **asked: next(answers), Proof: proof}
    if key is not None:
        facts[RepositoryKey] = key
    return testing.prepare(stand_side_by_side, {"plan": plan}, facts=facts)


def test_a_host_in_order_costs_one_look_and_no_command(plan: Plan) -> None:
    result = run(plan, settled(plan))
    assert result.commands == [] and result.refused == []
    assert result.noop == ["CUDA 13.0 and 12.8: as wanted, proved before"]


def test_a_bare_host_gets_key_source_both_toolkits_pins_and_a_receipt(plan: Plan) -> None:
    after = settled(plan)
    after["receipt"] = after["files"][toolkits.PREFERENCES] = after["files"][toolkits.RECEIPT] = None
    result = run(plan, bare(plan), after, key={"key": encoded(KEY)})
    assert result.refused == []
    assert result.files[toolkits.KEYRING].data == KEY
    assert f"Signed-By: {toolkits.KEYRING}" in result.files[toolkits.SOURCE_LIST].content
    install = result.commands[1]
    assert install.endswith("cuda-toolkit-12-8=12.8.1-1 cuda-toolkit-13-0=13.0.2-1"), install[-80:]
    assert "Package: libcurand-dev-13-0\nPin: version 10.4.0.35-1\n" in result.files[toolkits.PREFERENCES].content
    receipt = json.loads(result.files[toolkits.RECEIPT].content)
    assert set(receipt["toolkits"]) == {"13.0", "12.8"}
    assert receipt["alternatives"]["before"]["cuda"]["target"] is None
    assert receipt["alternatives"]["after"]["cuda"]["target"] == "/usr/local/cuda-12.8"


def test_what_was_proved_is_proved_again_when_anything_under_it_changed(plan: Plan) -> None:
    changes: dict[str, Any] = {
        "the host compiler": lambda found: found["host"].update(compiler="13.3.0"),
        "a package": lambda found: found["toolkits"]["13.0"]["packages"].update({"libcurand-dev-13-0": "10.4.1-1"}),
        "a compiler": lambda found: found["toolkits"]["13.0"]["files"].update({plan.toolkit.nvcc_path: "1" * 32}),
        "the proof itself": lambda found: found["files"].update({toolkits.PROOF: testing.file("other")}),
    }
    for what, change in changes.items():
        found = settled(plan)
        change(found)
        result = run(plan, found)
        assert toolkits.RECEIPT in result.files, what


def test_whatever_was_mended_is_proved_again(plan: Plan) -> None:
    """The old receipt's seals are of the files of before: with them every later run would read all files again."""
    found = settled(plan)
    found["toolkits"]["13.0"]["missing"] = {"libcurand-dev-13-0": ["/usr/local/cuda-13.0/include/curand.h"]}
    assert toolkits.RECEIPT in run(plan, found, settled(plan)).files


def test_a_proof_that_fails_refuses_the_host_and_leaves_no_receipt(plan: Plan) -> None:
    found = settled(plan)
    found["receipt"] = None

    def unproved(program: str, toolkits: list[dict[str, Any]]) -> dict[str, Any]:
        return {**proved(program, toolkits), "13.0": {"proved": False, "problem": "found a, wanted b. Fix: c"}}

    result = run(plan, found, proof=unproved)
    assert result.refused == ["found a, wanted b. Fix: c"]
    assert toolkits.RECEIPT not in result.files


@pytest.mark.parametrize(
    ("fetched", "said"),
    [
        ({"key": encoded(OTHER_KEY)}, f"found fingerprint {openpgp.fingerprints(OTHER_KEY)[0]}, wanted {FINGERPRINT}"),
        ({"key": encoded(KEY + OTHER_KEY)}, "and no other"),
        ({"key": encoded(b"<html>log in first</html>")}, "no public key block"),
        ({"error": "Could not resolve host"}, "Could not resolve host"),
    ],
)
def test_no_key_but_the_pinned_one_gets_onto_the_host(plan: Plan, fetched: dict[str, str], said: str) -> None:
    result = run(plan, bare(plan), key=fetched)
    (refused,) = result.refused
    assert said in refused and "Fix: " in refused
    assert result.commands == [] and result.files == {}


def test_a_keyring_with_a_second_key_is_replaced(plan: Plan) -> None:
    found = settled(plan)
    found["keyring"] = encoded(KEY + OTHER_KEY)
    result = run(plan, found, settled(plan), key={"key": encoded(KEY)})
    assert result.files[toolkits.KEYRING].data == KEY


def test_somebody_elses_source_with_the_same_key_is_used_and_ours_goes(plan: Plan) -> None:
    """apt stops altogether when two sources of one repository differ in Signed-By."""
    found = settled(plan)
    theirs = source(file="/etc/apt/sources.list.d/cuda-debian12-x86_64.list", signed_by=["/usr/share/keyrings/x.gpg"])
    found["sources"] = [theirs, source()]
    after = copy.deepcopy(found)
    after["sources"], after["files"][toolkits.SOURCE_LIST] = [theirs], None
    result = run(plan, found, after)
    assert isinstance(result.files[toolkits.SOURCE_LIST], files.Absent)
    again = run(plan, after)
    assert again.refused == [] and again.commands == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"keys": [encoded(KEY + OTHER_KEY)]}, "signed by"),
        ({"signed_by": [], "keys": []}, "apt's own keys"),
        ({"trusted": True}, "trusted=yes"),
        ({"keys": [""]}, "wanted the key"),
    ],
)
def test_somebody_elses_source_that_accepts_more_is_refused(plan: Plan, changes: dict[str, Any], said: str) -> None:
    found = settled(plan)
    found["sources"] = [source(file="/etc/apt/sources.list.d/cuda.list", **changes)]
    (refused,) = run(plan, found).refused
    assert said in refused and refused.startswith("/etc/apt/sources.list.d/cuda.list: ") and "Fix: rm " in refused


def test_a_link_across_toolkits_is_refused_by_name_before_anything_is_done(plan: Plan) -> None:
    found = bare(plan)
    path, target = "/usr/local/cuda-13.0/include/curand.h", "/usr/local/cuda-12.8/include/curand.h"
    found["links"] = [
        {"path": path, "target": target, "package": "libcurand-dev-13-0"},
        {"path": "/usr/local/cuda-13.0", "target": "/usr/local/cuda-12.8", "package": None},
    ]
    result = run(plan, found)
    assert result.commands == [] and len(result.refused) == 2
    assert path in result.refused[0] and target in result.refused[0]
    assert f"Fix: rm {path} && apt-get install --reinstall libcurand-dev-13-0" in result.refused[0]
    assert "Fix: rm /usr/local/cuda-13.0, then deploy again" in result.refused[1]


def test_a_toolkit_that_no_package_brought_is_not_written_over(plan: Plan) -> None:
    found = bare(plan)
    found["toolkits"]["13.0"]["unowned"] = [plan.toolkit.nvcc_path]
    (refused,) = run(plan, found).refused
    assert plan.toolkit.nvcc_path in refused and "Fix: /usr/local/cuda-13.0/bin/cuda-uninstaller" in refused


def test_a_toolkit_beside_that_works_is_left_alone_whatever_brought_it(plan: Plan) -> None:
    found = settled(plan)
    state = found["toolkits"]["12.8"]
    state.update(packages={}, unowned=["/usr/local/cuda-12.8/bin/nvcc"])
    found["packages"] = packages_of(found["toolkits"])
    assert judgement.refusals(found, plan) == []
    assert not judgement.work(found, plan)
    state["packages"] = {"cuda-toolkit-12-8": "12.8.0-1"}
    found["packages"] = packages_of(found["toolkits"])
    assert not judgement.work(found, plan), "an older 12.8 is its owner's choice"


def test_the_releases_toolkit_must_have_its_very_version(plan: Plan) -> None:
    found = settled(plan)
    found["packages"][plan.toolkit.package]["version"] = "13.0.1-1"
    assert judgement.work(found, plan).packages == ["cuda-toolkit-13-0=13.0.2-1"]
    found["packages"][plan.toolkit.package] = {"version": "13.0.2-1", "installed": False}
    assert judgement.work(found, plan).packages == ["cuda-toolkit-13-0=13.0.2-1"]


def test_missing_and_changed_files_are_unpacked_anew_at_the_version_that_is_there(plan: Plan) -> None:
    found = settled(plan)
    header = "/usr/local/cuda-13.0/targets/x86_64-linux/include/curand.h"
    for kind in ("missing", "changed"):
        state = found["toolkits"]["13.0"]
        state.update(missing={}, changed={})
        state[kind] = {"libcurand-dev-13-0": [header]}
        (step,) = judgement.work(found, plan).steps
        assert step.reinstall == ("libcurand-dev-13-0",)
        assert step.packages["libcurand-dev-13-0"] == "10.4.0.35-1"
        (problem,) = judgement.deviations(found, plan)
        assert header in str(problem) and "Fix: apt-get install --reinstall libcurand-dev-13-0" in str(problem)


def test_a_removed_package_is_told_by_the_header_that_is_missing(plan: Plan) -> None:
    found = settled(plan)
    header = "/usr/local/cuda-13.0/include/curand.h"
    found["toolkits"]["13.0"]["headers"] = [header]
    del found["packages"][plan.toolkit.package]
    told = [str(problem) for problem in judgement.deviations(found, plan)]
    assert any(f"no {header}" in line and "Fix: apt-get install cuda-toolkit-13-0=13.0.2-1" in line for line in told)
    assert judgement.work(found, plan).packages == ["cuda-toolkit-13-0=13.0.2-1"]


def test_what_is_still_wrong_after_the_work_refuses_the_host(plan: Plan) -> None:
    found = settled(plan)
    found["toolkits"]["13.0"]["headers"] = ["/usr/local/cuda-13.0/include/curand.h"]
    result = run(plan, found, found)
    assert len(result.commands) == 1 and any("curand.h" in line for line in result.refused)


def test_an_interrupted_dpkg_is_finished_though_all_else_is_in_order(plan: Plan) -> None:
    found = settled(plan)
    found["unfinished"] = ["libcurand-dev-13-0"]
    install, receipt = run(plan, found, settled(plan)).commands
    assert "python3" in install and receipt == f"files: {toolkits.RECEIPT}"


def test_only_the_releases_toolkit_must_have_a_device_compiler(plan: Plan) -> None:
    """The lab's 12.8 has none; the release's toolkit without one would be proved by a compiler that is not its own."""
    found = settled(plan)
    for state in found["toolkits"].values():
        state["device_compiler"] = False
    asked = {each["version"]: each for each in judgement.proofs(found, plan)}
    assert asked["13.0"]["needs_nvcc"] is True and asked["12.8"]["needs_nvcc"] is False
    assert asked["13.0"]["architecture"] == "12.0f" and asked["12.8"]["architecture"] is None


def test_pins_name_every_package_of_the_releases_toolkit_and_no_other(plan: Plan) -> None:
    text = judgement.preferences_text(settled(plan), plan)
    assert "12-8" not in text
    stanzas = text.strip().split("\n\n")
    assert [line.split("\n")[-3:] for line in stanzas] == [
        [f"Package: {name}", f"Pin: version {version}", "Pin-Priority: 990"]
        for name, version in (("cuda-toolkit-13-0", "13.0.2-1"), ("libcurand-dev-13-0", "10.4.0.35-1"))
    ]
