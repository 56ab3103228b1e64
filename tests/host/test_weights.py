"""The weights on the host are the manifest's, every byte of them, and nothing else."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from node import layout
from node.plan import Plan
from roles.weights.operations import is_limited

# Above this a full hash takes minutes: the receipts, made when every byte was hashed, stand for it then.
DEEP_UP_TO = 10**9  # bytes

COLLECT = """
import json, os, pwd, stat, subprocess, sys
asked = json.load(sys.stdin)
def seen(path):
    try: found = os.lstat(path)
    except OSError: return None
    return {"mode": stat.S_IMODE(found.st_mode), "user": pwd.getpwuid(found.st_uid).pw_name}
def text(path):
    try: return open(path, encoding="utf-8").read()
    except OSError: return None
answer = {"manifests": {p: text(p) for p in asked["manifests"]}, "receipts": {p: text(p) for p in asked["receipts"]},
          "configurations": {p: text(p) for p in asked["configurations"]},
          "units": {p: text(p) for p in asked["units"]}, "key_files": {}, "staging": {}, "snapshots": {}}
def said(*command):
    try: return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired): return ""
answer["sharer"] = said("systemctl", "show", "-p", "ActiveState", "-p", "UnitFileState", asked["sharer"]).split()
answer["table"] = said("/usr/sbin/nft", "list", "table", *asked["table"].split())
answer["listening"] = said("ss", "-Hltn")
for folder, folders, files in os.walk(asked["keys"]):
    answer["key_files"].update({os.path.join(folder, name): seen(os.path.join(folder, name)) for name in files})
answer["keys"] = seen(asked["keys"])
for path in asked["staging"]:
    try: answer["staging"][path] = sorted(n for n in os.listdir(path) if not n.endswith(".lock"))
    except OSError as error: answer["staging"][path] = [error.strerror]
for path in asked["snapshots"]:
    answer["snapshots"][path] = {os.path.relpath(os.path.join(f, n), path): seen(os.path.join(f, n))
                                 for f, _, names in os.walk(path) for n in names}
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def verified(host: Any, plan: Plan) -> dict[str, dict[str, Any]]:
    """Snapshot -> what the agent on the host finds: by hashing where that takes seconds, else by receipts."""
    answers = {}
    for deep in (True, False):
        paths = [w.paths.configuration for w in plan.weights if (w.manifest.bytes <= DEEP_UP_TO) is deep]
        if not paths:
            continue
        options = "--json --deep" if deep else "--json"
        done = host.run(
            f"/usr/bin/python3 -sE {layout.WEIGHTS_AGENT} verify {options} {' '.join(map(shlex.quote, paths))}"
        )
        assert done.rc in (0, 65), f"the weights agent cannot verify: {done.stderr.strip()}. Fix: run deploy.py"
        answers.update({answer["snapshot"]: answer for answer in json.loads(done.stdout)["weights"]})
    return answers


@pytest.fixture(scope="module")
def collected(host: Any, plan: Plan) -> dict[str, Any]:
    """Files of the role on the host, in one command."""
    paths = [weights.paths for weights in plan.weights]
    asked = {
        "manifests": [each.manifest for each in paths],
        "receipts": [each.receipt for each in paths],
        "configurations": [each.configuration for each in paths],
        "units": [f"{layout.UNITS}/{each.unit}" for each in paths],
        "staging": [each.staging.rpartition("/")[0] for each in paths],
        "snapshots": [each.snapshot for each in paths],
        "keys": layout.KEYS,
        "sharer": layout.SHARING_UNIT,
        "table": layout.SHARING_TABLE,
    }
    done = host.run(f"printf %s {shlex.quote(json.dumps(asked))} | python3 -c {shlex.quote(COLLECT)}")
    assert done.rc == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_snapshots_are_whole(plan: Plan, verified: dict[str, dict[str, Any]]) -> None:
    """A flipped byte in a shard serves wrong answers for months; a missing shard is loaded as whatever memory held."""
    for weights in plan.weights:
        answer = verified[weights.paths.snapshot]
        wrong = [f"{path}: {how}" for path, how in sorted(answer["damaged"].items())]
        wrong += [f"{path}: is not in the manifest, wanted nothing there" for path in answer["strangers"]]
        assert answer["state"] == "whole", (
            f"{weights.paths.snapshot}: found it {answer['state']}, wanted it whole. "
            + "; ".join(wrong)
            + ". Fix: run deploy.py, which fetches only what is wrong"
        )


def test_receipts_prove_every_file_of_the_manifest(plan: Plan, collected: dict[str, Any]) -> None:
    """A no-change deploy believes the receipt: it must name each file of this manifest by its digest."""
    for weights in plan.weights:
        text = collected["receipts"][weights.paths.receipt]
        assert text is not None, f"{weights.paths.receipt}: found nothing, wanted the receipt. Fix: run deploy.py"
        receipt = json.loads(text)
        wanted = {
            f.path: f"sha256:{f.sha256}" if f.sha256 else f"git-sha1:{f.git_sha1}" for f in weights.manifest.files
        }
        found = {path: entry["digest"] for path, entry in receipt["files"].items()}
        assert (receipt["manifest_sha256"], found) == (weights.manifest.sha256, wanted), (
            f"{weights.paths.receipt}: found another manifest's, wanted {weights.manifest.repository} at "
            f"{weights.manifest.revision}. Fix: run deploy.py"
        )


def test_manifests_on_the_host_are_the_reviewed_ones(plan: Plan, collected: dict[str, Any]) -> None:
    """After a reboot the node trusts its own copy: an edited one would make other weights right."""
    for weights in plan.weights:
        assert collected["manifests"][weights.paths.manifest] == weights.manifest.dumps(), (
            f"{weights.paths.manifest}: found other text, wanted the manifest of {weights.manifest.repository}. "
            "Fix: run deploy.py"
        )


def test_nothing_is_left_in_staging(plan: Plan, collected: dict[str, Any]) -> None:
    """Half-fetched shards of dead runs have filled disks."""
    for path, names in collected["staging"].items():
        assert names == [], f"{path}: found {', '.join(names)}, wanted nothing. Fix: weights_agent.py gc --delete"


def test_the_server_can_read_the_weights_and_not_write_them(plan: Plan, collected: dict[str, Any]) -> None:
    """The model's own code runs in the server: what could change the weights could change what is served after it."""
    for path, files in collected["snapshots"].items():
        assert files, f"{path}: found nothing, wanted the snapshot. Fix: run deploy.py"
        wrong = [
            f"{name} ({found['user']}, {found['mode']:o})"
            for name, found in files.items()
            if found["user"] == layout.SERVICE_USER or found["mode"] & 0o022 or not found["mode"] & 0o004
        ]
        assert not wrong, (
            f"{path}: found {', '.join(wrong)}, wanted files that all may read and none write. Fix: run deploy.py"
        )


def test_no_key_is_readable_by_others(plan: Plan, collected: dict[str, Any]) -> None:
    """A hub token opens every repository that its owner may read."""
    assert collected["keys"] is not None, f"{layout.KEYS}: found nothing, wanted the folder. Fix: run deploy.py"
    assert collected["keys"]["mode"] & 0o077 == 0, (
        f"{layout.KEYS}: found mode {collected['keys']['mode']:o}, wanted 700"
    )
    with_token = any(weights.hub_token_file for weights in plan.weights)
    assert (layout.HUB_TOKEN in collected["key_files"]) is with_token, (
        f"{layout.HUB_TOKEN}: {'missing' if with_token else 'there, and the inventory names none'}. Fix: run deploy.py"
    )
    if with_token:
        found = collected["key_files"][layout.HUB_TOKEN]
        assert found == {"mode": 0o600, "user": "root"}, (
            f"{layout.HUB_TOKEN}: found {found}, wanted root's own. Fix: run deploy.py"
        )


def test_the_fetch_goes_on_after_a_reboot(host: Any, plan: Plan, collected: dict[str, Any]) -> None:
    """Six hundred gigabytes take hours: a node that reboots meanwhile must not wait for an operator."""
    for weights in plan.weights:
        unit = collected["units"][f"{layout.UNITS}/{weights.paths.unit}"]
        assert unit is not None, f"{weights.paths.unit}: found no unit, wanted it. Fix: run deploy.py"
        assert "User=" + layout.WEIGHTS_USER in unit.splitlines(), f"{weights.paths.unit}: runs as another user"
        enabled = host.run(f"systemctl is-enabled -- {shlex.quote(weights.paths.unit)}").stdout.strip()
        assert enabled == "enabled", (
            f"{weights.paths.unit}: found {enabled or 'nothing'}, wanted enabled. Fix: run deploy.py"
        )
        failed = host.run(f"systemctl is-failed -- {shlex.quote(weights.paths.unit)}").stdout.strip()
        assert failed != "failed", (
            f"{weights.paths.unit}: failed. Fix: journalctl -u {weights.paths.unit}, then deploy.py"
        )


def test_nodes_share_weights_with_the_inventory_and_nobody_else(plan: Plan, collected: dict[str, Any]) -> None:
    """Without its sharer a node costs a whole copy over the uplink; without its firewall anybody may ask for pieces."""
    sharing = plan.sharing
    for path, text in collected["configurations"].items():
        told = json.loads(text)["sharing"] if text else None
        wanted = layout.SHARING if sharing else ""
        assert told == wanted, f"{path}: found sharing {told!r}, wanted {wanted!r}. Fix: run deploy.py"
    open_ports = [
        line.split()[3]
        for line in collected["listening"].splitlines()
        if int(line.split()[3].rpartition(":")[2]) in (sharing.ports if sharing else ())
    ]
    if sharing is None:
        assert "ActiveState=active" not in collected["sharer"], (
            f"{layout.SHARING_UNIT}: found it running, wanted no sharing of weights. Fix: run deploy.py"
        )
        assert not collected["table"], f"table {layout.SHARING_TABLE}: found it, wanted none. Fix: run deploy.py"
        return
    assert sorted(collected["sharer"]) == ["ActiveState=active", "UnitFileState=enabled"], (
        f"{layout.SHARING_UNIT}: found {' '.join(collected['sharer']) or 'nothing'}, wanted it active and enabled. "
        f"Fix: journalctl -u {layout.SHARING_UNIT}, then deploy.py"
    )
    own = next(member.address for member in sharing.members if member.name == sharing.name)
    peers = ", ".join(peer.address for peer in sharing.peers)
    assert is_limited(collected["table"], sharing), (
        f"table {layout.SHARING_TABLE}: found {collected['table'] or 'nothing'}, wanted it to drop what comes for "
        f"ports {sharing.ports} from anybody but {peers}. Fix: run deploy.py"
    )
    assert sorted(open_ports) == [f"{own}:{port}" for port in sharing.ports], (
        f"{layout.SHARING_UNIT}: found it listening on {open_ports}, wanted {own} with ports {sharing.ports}. "
        f"Fix: journalctl -u {layout.SHARING_UNIT}"
    )
