"""diagnose.py: what a host shows is read whole, judged rightly and told without secrets; nothing is changed by it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import diagnose
from kit import on_host, ssh_config
from kit.inventory import HostEntry
from node import layout, toolkits
from node import plan as plan_module
from node.fingerprints import FINGERPRINTS
from node.manifest import File, Manifest
from node.plan import Plan
from node.problems import Problem
from node.render import read_file
from node.sharing import Neighbour
from node.toolkits import TOOLKITS
from roles.diagnosis import judgement, probe

PROJECT = Path(__file__).resolve().parents[2]
KEY = "s3cretApiKeyOfThisNode42"
TOOLKIT = TOOLKITS["13.0"]
UNIT = "sglang-tp8.service"
REVISION = "e" * 40
DATA = {
    "gpu": "rtx-pro-6000-blackwell-server",
    "gpu_count": 8,
    "weights_directory": "/srv/weights",
    "revision": REVISION,
}
MANIFEST = Manifest("moonshotai/Kimi-K2.6", REVISION, (File("config.json", 10, "a" * 64),)).dumps()
root = pytest.mark.skipif(os.geteuid() != 0, reason="the probe reads the journal as root only")


def planned(*neighbours: Neighbour) -> Plan:
    def read(path: str) -> bytes:
        return MANIFEST.encode() if "manifests" in path else read_file(path)

    made = plan_module.make("gpu-1", DATA, read, None, neighbours=neighbours)
    assert isinstance(made, Plan), made
    return made


PLAN = planned()
ONE_OF_TWO = planned(Neighbour("gpu-1", "10.1.0.1", DATA), Neighbour("gpu-2", "10.1.0.2", DATA))


def unit(active: str = "active", **more: str) -> dict[str, str]:
    sub = {"active": "running", "inactive": "dead", "failed": "failed", "activating": "auto-restart"}[active]
    result = "exit-code" if active == "failed" else "success"
    state = {"LoadState": "loaded", "ActiveState": active, "SubState": sub, "Result": result, "NRestarts": "0"}
    return {**state, "NeedDaemonReload": "no", **more}


def room(free: int = 10**12, size: int = 2 * 10**12, device: int = 1) -> dict[str, int]:
    return {"device": device, "bytes": size, "free": free, "inodes": 10**6, "free_inodes": 9 * 10**5}


def gpus(count: int = 8, used: int = 90_000, fabric: str = "N/A") -> str:
    name = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    return "".join(
        f"{i}, {name}, 00000000:{i + 1:02X}:00.0, {used} MiB, 97887 MiB, 40, 0 %, 80.00 W, {fabric}\n"
        for i in range(count)
    )


def well() -> dict[str, Any]:
    """What the probe brings from a host that serves."""
    return {
        "now": 1000.0,
        "units": {UNIT: unit(), "nvidia-persistenced.service": unit(), "kimi-warmup-tp8.service": unit("inactive")},
        "unread": {},
        "logs": {UNIT: [[[900.0, "The server is fired up and ready to roll!"]]]},
        "kernel": [[800.0, "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05"]],
        "gpus": {"code": 0, "out": gpus(), "err": ""},
        "gpu_processes": {"code": 0, "out": "4711, python3, 90000 MiB\n", "err": ""},
        "nvcc": {"code": 0, "out": "Cuda compilation tools, release 13.0, V13.0.88\n", "err": ""},
        "alternative": {"target": "/usr/local/cuda-12.8", "nvcc": True},
        "current": f"releases/{PLAN.paths.digest}",
        "receipts": {PLAN.paths.receipt: 1.0, PLAN.paths.patches_receipt: 1.0},
        "file_systems": {"/": room(), "/srv/weights": room(free=10**6, device=2), "/dev/shm": room(device=3)},
        "memory": {"MemTotal": 10**12, "MemAvailable": 9 * 10**11},
        "segments": [{"name": "nccl-x", "bytes": 10**7, "user": "sglang"}],
        "health": 200,
        "command_line": "iommu=pt",
        "system": None,
    }


def told(found: dict[str, Any], plan: Any = PLAN) -> list[str]:
    return [finding.id for finding in judgement.findings(found, TOOLKIT, plan, "/srv/weights")]


# --- judgement -------------------------------------------------------------------------------------------------------


def test_a_host_that_serves_has_no_findings() -> None:
    """Its weights' disk may be full, and its engine holds GPU memory and NCCL's segments."""
    assert told(well()) == []


def stopped(found: dict[str, Any]) -> Any:
    found["units"][UNIT] = unit("inactive")
    found["segments"] = []
    found["gpus"]["out"] = gpus(used=3)


Change = Callable[[dict[str, Any]], Any]
STATES: list[tuple[str, Change]] = [
    ("cuda-link", lambda found: found["alternative"].update(nvcc=False, target="/usr/local/cuda-13.1")),
    ("toolkit-missing", lambda found: found["nvcc"].update(code=None, out="", err="no program nvcc")),
    ("toolkit-missing", lambda found: found["nvcc"].update(out="Cuda compilation tools, release 12.8, V12.8.93")),
    ("gpus-missing", lambda found: found["gpus"].update(out=gpus(7))),
    ("driver-missing", lambda found: found["gpus"].update(code=None, out="", err="no program nvidia-smi")),
    (
        "nvidia-smi-hangs",
        lambda found: found["gpus"].update(code=None, out="", err="nvidia-smi did not end within 60 s"),
    ),
    ("fabric-not-up", lambda found: found["gpus"].update(out=gpus(fabric="In Progress"))),
    ("nccl-segments-left", lambda found: (stopped(found), found.update(segments=[{"name": "nccl-x", "bytes": 9}]))),
    ("gpu-memory-held", lambda found: (stopped(found), found["gpus"].update(out=gpus(used=70_000)))),
    ("no-answer", lambda found: found.update(health=503)),
    ("no-answer", lambda found: found.update(health="timed out")),
    ("memory-low", lambda found: found["memory"].update(MemAvailable=10**9)),
    ("disk-full", lambda found: found["file_systems"].update({"/": room(free=10**8)})),
    ("disk-full", lambda found: found["file_systems"]["/"].update(free_inodes=10)),
    ("shm-full", lambda found: found["file_systems"].update({"/dev/shm": room(free=10**9)})),
    ("unit-edited", lambda found: found["units"][UNIT].update(NeedDaemonReload="yes")),
    ("not-deployed", lambda found: (stopped(found), found.update(current=None, units={}, nvcc=None))),
    ("service-stopped", stopped),
    ("other-profile", lambda found: found["units"].update({UNIT: unit("inactive"), "sglang-ep4.service": unit()})),
    ("other-release", lambda found: found.update(current="releases/0123456789abcdef")),
    ("receipt-missing", lambda found: found["receipts"].update({PLAN.paths.patches_receipt: None})),
    ("unit-failed", lambda found: found["units"].update({"kimi-weights-x.service": unit("failed")})),
    ("unit-failed", lambda found: found["units"].update({UNIT: unit("activating", NRestarts="2")})),
]


@pytest.mark.parametrize(("name", "change"), STATES, ids=[name for name, _ in STATES])
def test_each_state_is_one_finding(name: str, change: Change) -> None:
    found = well()
    change(found)
    assert [one for one in told(found) if one != "service-stopped" or name == one] == [name]


def test_every_fingerprint_without_a_pattern_can_be_found() -> None:
    silent = {fingerprint.id for fingerprint in FINGERPRINTS if not fingerprint.patterns}
    assert silent == ({name for name, _ in STATES} | {"no-plan", "sharing-stopped"}) & silent


def test_a_start_that_takes_its_time_is_no_finding() -> None:
    found = well()
    found["units"][UNIT] = unit("activating", SubState="start-post")
    assert told(found) == []


SHARER = layout.SHARING_UNIT


@pytest.mark.parametrize(
    ("state", "log", "name"),
    [
        ({SHARER: unit("inactive")}, (), "sharing-stopped"),
        ({}, (), "sharing-stopped"),
        ({SHARER: unit("failed")}, (), "unit-failed"),
        (
            {SHARER: unit("activating", NRestarts="7")},
            ("cannot listen on 10.1.0.1:30201 (Address already in use), wanted this node's address among the others. "
             "Fix: set weights_address of this host in the inventory",),
            "sharing-address",
        ),
        (
            {SHARER: unit("activating", NRestarts="7")},
            (f"{layout.SHARING_FIREWALL}:4:7-13: Error: Could not process rule: Operation not supported",
             f"{SHARER}: Control process exited, code=exited, status=1/FAILURE"),
            "sharing-firewall",
        ),
        (
            {SHARER: unit()},
            ("/srv/weights/m/n/c/model-00002.safetensors: is not what it was when it was verified, and is given to "
             "nobody. Fix: weights_agent.py verify --deep, then repair, on this node",),
            "weights-changed",
        ),
    ],
)  # fmt: skip
def test_a_sharer_that_does_not_share_is_told_with_its_cause(
    state: dict[str, Any], log: tuple[str, ...], name: str
) -> None:
    found = well()
    found["units"].update(state)
    found["logs"][SHARER] = [[[900.0, line] for line in log]]
    assert told(found, ONE_OF_TWO) == [name]


def test_a_sharer_that_runs_or_is_not_wanted_is_no_finding() -> None:
    found = well()
    assert told(found) == [], "a node by itself has none"
    found["units"][SHARER] = unit()
    assert told(found, ONE_OF_TWO) == []


def test_an_agent_that_its_sharer_left_alone_points_there() -> None:
    found = well()
    found["units"] |= {SHARER: unit(), "kimi-weights-x.service": unit()}
    found["logs"]["kimi-weights-x.service"] = [
        [[900.0, "/run/kimi-share/agents.sock: no answer for 20 s, so this node fetches by itself"]]
    ]
    assert told(found, ONE_OF_TWO) == ["sharing-silent"]
    found["units"][SHARER] = unit("inactive")
    assert told(found, ONE_OF_TWO) == ["sharing-stopped"]


def test_a_log_explains_why_its_unit_failed() -> None:
    found = well()
    stopped(found)
    found["units"][UNIT] = unit("failed")
    found["logs"] = {
        UNIT: [
            [
                [10.0, "x.cuh:1:1: fatal error: curand.h: No such file or directory"],
                [11.0, "ninja: build stopped: subcommand failed."],
            ],
            [
                [20.0, "x.cuh:1:1: fatal error: curand.h: No such file or directory"],
                [21.0, "Start request repeated too quickly"],
            ],
        ]
    }
    (finding,) = judgement.findings(found, TOOLKIT, PLAN, "/srv/weights")
    assert (finding.id, finding.where, finding.times, finding.last) == ("toolkit-header-missing", UNIT, 2, 20.0)


def test_the_same_cause_in_two_units_is_told_once() -> None:
    found = well()
    line = "x.cuh:1:1: fatal error: curand.h: No such file or directory"
    found["units"] |= {UNIT: unit("failed"), "kimi-warmup-tp8.service": unit("failed")}
    found["logs"] = {UNIT: [[[10.0, line]]], "kimi-warmup-tp8.service": [[[5.0, line]]]}
    findings = [
        one for one in judgement.findings(found, TOOLKIT, PLAN, "/srv/weights") if one.id == "toolkit-header-missing"
    ]
    (finding,) = findings
    assert finding.where == f"{UNIT}, kimi-warmup-tp8.service" and finding.last == 10.0


def test_the_kernels_word_explains_what_the_engine_says() -> None:
    found = well()
    found["units"][UNIT] = unit("failed")
    found["logs"][UNIT] = [[[10.0, "Received sigquit from a child process. It usually means the child failed."]]]
    found["kernel"] = [[9.0, "NVRM: Xid (PCI:0000:41:00): 79, pid=1, name=python, GPU has fallen off the bus."]]
    found["gpus"]["out"] = gpus(7)
    assert [one for one in told(found) if one not in ("nccl-segments-left", "gpu-memory-held")] == ["gpu-fell-off"]


def test_an_inventory_without_a_plan_is_told_beside_what_the_logs_show() -> None:
    found = well()
    found["logs"][UNIT] = [[[10.0, "ValueError: Unknown speculative algorithm name: DDTREE"]]]
    problem = Problem("inventory key port", "'x'", "a whole number", "mend it")
    findings = judgement.findings(found, TOOLKIT, [problem], "/srv/weights")
    assert [one.id for one in findings] == ["algorithm-unknown", "no-plan"]
    assert findings[1].fix == "mend it" and "a whole number" in findings[1].cause


def test_secrets_are_hidden_in_findings() -> None:
    found = well()
    found["logs"][UNIT] = [[[10.0, f"launch_server.py: error: unrecognized arguments: --api-key {KEY}"]]]
    (finding,) = judgement.findings(found, TOOLKIT, PLAN, "/srv/weights")
    assert finding.id == "flags-of-another-release"
    assert KEY not in json.dumps(diagnose.hidden(vars(finding))) and KEY not in diagnose.line("gpu-1", finding)


# --- the probe -------------------------------------------------------------------------------------------------------


def entry(text: str | list[int], run: str, seconds: float = 1.0, by: str = "_SYSTEMD_INVOCATION_ID") -> str:
    return json.dumps({"MESSAGE": text, by: run, "__REALTIME_TIMESTAMP": str(int(seconds * 1e6))})


def said(*lines: str) -> Callable[..., dict[str, Any]]:
    return lambda argv, seconds: {"code": 0, "out": "\n".join(lines), "err": ""}


def test_a_log_is_told_by_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = (
        entry("Starting", "1", by="INVOCATION_ID"),
        entry("first", "1"),
        entry("second\nin two lines", "2", 2.0),
        entry("Decode batch, #running-req: 1", "2"),
        entry([0xE2, 0x82, 0xAC], "3", 3.0),
        entry("Failed", "3", 4.0, by="INVOCATION_ID"),
    )
    monkeypatch.setattr(probe, "_said", said(*journal))
    third = [[3.0, "€"], [4.0, "Failed"]]
    assert probe._log("x", unit("failed"), 24) == [[[2.0, "second"], [2.0, "in two lines"]], third]
    assert probe._log("x", unit("active"), 24) == [third]
    assert len(probe._log("x", unit("active", NRestarts="1"), 24)) == 2, "why it was restarted stands in the run before"


def test_long_lines_keep_both_ends() -> None:
    line = "a" * 5000 + " fatal error"
    assert len(probe._short(line)) < 1100 and probe._short(line).endswith("fatal error")


def test_units_that_ended_well_are_not_read() -> None:
    assert not probe._speaks(unit("inactive"))
    assert probe._speaks(unit("inactive", Result="exit-code"))
    assert probe._speaks(unit("active")) and probe._speaks(unit("failed"))


def test_a_program_that_hangs_is_left_behind() -> None:
    began = time.monotonic()
    answer = probe._said(["sleep", "60"], 0.2)
    assert answer["code"] is None and answer["err"] == "sleep did not end within 0.2 s"
    assert time.monotonic() - began < 10


def test_a_driver_that_does_not_know_a_field_is_asked_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nvidia_smi(argv: list[str], seconds: float) -> dict[str, Any]:
        if "fabric.state" in argv[1]:
            return {"code": 2, "out": 'Field "fabric.state" is not a valid field to query.', "err": ""}
        return {"code": 0, "out": "0, a GPU", "err": ""}

    monkeypatch.setattr(probe, "_said", nvidia_smi)
    assert probe._gpus()["out"] == "0, a GPU"


def test_the_nodes_own_keys_stay_on_the_node(tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text(KEY + "\n")
    (tmp_path / "keys.yaml").write_text(f'api-key: "{KEY}-admin"\n')
    words = probe._words([str(tmp_path / "api-key"), str(tmp_path / "keys.yaml"), str(tmp_path / "none")])
    assert words == [f"{KEY}-admin", KEY]
    shown = probe._without({"logs": [[1.0, f"refused {KEY}"]], "n": 3, "none": None}, words)
    assert shown == {"logs": [[1.0, f"refused {probe.HIDDEN}"]], "n": 3, "none": None}


def test_another_user_than_root_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(on_host.Problem, match=r"uid 1000.*Fix: set ssh_user to root"):
        probe.probe(**judgement.questions(PLAN, TOOLKIT, None, 24))


def test_what_is_asked_comes_from_the_plan() -> None:
    asked = judgement.questions(PLAN, TOOLKIT, "/srv/weights", 24)
    assert asked["nvcc"] == TOOLKIT.nvcc_path and asked["alternative"] == toolkits.ALTERNATIVE
    assert PLAN.paths.receipt in asked["receipts"] and asked["current"] == layout.CURRENT
    assert {layout.API_KEY, layout.HUB_TOKEN, layout.API_KEY_CONFIGURATION} == set(asked["secrets"])
    assert asked["health"] == f"http://127.0.0.1:{PLAN.service.port}/health"
    json.dumps(asked)


# --- the whole command -----------------------------------------------------------------------------------------------

STAND_INS = {
    "systemctl": """
        case "$1" in
            list-units) cat "$STATES/list-units" ;;
            list-unit-files) cat "$STATES/list-units" ;;
            show) cat "$STATES/show" ;;
            *) echo "systemctl $*" >> "$STATES/changed"; exit 1 ;;
        esac""",
    "journalctl": """
        for argument; do case "$argument" in
            --unit=*) cat "$STATES/journal-${argument#--unit=}" 2>/dev/null; exit 0 ;;
            --dmesg) cat "$STATES/kernel"; exit 0 ;;
        esac; done; exit 1""",
    "nvidia-smi": """case "$1" in --query-gpu=*) cat "$STATES/gpus" ;; *) echo "4711, python3, 90000 MiB" ;; esac""",
    # The last two arguments are the host and the command; -F is the configuration.
    "ssh": """
        while [ $# -gt 2 ]; do shift; done
        case "$1" in
            away) echo "ssh: connect to host 10.0.0.9 port 22: Connection timed out" >&2; exit 255 ;;
            renewed) echo "Host key verification failed." >&2; exit 255 ;;
            broken) echo "Welcome!"; exit 0 ;;
            *) exec sh -c "$2" ;;
        esac""",
}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of stand-ins: a folder with what its programs say, and an inventory of it."""
    programs, states = tmp_path / "bin", tmp_path / "states"
    programs.mkdir()
    states.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text("#!/bin/sh\n" + text + "\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("STATES", str(states))
    (states / "list-units").write_text(f"{UNIT} loaded failed failed SGLang\nkimi-release@.service static -\n")
    properties = {"Id": UNIT, "LoadState": "loaded", "ActiveState": "failed", "SubState": "failed"}
    properties |= {"Result": "exit-code", "UnitFileState": "enabled", "NeedDaemonReload": "no", "NRestarts": "2"}
    (states / "show").write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    journal = [
        f"[TP0] server_args=ServerArgs(api_key='{KEY}')",
        f"hf_aaaaaaaaaaaaaaaaaaaaaaaa was refused; --api-key {KEY}",
        "x.cuh:20:10: fatal error: curand.h: No such file or directory",
    ]
    (states / f"journal-{UNIT}").write_text("\n".join(entry(text, "1") for text in journal) + "\n")
    (states / "kernel").write_text(entry("NVRM: Xid (PCI:0000:41:00): 31, pid=1, MMU Fault", "0") + "\n")
    (states / "gpus").write_text(gpus(used=3))
    (tmp_path / "manifest.json").write_text(MANIFEST)
    inventory_of(tmp_path, "@local")
    return tmp_path


def inventory_of(folder: Path, *names: str) -> None:
    data = {**DATA, "manifest": str(folder / "manifest.json")}
    (folder / "nodes.py").write_text(f"hosts = [(name, {data!r}) for name in {names!r}]\n")


@root
def test_a_host_is_looked_at_and_told_in_lines(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose.main([str(host / "nodes.py")]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert any(line.startswith(f"@local: error: toolkit-header-missing in {UNIT}: ") for line in lines)
    assert any(line.startswith("@local: warning: kernel-on-gpu-failed in kernel log: ") for line in lines)
    assert all(" Cause: " in line and " Fix: " in line for line in lines)
    assert f"pyinfra {host}/nodes.py deploy.py" in out, "a fix names this inventory"
    assert "unit-failed" not in out, "its cause was found"
    assert KEY not in out + err
    assert not (host / "states/changed").exists(), "systemctl was asked for more than what is there"


@root
def test_json_is_one_object_without_secrets(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose.main([str(host / "nodes.py"), "--json"]) == 1
    out = capsys.readouterr().out
    document = json.loads(out)
    assert document.keys() == {"findings", "not_looked_at", "unread", "state"}
    found = {finding["id"]: finding for finding in document["findings"]}
    assert (
        found["toolkit-header-missing"]["host"] == "@local" and found["toolkit-header-missing"]["severity"] == "error"
    )
    state = document["state"]["@local"]
    assert state["units"][UNIT]["NRestarts"] == "2" and state["memory"]["MemTotal"] > 0
    assert "logs" not in state and KEY not in out and "hf_aaaa" not in out


@root
def test_a_host_that_is_away_does_not_stop_the_others(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory_of(host, "away", "gpu-1", "renewed", "broken")
    began = time.monotonic()
    assert diagnose.main([str(host / "nodes.py")]) == 2
    assert time.monotonic() - began < 60
    out, err = capsys.readouterr()
    assert "gpu-1: error: toolkit-header-missing" in out
    away, renewed, broken = (
        next(line for line in err.splitlines() if line.startswith(f"{name}: could not be looked at: "))
        for name in ("away", "renewed", "broken")
    )
    assert "Connection timed out" in away and "Fix: ssh away true" in away
    assert "ssh-keygen -R renewed" in renewed
    assert "Welcome!" in broken and "Fix: " in broken


@root
def test_one_host_of_several_can_be_asked(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory_of(host, "away", "gpu-1")
    assert diagnose.main([str(host / "nodes.py"), "--host", "gpu-1", "--data", "profile=ep4"]) == 1
    out, _ = capsys.readouterr()
    assert "away" not in out and "no unit sglang-ep4.service" in out


def test_a_host_without_systemd_cannot_be_looked_at(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (host / "bin/systemctl").write_text("#!/bin/sh\necho 'System has not been booted with systemd' >&2; exit 1\n")
    assert diagnose.main([str(host / "nodes.py")]) == 2
    assert "could not be looked at" in capsys.readouterr().err


def test_an_inventory_that_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose.main([str(tmp_path / "none.py")]) == 2
    assert "Fix: " in capsys.readouterr().err
    (tmp_path / "nodes.py").write_text("hosts = ['gpu-1']\n")
    assert diagnose.main([str(tmp_path / "nodes.py"), "--limit", "gpu-2"]) == 2
    assert "matches 'gpu-2'" in capsys.readouterr().err
    assert diagnose.main([str(tmp_path / "nodes.py"), "--data", "profile"]) == 2
    assert "wanted KEY=VALUE" in capsys.readouterr().err


def test_a_log_alone_is_matched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "x.log"
    log.write_text(f"--api-key {KEY}\nnvcc fatal   : Unsupported gpu architecture 'compute_120f'\n")
    assert diagnose.main(["--log", str(log)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{log}: error: nvcc-too-old in log: ") and KEY not in line
    log.write_text("The server is fired up and ready to roll!\n")
    assert diagnose.main(["--log", str(log)]) == 0
    assert diagnose.main(["--log", str(tmp_path / "none")]) == 2


def test_standard_input_is_a_log_too() -> None:
    done = subprocess.run(
        [sys.executable, "diagnose.py", "--log", "-", "--json"],
        input=b"\xff\xfe\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
        cwd=PROJECT,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["id"] == "gpu-out-of-memory"


@pytest.mark.parametrize("arguments", [[], ["x.py", "--log", "y"], ["x.py", "--hours", "0"]])
def test_a_wrong_call_says_how_to_call_it(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        diagnose.main(arguments)
    assert ended.value.code == 2
    assert "Fix: " in capsys.readouterr().err


READ_ONLY = """
mount --make-rprivate / && mount -t tmpfs none "$1" && mkdir "$1/root" && mount --rbind / "$1/root" || exit 77
for place in $(awk '{print $5}' /proc/self/mountinfo | grep "^$1/root"); do
    mount -o remount,ro,bind "$place" 2>/dev/null || true
done
touch "$1/root/var/lib/written" 2>/dev/null && exit 78
exec chroot "$1/root" sh -c "$2"
"""


@root
def test_the_probe_needs_to_write_nowhere(host: Path) -> None:
    """Where every file system is read-only it brings the same as elsewhere."""
    from kit.program import probe_command
    from roles.diagnosis.facts import Symptoms

    command = probe_command(Symptoms.source(), judgement.questions(PLAN, TOOLKIT, None, 24)).get_raw_value()
    place = host / "root"
    place.mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(place), command],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["found"]
    assert found["unread"] == {} and found["units"].keys() == {UNIT} and found["logs"][UNIT]


# --- reaching hosts --------------------------------------------------------------------------------------------------


def test_a_command_goes_to_a_host_as_the_inventory_says(tmp_path: Path) -> None:
    def argv(name: str, **ssh: Any) -> list[str]:
        return ssh_config.argv(tmp_path / "c", HostEntry(name, (), {}, ssh), "echo 'a b'")

    assert argv("gpu-1")[:4] == ["ssh", "-n", "-F", str(tmp_path / "c")] and argv("gpu-1")[-2:] == [
        "gpu-1",
        "echo 'a b'",
    ]
    assert argv("@local") == ["sh", "-c", "echo 'a b'"]
    sudo = argv("gpu-1", _sudo=True)[-1]
    assert sudo.startswith("sudo -n -- sh -c ")
    assert subprocess.check_output(["sh", "-c", sudo.removeprefix("sudo -n -- ")], text=True) == "a b\n"


def test_the_ssh_configuration_says_what_the_inventory_says() -> None:
    ssh = {"ssh_hostname": "10.0.0.1", "ssh_port": 2222, "ssh_user": "owner", "_sudo": True}
    with ssh_config.written({"gpu-1": HostEntry("gpu-1", (), {}, ssh)}) as path:
        shown = subprocess.check_output(["ssh", "-F", str(path), "-G", "gpu-1"], text=True).splitlines()
        folder = path.parent
    assert {"hostname 10.0.0.1", "port 2222", "user owner", "batchmode yes", "stricthostkeychecking true"} <= set(shown)
    assert not folder.exists()


def test_well_is_not_changed_by_judging() -> None:
    found = well()
    before = copy.deepcopy(found)
    told(found)
    assert found == before
