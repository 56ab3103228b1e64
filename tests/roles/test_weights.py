"""What the weights role does to a host, as data; and what its probe sees."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from files.tools.weights import configuration as agent_configuration
from files.tools.weights import receipt
from kit import testing
from kit.files import Absent, File
from node import layout
from node.layout import WeightsPaths
from node.manifest import File as ManifestFile
from node.manifest import Manifest
from node.plan import Weights
from node.sharing import Member, Sharing
from node.tools import Tools
from roles.weights import lay, probe
from roles.weights.facts import WeightsFacts
from roles.weights.operations import Join, begin, wait

REVISION = "b5aabbfb20227ed42becbf5541dbffd213942c58"
TOKEN = "hf_test_token_that_must_not_leak"


def weights(role: str = "model", repository: str = "moonshotai/Kimi-K2.6", **changes: Any) -> Weights:
    made = Weights(
        role=role,
        manifest=Manifest(repository, REVISION, (ManifestFile("config.json", 3, "ab" * 32),)),
        paths=WeightsPaths("/srv/models", repository, REVISION),
        hub="https://huggingface.co",
        hub_token_file=None,
        gated=False,
    )
    return replace(made, **changes)


class Plan:
    """The part of a Plan that the role reads."""

    def __init__(self, *parts: Weights) -> None:
        self.weights = parts
        self.sharing: Sharing | None = None
        self.tools = Tools(b"lock", "3.12")


def items(*parts: Weights, token: str | None = None) -> list[Any]:
    return lay.items(Plan(*parts), token)  # type: ignore[arg-type]


def found(
    parts: tuple[Weights, ...], wanted: list[Any], state: str = "whole", unit: dict[str, Any] | None = None, **more: Any
) -> dict[type, Any]:
    return {
        WeightsFacts: {
            "files": testing.as_wanted(wanted),
            "units": {
                **{each.paths.unit: unit or testing.unit("inactive", started=None) for each in parts},
                layout.SHARING_UNIT: testing.unit("inactive", "", started=None),
            },
            "table": None,
            "snapshots": {each.paths.unit: {"state": state, "damaged": {}, "strangers": []} for each in parts},
            "others": [],
            **more,
        }
    }


def run_begin(parts: tuple[Weights, ...], facts: dict[type, Any], wanted: list[Any] | None = None) -> testing.Result:
    return testing.prepare(begin, {"weights": parts, "wanted": wanted or items(*parts)}, facts)


MODEL = weights()
UNIT = MODEL.paths.unit
RESTART = f"rm -f -- {MODEL.paths.status} && systemctl restart --no-block -- {UNIT}"


def test_weights_that_are_whole_change_nothing() -> None:
    result = run_begin((MODEL,), found((MODEL,), items(MODEL)))
    assert result.commands == [] and result.refused == [] and result.noop
    result = testing.prepare(wait, {"weights": (MODEL,)}, found((MODEL,), items(MODEL)))
    assert result.commands == [] and result.noop == ["all weights are whole by their receipts"]


def test_a_bare_host_gets_everything_and_the_unit_is_started_not_waited_for() -> None:
    wanted = items(MODEL)
    facts = found((MODEL,), wanted, "absent", testing.unit("inactive", "", started=None))
    facts[WeightsFacts]["files"] = dict.fromkeys(item.path for item in wanted)
    result = run_begin((MODEL,), facts)
    assert result.commands[1:] == [f"systemctl daemon-reload && systemctl enable --quiet -- {UNIT} && {RESTART}"]
    absent = {item.path for item in wanted if isinstance(item, Absent)}
    assert set(result.files) == {item.path for item in wanted} - absent


@pytest.mark.parametrize("state", ["absent", "unproved", "damaged"])
def test_what_is_not_whole_starts_the_agent(state: str) -> None:
    assert run_begin((MODEL,), found((MODEL,), items(MODEL), state)).commands == [RESTART]


def test_an_agent_at_work_is_left_at_it() -> None:
    result = run_begin((MODEL,), found((MODEL,), items(MODEL), "absent", testing.unit("active")))
    assert result.commands == [] and result.log == [f"{UNIT} is at work already"]


def test_an_agent_at_work_on_something_else_is_restarted() -> None:
    """Another revision was pinned while the old one was being fetched."""
    wanted = items(MODEL)
    facts = found((MODEL,), wanted, "absent", testing.unit("active"))
    facts[WeightsFacts]["files"][MODEL.paths.manifest] = testing.file("another")
    result = run_begin((MODEL,), facts)
    assert set(result.files) == {MODEL.paths.manifest}
    assert result.commands[1:] == [RESTART]


def test_an_agent_that_failed_is_started_again() -> None:
    assert run_begin((MODEL,), found((MODEL,), items(MODEL), "absent", testing.unit("failed"))).commands == [RESTART]


def test_a_failure_of_before_does_not_stay_when_the_weights_are_whole() -> None:
    result = run_begin((MODEL,), found((MODEL,), items(MODEL), "whole", testing.unit("failed")))
    assert result.commands == [f"systemctl reset-failed -- {UNIT}"]


def test_weights_that_the_plan_no_longer_has_lose_their_unit_and_keep_their_snapshot() -> None:
    """Switching to a profile without drafting must not leave a unit that fetches the drafter at the next boot."""
    other = weights("drafter", "z-lab/Kimi-K2.6-DFlash")
    result = run_begin((MODEL,), found((MODEL,), items(MODEL), others=[other.paths.unit]))
    assert result.commands[0] == f"systemctl disable --now -- {other.paths.unit}"
    gone = {path for path, item in result.files.items() if isinstance(item, Absent)}
    assert gone == {f"{layout.UNITS}/{other.paths.unit}", other.paths.configuration, other.paths.manifest}
    assert result.commands[-1] == "systemctl daemon-reload"


def test_a_profile_without_drafting_never_waits_for_a_drafter() -> None:
    drafter = weights("drafter", "z-lab/Kimi-K2.6-DFlash")
    assert not any("dflash" in item.path.lower() for item in items(MODEL))
    with_drafter = [item.path for item in items(MODEL, drafter)]
    assert drafter.paths.manifest in with_drafter and f"{layout.UNITS}/{drafter.paths.unit}" in with_drafter
    facts = found((MODEL, drafter), items(MODEL, drafter))
    facts[WeightsFacts]["snapshots"][drafter.paths.unit] = {"state": "absent"}
    result = testing.prepare(wait, {"weights": (MODEL, drafter)}, facts)
    assert result.commands[0] == f"Join({drafter.paths.unit})"
    assert MODEL.paths.unit not in " ".join(result.commands)


def test_waiting_ends_with_a_check_of_what_was_waited_for() -> None:
    result = testing.prepare(wait, {"weights": (MODEL,)}, found((MODEL,), items(MODEL), "absent"))
    verify = f"/usr/bin/python3 -sE {layout.WEIGHTS_AGENT} verify {MODEL.paths.configuration} >&2"
    assert result.commands == [f"Join({UNIT})", verify]


def test_the_token_is_roots_alone_and_reaches_the_agent_as_a_credential() -> None:
    gated = weights(hub_token_file="token", gated=True)
    wanted = items(gated, token=TOKEN)
    token = next(item for item in wanted if item.path == layout.HUB_TOKEN)
    assert isinstance(token, File) and (token.mode, token.user, token.secret) == ("600", "root", True)
    for item in wanted:
        if isinstance(item, File) and item.path != layout.HUB_TOKEN:
            assert TOKEN.encode() not in item.data
    assert f"LoadCredential=hub-token:{layout.HUB_TOKEN}" in lay.unit(gated).splitlines()
    assert "LoadCredential" not in lay.unit(MODEL)


def test_a_token_that_is_no_longer_wanted_is_removed() -> None:
    wanted = items(MODEL)
    assert Absent(layout.HUB_TOKEN) in wanted
    facts = found((MODEL,), wanted)
    facts[WeightsFacts]["files"][layout.HUB_TOKEN] = testing.file("old", "600")
    assert set(run_begin((MODEL,), facts).files) == {layout.HUB_TOKEN}


def test_the_owners_weights_directory_keeps_its_owner_and_mode() -> None:
    paths = {item.path for item in items(MODEL)}
    assert "/srv/models" not in paths and "/srv/models/moonshotai" not in paths
    assert {"/srv/models/.staging", "/srv/models/moonshotai/Kimi-K2.6"} <= paths


def test_the_agent_reads_the_configuration_that_the_role_writes(tmp_path: Path) -> None:
    path = tmp_path / "configuration.json"
    path.write_text(lay.configuration(weights(hub_token_file="token")))
    read = agent_configuration.load(str(path))
    assert (read.repository, read.revision) == (MODEL.manifest.repository, MODEL.manifest.revision)
    assert (read.snapshot, read.staging) == (MODEL.paths.snapshot, MODEL.paths.staging)
    assert (read.token_file, read.user) == (layout.HUB_TOKEN, layout.WEIGHTS_USER)
    assert MODEL.paths.receipt == f"{read.snapshot}/{receipt.NAME}"


def test_the_machines_proxies_hold_for_the_agent_and_need_not_be_there() -> None:
    assert lay.unit(MODEL).splitlines().count(f"EnvironmentFile=-{layout.MACHINE_ENVIRONMENT}") == 1


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    unit = tmp_path / UNIT
    unit.write_text(lay.unit(MODEL).replace(layout.WEIGHTS_AGENT, "/dev/null"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if UNIT in line and "is not executable" not in line]
    assert complaints == []


def test_the_agent_is_not_restarted_for_what_only_the_owner_can_mend() -> None:
    from files.tools.weights import errors

    line = next(line for line in lay.unit(MODEL).splitlines() if line.startswith("RestartPreventExitStatus="))
    prevented = set(map(int, line.partition("=")[2].split()))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AgentError)]
    assert {kind.code for kind in kinds if kind.permanent} | {1, 2} == prevented
    assert not {kind.code for kind in kinds if not kind.permanent} & prevented


def judged(status: dict[str, Any] | None, active: str = "active") -> list[str]:
    """What waiting says about one answer of the host, [] while it goes on waiting."""
    from kit.refusal import Refusal

    state = testing.unit(active)
    seen = {"working": active != "failed", "state": state, "status": status, "journal": ["the agent's last words"]}
    try:
        Join(UNIT, "Weights", "/status.json", 60)._judge(seen)
    except Refusal as refusal:
        return refusal.lines()
    return []


def test_waiting_tells_of_trouble_that_lasts_and_of_an_end() -> None:
    error = "https://hub: no answer. Fix: see whether this node reaches it"
    assert judged({"phase": "fetching", "error": None, "trouble_seconds": None}) == []
    assert judged(None) == []
    assert judged({"error": error, "trouble_seconds": 10.0}, "activating") == []
    (told,) = judged({"error": error, "trouble_seconds": 200.0}, "activating")
    assert error in told and "200 s" in told
    assert judged(None, "failed")[0] == "Weights: the agent's last words"


def test_the_probe_sees_snapshots_units_and_forgotten_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.on_host.units", lambda names: {name: {} for name in names})
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    stamped = {"digest": "sha256:x", **receipt.stamps((snapshot / "config.json").stat())}
    (snapshot / receipt.NAME).write_text(json.dumps({"manifest_sha256": "m", "files": {"config.json": stamped}}))
    (tmp_path / "kimi-weights-b.service").touch()
    (tmp_path / "other.service").touch()
    asked: dict[str, Any] = {
        "paths": [str(tmp_path / "nothing")],
        "weights": [{"unit": "kimi-weights-a.service", "snapshot": str(snapshot), "manifest_sha256": "m"}],
        "receipts": receipt.__file__,
        "units_folder": str(tmp_path),
        "prefix": lay.UNIT_PREFIX,
        "sharer": layout.SHARING_UNIT,
        "table": layout.SHARING_TABLE,
    }
    seen = probe.probe(**asked)
    assert seen["files"] == {str(tmp_path / "nothing"): None}
    assert set(seen["units"]) == {"kimi-weights-a.service", "kimi-weights-b.service", layout.SHARING_UNIT}
    assert seen["table"] is None
    assert seen["others"] == ["kimi-weights-b.service"]
    assert seen["snapshots"]["kimi-weights-a.service"]["state"] == "whole"
    (snapshot / "config.json").write_text("[]")
    assert probe.probe(**asked)["snapshots"]["kimi-weights-a.service"]["damaged"].keys() == {"config.json"}
    asked["weights"][0]["manifest_sha256"] = "another"
    assert probe.probe(**asked)["snapshots"]["kimi-weights-a.service"]["state"] == "unproved"
    asked["receipts"] = str(tmp_path / "no agent yet")
    assert probe.probe(**asked)["snapshots"]["kimi-weights-a.service"]["state"] == "unproved"


SHARING = Sharing("h2", (Member("h1", "10.0.0.1"), Member("h2", "10.0.0.2"), Member("h3", "10.0.0.3")), 30200)


def shared_items(sharing: Sharing | None = SHARING) -> list[Any]:
    plan = Plan(MODEL)
    plan.sharing = sharing
    return lay.items(plan, None)  # type: ignore[arg-type]


def table(ports: str = "30200, 30201", addresses: str = "{ 10.0.0.1, 10.0.0.3 }") -> str:
    """As nft lists it."""
    return f"""table inet kimi_sharing {{
	chain input {{
		type filter hook input priority filter; policy accept;
		tcp dport {{ {ports} }} ip saddr != {addresses} counter packets 0 bytes 0 drop
		meta nfproto ipv6 tcp dport {{ 30200, 30201 }} counter packets 0 bytes 0 drop
	}}
}}
"""


def begin_shared(**changed: Any) -> testing.Result:
    facts = found((MODEL,), shared_items())
    facts[WeightsFacts]["units"][layout.SHARING_UNIT] = testing.unit("active")
    facts[WeightsFacts] |= {"table": table(), **changed}
    return testing.prepare(begin, {"weights": (MODEL,), "wanted": shared_items(), "sharing": SHARING}, facts)


def test_a_sharer_that_is_as_wanted_stays() -> None:
    result = begin_shared()
    assert result.commands == [] and result.noop


@pytest.mark.parametrize(
    "loaded", [None, table("30200"), table(addresses="{ 10.0.0.1, 10.0.0.4 }"), table(addresses="10.0.0.1")]
)
def test_a_sharer_behind_another_firewall_is_restarted_which_loads_its_own(loaded: str | None) -> None:
    (command,) = begin_shared(table=loaded).commands
    assert f"systemctl restart -- {layout.SHARING_UNIT}" in command


def test_a_sharer_is_restarted_for_other_members_and_so_are_the_agents_at_work() -> None:
    wanted = shared_items()
    facts = found((MODEL,), wanted, "absent", testing.unit("active"))
    facts[WeightsFacts]["units"][layout.SHARING_UNIT] = testing.unit("active")
    facts[WeightsFacts]["files"][layout.SHARING] = testing.file("others")
    facts[WeightsFacts]["table"] = table()
    result = testing.prepare(begin, {"weights": (MODEL,), "wanted": wanted, "sharing": SHARING}, facts)
    command = result.commands[-1]
    assert command.index(layout.SHARING_UNIT) < command.index(f"restart --no-block -- {UNIT}")


def test_switched_off_the_sharer_goes_with_its_files() -> None:
    facts = found((MODEL,), shared_items())
    facts[WeightsFacts]["units"][layout.SHARING_UNIT] = testing.unit("active")
    for path in lay.SHARING_FILES:
        facts[WeightsFacts]["files"][path] = testing.file("old")
    wanted = shared_items(None)
    result = testing.prepare(begin, {"weights": (MODEL,), "wanted": wanted, "sharing": None}, facts)
    assert result.commands[0] == f"systemctl disable --now -- {layout.SHARING_UNIT}"
    assert {path for path, item in result.files.items() if isinstance(item, Absent)} == set(lay.SHARING_FILES)


def test_the_sharer_reads_what_the_role_writes_and_its_unit_and_rules_are_taken(tmp_path: Path) -> None:
    from files.tools.weights import sharing

    written = {item.path: item for item in shared_items() if isinstance(item, File)}
    path = tmp_path / "sharing.json"
    path.write_bytes(written[layout.SHARING].data)
    read = sharing.load(str(path))
    assert (read.rank, read.address) == (1, "10.0.0.2")
    assert read.peers == [(0, "h1", "10.0.0.1"), (2, "h3", "10.0.0.3")]
    unit = tmp_path / layout.SHARING_UNIT
    unit.write_text(written[lay.SHARING_UNIT_FILE].data.decode().replace("ExecStart=/opt", "ExecStart=/bin/true /opt"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if unit.name in line and "is not executable" not in line] == []
    rules = written[layout.SHARING_FIREWALL].data.decode()
    assert "tcp dport { 30200, 30201 } ip saddr != { 10.0.0.1, 10.0.0.3 } counter drop" in rules
