"""inference_service: what is laid down, when the server is restarted, and the programs that it brings to the node."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from files.tools import engine_log, jit_warmup, ready_probe
from kit import files, testing
from kit.on_host import Problem
from node import layout
from node.manifest import File, Manifest
from node.models import DRAFTERS, MODELS
from node.plan import Plan, make
from node.profiles import PROFILES
from node.render import read_file
from node.systems import SYSTEMS
from roles.inference_service import content, deploy, key_on_host, probe
from roles.inference_service.facts import ServiceFacts
from roles.inference_service.operations import differences, lay_down, serve, start_warming

TOOLS = Path(__file__).resolve().parents[2] / "files" / "tools"
KEY = "sk-of-nobody-0123456789abcdef"


def planned(profile: str = "tp8", **data: Any) -> Plan:
    """A Plan of an 8-GPU node, or of the lab's."""

    def read(path: str) -> bytes:
        known = {f"files/manifests/{model.key}.json": (model.repository, model.revision) for model in MODELS.values()}
        known |= {f"files/manifests/{each.key}.json": (each.repository, each.revision) for each in DRAFTERS.values()}
        if path not in known:
            return read_file(path)
        repository, revision = known[path]
        return Manifest(repository, revision or "e" * 40, (File("config.json", 10, "a" * 64),)).dumps().encode()

    values = {
        "gpu": "rtx-pro-6000-blackwell-server",
        "gpu_count": 8,
        "weights_directory": "/srv/weights",
        "profile": profile,
        **({"model": "lab-tiny", "revision": "e" * 40} if PROFILES[profile].device == "cpu" else {}),
        **({"drafter_revision": "e" * 40} if "dflash" in profile else {}),
        **data,
    }
    made = make("gpu-1", values, read, None, SYSTEMS[0].as_system())
    assert isinstance(made, Plan), [str(problem) for problem in made]
    return made


# --- what is laid down ---


needs_systemd_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None and "KIMI_NODES_SKIP_NOTHING" not in os.environ,
    reason="wants systemd-analyze (apt-get install systemd)",
)


@needs_systemd_analyze
@pytest.mark.parametrize("profile", PROFILES)
def test_units_of_every_profile_are_good_to_systemd(profile: str, tmp_path: Path) -> None:
    """systemd ignores what it does not know, with a line in a log that nobody reads."""
    plan = planned(profile) if profile.startswith("cpu") else planned(profile, gpu="b300")
    units = [("sglang", "sglang.service.j2"), ("warmup", "warmup.service.j2")]
    for name, template in [*units, *([("cubins", "kimi-cubins.service.j2")] if plan.cubins else [])]:
        text = content.render(template, plan)
        lines = text.splitlines()
        assert "{{" not in text and "{%" not in text
        assert all(line.startswith(("#", "[")) or "=" in line for line in lines if line), text
        # The programs are on the node, not here; /bin/true stands for each, and the sandbox's folders for those of
        # here.
        local = "\n".join(line if not line.startswith("Exec") else line.split("=")[0] + "=/bin/true" for line in lines)
        file = tmp_path / f"{name}-{profile}.service"
        file.write_text(local + "\n")
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True)
        said = [line for line in done.stderr.splitlines() if file.name in line]
        assert not said, said


@needs_systemd_analyze
@pytest.mark.parametrize(
    ("template", "profile", "gpu"),
    [
        ("sglang.service.j2", "tp8", "rtx-pro-6000-blackwell-server"),
        ("sglang.service.j2", "cpu", "rtx-pro-6000-blackwell-server"),
        ("warmup.service.j2", "tp8", "b300"),
        ("warmup.service.j2", "cpu", "rtx-pro-6000-blackwell-server"),
        ("kimi-cubins.service.j2", "tp8", "b300"),
    ],
)
def test_units_are_hardened(template: str, profile: str, gpu: str, tmp_path: Path) -> None:
    """At most 2.5 of systemd's 10 points of exposure; an unhardened service has 9.5."""
    file = tmp_path / "unit.service"
    file.write_text(content.render(template, planned(profile, gpu=gpu)))
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", "--no-pager", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_the_unit_leaves_open_what_the_engine_needs() -> None:
    """numba, the CUTLASS DSL and oneDNN write code and run it; the GPUs are devices; NCCL and gloo ask netlink."""
    text = content.render("sglang.service.j2", planned())
    for line in (
        "MemoryDenyWriteExecute=no",
        "PrivateDevices=no",
        "DeviceAllow=char-nvidia* rw",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        "SystemCallFilter=@system-service pidfd_getfd",
    ):
        assert line in text.splitlines(), line


def test_a_crash_loop_of_the_slowest_starts_still_ends() -> None:
    """systemd's own five starts in ten seconds never come about when a load takes minutes."""
    plan = planned(start_timeout=3600)
    lines = dict(line.split("=", 1) for line in content.render("sglang.service.j2", plan).splitlines() if "=" in line)
    burst, interval = int(lines["StartLimitBurst"]), int(lines["StartLimitIntervalSec"])
    longest = int(lines["TimeoutStartSec"]) + int(lines["RestartSec"]) + int(lines["TimeoutStopSec"])
    assert interval >= burst * longest


def test_profiles_exclude_each_other_both_ways() -> None:
    """Conflicts= stops the other, After= waits until it has stopped: both want the same GPUs."""
    plan = planned("ep4")
    lines = content.render("sglang.service.j2", plan).splitlines()
    for unit in plan.service.conflicts:
        assert [line.partition("=")[0] for line in lines if unit in line] == ["After", "Conflicts"]
    assert len(plan.service.conflicts) == len(PROFILES) - 1


@pytest.mark.parametrize("gpu", ["b300", "rtx-pro-6000-blackwell-server"])
@pytest.mark.parametrize("profile", [name for name, profile in PROFILES.items() if profile.device == "cuda"])
def test_gpu_memory_is_waited_for_before_the_engine_and_after_the_devices(profile: str, gpu: str) -> None:
    """Both before the warm-up, which takes no GPU memory but time, and with the numbers that the plan counts on."""
    data = {"kv_cache_dtype": "fp8_e4m3"}
    plan = planned(profile, gpu=gpu, **data)
    steps = [line for line in content.render("sglang.service.j2", plan).splitlines() if line.startswith("Exec")]
    order = ("nvidia-modprobe", "gpu_memory_free", "/dev/shm", "jit_warmup", "sglang.launch_server", "ready_probe")
    assert [next(n for n, line in enumerate(steps) if word in line) for word in order] == list(range(1, 7))
    (laid_down,) = [item for item in content.wanted(plan) if item.path == plan.service_paths.gpu_memory]
    assert isinstance(laid_down, files.File) and f" {laid_down.path}" in steps[2]
    wanted = json.loads(laid_down.content)
    assert wanted["user"] == layout.SERVICE_USER and wanted["seconds"] > 0
    assert plan.fit and wanted["gpus"].keys() == {str(number) for number in range(plan.profile.gpus)}
    for number, mib in wanted["gpus"].items():
        fit = plan.fit.gpus[int(number)]
        assert fit.weights + fit.kv_cache < mib * 2**20 < fit.memory


def test_without_gpus_no_gpu_is_waited_for() -> None:
    plan = planned("cpu")
    assert "gpu_memory_free" not in content.render("sglang.service.j2", plan)
    assert plan.service_paths.gpu_memory not in {item.path for item in content.wanted(plan)}


def test_the_key_is_in_no_argument_and_no_environment() -> None:
    plan = planned()
    text = content.render("sglang.service.j2", plan)
    assert "--api-key" not in text
    assert "--config ${CREDENTIALS_DIRECTORY}/keys.yaml" in text
    assert not any("KEY" in name for name in plan.service.environment)


@pytest.mark.parametrize("key", ["sk-" + "a" * 40, "A" * 16, 'quote"and\\backslash%$#1'])
def test_a_key_reaches_the_server_as_it_is(key: str) -> None:
    """The server reads YAML, of which JSON is a part."""
    assert content.key_problem(key) is None
    raw, configuration = content.key_files(key)
    assert raw.content == key + "\n" and raw.secret and raw.mode == "600"
    assert configuration.secret and configuration.mode == "600"
    assert json.loads(configuration.content) == {"api-key": key}


@pytest.mark.parametrize(
    "key", ["", "short", "-" + "a" * 40, "two words of some length", "schlüssel-mit-umlaut", "a" * 600]
)
def test_a_key_that_cannot_work_is_refused(key: str) -> None:
    assert content.key_problem(key)


def test_only_what_decides_what_is_compiled_makes_the_cache_cold() -> None:
    """Switching a profile must not compile anything again."""
    assert (
        content.warmup(planned("tp8")) == content.warmup(planned("ep4")) == content.warmup(planned("tp8", port=31000))
    )
    assert content.warmup(planned("tp8")) != content.warmup(planned("tp8", gpu="b300"))


# --- operations ---

PLAN = planned("cpu")
PATHS = PLAN.service_paths


def laid_down(plan: Plan) -> dict[str, files.Item]:
    return {item.path: item for item in content.wanted(plan)}


def test_kernels_that_nvidia_ships_compiled_are_fetched_by_a_user_that_is_not_the_server_s() -> None:
    """The server's user reaches no network and may not change them; the other one must not read the server's cache."""
    plan = planned(gpu="b300")
    assert plan.cubins
    cache, folder = laid_down(plan)[plan.paths.cache], laid_down(plan)[plan.cubins.directory]
    assert isinstance(cache, files.Directory) and isinstance(folder, files.Directory)
    assert (cache.mode, cache.user, cache.group) == ("710", layout.SERVICE_USER, layout.WEIGHTS_USER)
    assert (folder.mode, folder.user, folder.group) == ("1775", layout.WEIGHTS_USER, layout.SERVICE_USER)
    unit = content.render("kimi-cubins.service.j2", plan)
    assert f"User={layout.WEIGHTS_USER}\n" in unit and f"ReadWritePaths={plan.cubins.directory}\n" in unit
    for template in ("warmup.service.j2", "sglang.service.j2"):
        wants = [line for line in content.render(template, plan).splitlines() if line.startswith("Wants=")]
        assert any(layout.CUBINS_UNIT in line for line in wants), "each brings them, should they be lost"
    assert plan.service.environment["FLASHINFER_CUBIN_DIR"] == plan.cubins.directory


def test_what_they_say_to_each_other_is_one_thing() -> None:
    plan = planned(gpu="b300", cubins_repository="https://mirror.example/cubins")
    told, waits = content.cubins(plan), content.warmup(plan)["cubins"]
    assert told["repository"] == "https://mirror.example/cubins"
    assert {name: waits[name] for name in ("receipt", "problem", "lock")} == {
        name: told[name] for name in ("receipt", "problem", "lock")
    }


@pytest.mark.parametrize("data", [{}, {"gpu": "b300", "release": "sglang-0.5.12.post1"}])
def test_where_none_are_wanted_none_are_fetched_and_an_old_unit_goes(data: dict[str, Any]) -> None:
    plan = planned(**data)
    assert plan.cubins is None and content.warmup(plan)["cubins"] is None
    for path in (f"{layout.UNITS}/{layout.CUBINS_UNIT}", layout.CUBINS_CONFIGURATION):
        assert isinstance(laid_down(plan)[path], files.Absent)
    cache = laid_down(plan)[plan.paths.cache]
    assert isinstance(cache, files.Directory) and cache.mode == "700"
    assert layout.CUBINS_UNIT not in content.render("sglang.service.j2", plan)


WANTED = content.wanted(PLAN)
CHECK = deploy.warmup_check(PLAN)
ARGUMENTS = [*PLAN.service.arguments, "--config", f"/run/credentials/{PATHS.unit}/keys.yaml"]
FIREWALL_ACTIVE = {layout.FIREWALL_UNIT: testing.unit(SubState="exited")}


def laid(found: dict[str, Any], key: str | None = None) -> testing.Result:
    files = content.key_files(key) if key else []
    arguments = {"wanted": WANTED, "key": files, "firewall": content.FIREWALL_SEEN}
    return testing.prepare(lay_down, arguments, facts={ServiceFacts: {"firewall_holds": True, **found}})


def test_all_laid_down_is_no_change() -> None:
    result = laid({"files": testing.as_wanted(WANTED), "units": FIREWALL_ACTIVE, "key": "good"})
    assert (result.commands, result.refused) == ([], []) and len(result.noop) == 1


def test_an_empty_host_gets_files_a_key_and_the_firewall() -> None:
    result = laid(
        {
            "files": dict.fromkeys((item.path for item in WANTED), None),
            "units": {layout.FIREWALL_UNIT: testing.unit("inactive", "", None)},
            "key": "missing",
        }
    )
    assert set(result.files) == {item.path for item in WANTED if not isinstance(item, files.Absent)}
    assert result.commands[1].startswith("python3 -I") and result.commands[1].endswith(layout.API_KEY)
    assert result.commands[2] == "systemctl daemon-reload"
    assert "systemctl enable" in result.commands[3] and "systemctl start" in result.commands[3]
    assert all(layout.FIREWALL_UNIT in command for command in result.commands[3:])


def test_a_key_of_the_owner_is_written_secretly_and_none_is_made() -> None:
    files = {**testing.as_wanted(WANTED), layout.API_KEY: None, layout.API_KEY_CONFIGURATION: None}
    result = laid({"files": files, "units": FIREWALL_ACTIVE, "key": "missing"}, KEY)
    assert list(result.files) == [layout.API_KEY, layout.API_KEY_CONFIGURATION]
    assert all(item.secret for item in result.files.values())
    assert len(result.commands) == 1 and KEY not in result.commands[0]


def test_a_key_that_cannot_be_used_refuses_the_host() -> None:
    result = laid({"files": testing.as_wanted(WANTED), "units": FIREWALL_ACTIVE, "key": "unusable: 0 characters"})
    assert len(result.refused) == 1 and "Fix: remove that file" in result.refused[0]


def test_a_changed_firewall_is_loaded() -> None:
    files = testing.as_wanted(WANTED)
    files[layout.FIREWALL] = testing.file("other rules")
    result = laid({"files": files, "units": FIREWALL_ACTIVE, "key": "good"})
    assert list(result.files) == [layout.FIREWALL]
    assert f"systemctl restart -- {layout.FIREWALL_UNIT}" in result.commands[1]


def test_a_firewall_that_somebody_changed_is_loaded_again() -> None:
    """Its unit is active for ever, whatever happened to its rules."""
    found = {"files": testing.as_wanted(WANTED), "units": FIREWALL_ACTIVE, "key": "good", "firewall_holds": False}
    result = laid(found)
    assert len(result.commands) == 1 and f"systemctl restart -- {layout.FIREWALL_UNIT}" in result.commands[0]


def warmed(cold: list[str], active: str = "inactive") -> testing.Result:
    facts = {"files": {}, "units": {PATHS.warmup_unit: testing.unit(active, "static")}, "warm": cold}
    return testing.prepare(start_warming, {"paths": PATHS, "check": CHECK}, facts={ServiceFacts: facts})


def test_a_warm_cache_is_no_change() -> None:
    assert warmed([]).commands == [] and len(warmed([]).noop) == 1


def test_a_cold_cache_is_warmed_and_not_waited_for() -> None:
    assert warmed(["no receipt"]).commands == [f"systemctl start --no-block -- {PATHS.warmup_unit}"]


def test_a_compilation_at_work_is_left_alone() -> None:
    assert warmed(["no receipt"], "activating").commands == []


OTHERS = content.other_services(PLAN)


def served(**changes: Any) -> testing.Result:
    """`serve` on a host that serves as planned, but for what is changed."""
    paths = deploy.read_at_start(PLAN)
    started = 1000.0
    found: dict[str, Any] = {
        "files": {
            **{path: testing.file("x", changed=started - 1) for path in paths},
            **{path: None for other in OTHERS for path in other.files},
            **changes.get("files", {}),
        },
        "units": {
            PATHS.unit: changes.get("unit", testing.unit(started=started)),
            PATHS.warmup_unit: changes.get("warming", testing.unit("inactive", "static", None)),
        },
        "process": changes.get(
            "process",
            {"pid": 5, "arguments": ARGUMENTS, "environment": dict(PLAN.service.environment), "key_is_current": True},
        ),
        "warm": changes.get("warm", []),
    }
    arguments = {
        "paths": PATHS,
        "arguments": ARGUMENTS,
        "environment": PLAN.service.environment,
        "read_at_start": paths,
        "check": CHECK,
        "others": OTHERS,
        "wait_seconds": 900,
    }
    return testing.prepare(serve, arguments, facts={ServiceFacts: found})


START = (
    f"systemctl daemon-reload{{stop}} && {{{{ systemctl reset-failed -- {PATHS.unit} 2>/dev/null || true; }}}} "
    f"&& systemctl enable -- {PATHS.unit} && systemctl start --no-block -- {PATHS.unit}"
)
RESTART = START.format(stop=f" && systemctl stop -- {PATHS.unit}")
JOIN = f"JoinStart({PATHS.unit})"


def test_a_server_as_planned_is_no_change() -> None:
    result = served()
    assert result.commands == [] and len(result.noop) == 1


@pytest.mark.parametrize("active", ["inactive", "failed"])
def test_a_stopped_server_is_started_and_its_answer_waited_for(active: str) -> None:
    result = served(unit=testing.unit(active), process=None)
    assert result.commands == [START.format(stop=""), JOIN]


def test_a_server_in_a_crash_loop_is_started_at_once() -> None:
    unit = testing.unit("activating", SubState="auto-restart", started=None)
    assert served(unit=unit, process=None).commands == [START.format(stop=""), JOIN]


def test_a_server_that_still_loads_is_joined() -> None:
    assert served(unit=testing.unit("activating", started=1000.0)).commands == [JOIN]


def changed_process(**change: Any) -> dict[str, Any]:
    process = {"pid": 5, "arguments": ARGUMENTS, "environment": dict(PLAN.service.environment), "key_is_current": True}
    return {**process, **change}


@pytest.mark.parametrize(
    "process",
    [
        changed_process(arguments=[*ARGUMENTS, "--enable-custom-logit-processor"]),
        changed_process(environment={**PLAN.service.environment, "CUDA_HOME": "/usr/local/cuda"}),
        changed_process(environment={**PLAN.service.environment, "PATH": None}),
        changed_process(key_is_current=False),
    ],
    ids=["arguments", "CUDA_HOME", "no PATH", "key"],
)
def test_a_process_started_otherwise_is_restarted(process: dict[str, Any]) -> None:
    result = served(process=process)
    assert result.commands == [RESTART, JOIN]
    assert len(result.log) == 1


@pytest.mark.parametrize("path", deploy.read_at_start(PLAN))
def test_a_server_that_has_read_an_older_file_is_restarted(path: str) -> None:
    """A patched source file, a shard, the unit: what the process has in memory is not what lies there now."""
    result = served(files={path: testing.file("y", changed=2000.0)})
    assert result.commands == [RESTART, JOIN]


def test_the_compiler_is_waited_for_before_the_server_starts() -> None:
    warming = testing.unit("activating", "static")
    result = served(unit=testing.unit("inactive"), process=None, warm=["no receipt"], warming=warming)
    assert result.commands == [f"Join({PATHS.warmup_unit})", START.format(stop=""), JOIN]


def test_a_running_server_is_not_restarted_because_its_cache_is_made_again() -> None:
    result = served(warm=["missing"], warming=testing.unit("activating", "static"))
    assert result.commands == [f"Join({PATHS.warmup_unit})"]


def test_another_profile_is_stopped_before_and_removed_after() -> None:
    """Until the last moment the old profile serves; a file of it that stays would come back at the next boot."""
    old = layout.ServicePaths("tp8")
    result = served(
        unit=testing.unit("inactive", ""),
        process=None,
        files={path: testing.file("old") for path in old.files},
    )
    stop = f" && systemctl disable -- {old.unit} && systemctl stop -- {old.unit}"
    assert result.commands[:2] == [START.format(stop=stop), JOIN]
    assert set(result.files) == set(old.files)
    assert result.commands[-1] == "systemctl daemon-reload"


def test_no_process_has_no_differences() -> None:
    assert differences(None, ["a"], {"B": "c"}) == []


# --- on the host ---


def test_a_key_is_made_once_and_for_root_alone(tmp_path: Path) -> None:
    key, configuration = tmp_path / "keys/api-key", tmp_path / "keys/keys.yaml"
    assert probe.key_state(str(key), str(configuration)) == "missing"
    key_on_host.act(str(key), str(configuration))
    made = key.read_text()
    assert content.key_problem(made.strip()) is None and len(made) > 40
    assert {stat.S_IMODE(path.stat().st_mode) for path in (key, configuration)} == {0o600}
    assert json.loads(configuration.read_text()) == {"api-key": made.strip()}
    assert probe.key_state(str(key), str(configuration)) == "good"
    key.chmod(0o644)
    assert probe.key_state(str(key), str(configuration)) == "open to others"
    key_on_host.act(str(key), str(configuration))
    assert probe.key_state(str(key), str(configuration)) == "good" and key.read_text() == made
    configuration.write_text('{"api-key": "another"}')
    assert probe.key_state(str(key), str(configuration)) == "unknown to the server"
    key_on_host.act(str(key), str(configuration))
    assert key.read_text() == made and json.loads(configuration.read_text()) == {"api-key": made.strip()}


def test_two_keys_on_two_hosts_differ(tmp_path: Path) -> None:
    for name in ("one", "two"):
        key_on_host.act(str(tmp_path / name / "api-key"), str(tmp_path / name / "keys.yaml"))
    assert (tmp_path / "one/api-key").read_text() != (tmp_path / "two/api-key").read_text()


def test_an_unusable_key_is_not_replaced_silently(tmp_path: Path) -> None:
    key = tmp_path / "api-key"
    key.write_text("\n")
    assert probe.key_state(str(key), str(tmp_path / "keys.yaml")).startswith("unusable")
    with pytest.raises(Problem, match="Fix: "):
        key_on_host.act(str(key), str(tmp_path / "keys.yaml"))


def test_a_check_that_cannot_run_is_a_cold_cache(tmp_path: Path) -> None:
    assert probe.cold([str(tmp_path / "no-python"), "x"])
    assert probe.cold(["/bin/true"]) == []
    assert probe.cold(["/bin/sh", "-c", "echo because; exit 3"]) == ["because"]


# --- the engine's log ---


def test_the_key_is_not_logged_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang logs its arguments at start, api_key among them; a traceback may show it too."""
    (tmp_path / "api-key").write_text(KEY + "\n")
    program = (
        "import json, logging, logging.config, sys\n"
        "logging.config.dictConfig(json.load(sys.stdin))\n"
        "log = logging.getLogger('sglang.srt.entrypoints.engine')\n"
        f"log.info(\"server_args=ServerArgs(api_key='{KEY}', port=1)\")\n"
        f"try: raise ValueError('{KEY}')\n"
        "except ValueError: log.exception('failed')\n"
        f"log.info('header %s', 'Bearer {KEY}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(content.engine_logging(planned())),
        env={"CREDENTIALS_DIRECTORY": str(tmp_path), "PYTHONPATH": str(TOOLS), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert KEY not in said
    assert said.count(engine_log.HIDDEN) == 3 and "port=1" in said and "ValueError" in said


@pytest.mark.parametrize(
    ("title", "rank"),
    [
        ("sglang::scheduler", ""),
        ("sglang::scheduler_PP2_TP0", " PP2 TP0"),
        ("sglang::scheduler_PP0_ATTN_CP1_MOE_DP0_TP7_EP7", " PP0 ATTN_CP1 MOE_DP0 TP7 EP7"),
        ("/opt/x/bin/python\0-m\0sglang.launch_server", ""),
    ],
)
def test_a_schedulers_rank_is_in_front_of_its_lines(title: str, rank: str) -> None:
    assert engine_log.rank(title) == rank


# --- the readiness probe, against a server of ours on loopback ---

READINESS = {**content.readiness(PLAN), "user": "root", "seconds": 20}
HASTY = """
import sys
sys.path.insert(0, sys.argv[1])
import ready_probe
ready_probe.BETWEEN_LOOKS = 0.1
sys.exit(ready_probe.main(sys.argv[2:]))
"""
SUM, PREFIX, CALL = PLAN.service.questions


def reply(content: str | None = None, ended: str = "stop", cached: int | None = 0, **message: Any) -> dict[str, Any]:
    """A chat completion, as SGLang says it."""
    usage = {"prompt_tokens": 400, "prompt_tokens_details": {"cached_tokens": cached} if cached else None}
    return {"choices": [{"message": {"content": content, **message}, "finish_reason": ended}], "usage": usage}


def calling(name: str = "multiply", arguments: Any = '{"a": 17, "b": 23}') -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return reply(
        ended="tool_calls", tool_calls=[{"id": "functions.multiply:0", "type": "function", "function": function}]
    )


class Server:
    """Answers right, but where told otherwise: `health` are statuses in their order, the last one for ever; `instead`
    are, by the number of the request, a status, a reply or the bytes of one."""

    def __init__(self) -> None:
        self.health = [200]
        self.instead: dict[int, int | dict[str, Any] | bytes] = {}
        self.seconds = 0.0
        self.asked: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(outer.health.pop(0) if len(outer.health) > 1 else outer.health[0])
                self.end_headers()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append({**body, "authorization": self.headers["Authorization"]})
                answer = outer.instead.get(len(outer.asked), outer.right(body))
                time.sleep(outer.seconds)
                self.send_response(answer if isinstance(answer, int) else 200)
                self.end_headers()
                refused = f"no: {KEY}".encode()
                said = refused if isinstance(answer, int) else answer if isinstance(answer, bytes) else None
                with contextlib.suppress(BrokenPipeError):
                    self.wfile.write(said if said is not None else json.dumps(answer).encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()

    def right(self, body: dict[str, Any]) -> dict[str, Any]:
        text = body["messages"][0]["content"]
        if "tools" in body:
            return calling()
        if text == SUM.prompt:
            return reply("17 times 23 is 391.")
        before = [each["messages"][0]["content"] for each in self.asked[:-1]]
        words = re.findall(r"the word (\w+)", text)
        return reply(f"They are {' and '.join(words)}.", cached=390 if text in before else 8)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()
    made.thread.join()


Ask = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def ask(tmp_path: Path, server: Server) -> Ask:
    """Run the probe as systemd does, with shorter pauses."""
    (tmp_path / "api-key").write_text(KEY + "\n")
    (tmp_path / "run").mkdir()

    def run(*options: str, process: int | None = None, **changes: Any) -> subprocess.CompletedProcess[str]:
        asked = {**READINESS, "address": server.address, "key": str(tmp_path / "api-key"), **changes}
        (tmp_path / "readiness.json").write_text(json.dumps(asked))
        environment = {"RUNTIME_DIRECTORY": str(tmp_path / "run"), "PATH": os.environ["PATH"]}
        if process is not None:
            environment["MAINPID"] = str(process)
        command = [sys.executable, "-I", "-c", HASTY, str(TOOLS), str(tmp_path / "readiness.json"), *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run


def test_ready_is_right_answers_on_every_way_that_requests_take(ask: Ask, server: Server, tmp_path: Path) -> None:
    """Sampled; a long text computed, and read from the prefix cache; a call of a function."""
    server.health = [503, 503, 200]
    done = ask(process=os.getpid())
    assert done.returncode == 0, done.stderr
    assert all((asked["temperature"], asked["top_p"]) == (1.0, 0.95) for asked in server.asked)
    assert all(asked["authorization"] == f"Bearer {KEY}" for asked in server.asked)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["phase"] == "ready"
    given = {answer["question"]: answer for answer in status["answers"]}
    assert list(given) == ["sampled answer", "long prefix", "long prefix, again", "tool call"]
    assert "391" in given["sampled answer"]["answer"] and given["tool call"]["answer"] == 'multiply({"a": 17, "b": 23})'
    assert [given[name]["cached_tokens"] for name in given] == [0, 8, 390, 0]
    assert "390 of them from the prefix cache" in done.stdout
    assert "starting" in done.stdout and KEY not in done.stdout + done.stderr


def test_the_same_text_comes_twice_and_no_other_start_has_sent_it(ask: Ask, server: Server) -> None:
    for _ in range(2):
        assert ask(process=os.getpid()).returncode == 0
    texts = [asked["messages"][0]["content"] for asked in server.asked]
    assert texts[1] == texts[2] and texts[5] == texts[6]
    assert texts[1] != texts[5] and texts[1].partition("\n")[2] == texts[5].partition("\n")[2]
    assert READINESS["copy"] not in texts[1]


WRONG_ANSWERS: dict[str, tuple[dict[str, Any] | bytes, int, tuple[str, ...]]] = {
    # What comes instead, in place of which of the four answers; what the message names.
    "rubbish": (
        reply("!!!!!!"),
        1,
        ("sampled answer: asked 'What is 17 times 23?'", "'!!!!!!' (ended by stop)", "'391'"),
    ),
    "thinking until its tokens end": (
        reply(None, "length", reasoning_content="Let me see"),
        1,
        ("ended by length, after 10 characters of thinking", "'391'"),
    ),
    "one word of a long text": (reply("heron"), 2, ("long prefix: asked", "'heron'", "'heron' and 'maple'")),
    "rubbish that holds the letters of both words": (
        reply("herambaambmapledondbambheron."),  # as an engine with a wrong prefix cache once said
        3,
        ("long prefix, again: the same text was answered right the first time", "'heron' and 'maple'"),
    ),
    "a longer number": (reply("The product is 13910."), 1, ("sampled answer: asked", "'391'")),
    "rubbish from the cache": (
        reply("heron heron", cached=390),
        3,
        (
            "long prefix, again: the same text was answered right the first time",
            "390 of its 400 tokens",
            "another profile or release",
        ),
    ),
    "no call": (reply("17 times 23 is 391."), 4, ("tool call: asked", "no call but the answer", "multiply", "tools")),
    "a call left in the content": (
        reply('<|tool_calls_section_begin|><|tool_call_begin|>functions.multiply:0{"a": 17, "b": 23}'),
        4,
        ("a call left unparsed", "--tool-call-parser"),
    ),
    "a call left in the thinking": (
        reply("", reasoning_content="<|tool_calls_section_begin|><|tool_call_begin|>functions.multiply:0"),
        4,
        ("a call left unparsed", "--tool-call-parser"),
    ),
    "a call of another function": (calling("divide"), 4, ("found a call of divide", "wanted a call of multiply")),
    "other arguments": (calling(arguments='{"a": 17}'), 4, ('multiply with {"a": 17}', '{"a": 17, "b": 23}')),
    "arguments cut off": (calling(arguments='{"a": 17, "b'), 4, ("which is no JSON", '{"a": 17, "b": 23}')),
    "arguments that are no text": (calling(arguments={"a": 17, "b": 23}), 4, ("which is no JSON",)),
    "no JSON": (b"<html>", 1, ("sampled answer: no answer to the question",)),
    "other JSON": (b"[]", 2, ("a reply that is a list",)),
    "no choices": (b"{}", 4, ("a reply of another form", "KeyError")),
    "a call without a function": (reply(tool_calls=[{}]), 4, ("a reply of another form",)),
}


@pytest.mark.parametrize("case", WRONG_ANSWERS)
def test_a_wrong_answer_is_not_ready(ask: Ask, server: Server, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Healthy servers have been seen to do each of these. By hand one attempt is all there is."""
    instead, number, named = WRONG_ANSWERS[case]
    server.instead[number] = instead
    done = ask("--now")
    assert done.returncode == 1
    assert len(server.asked) == number
    for part in named:
        assert part in done.stderr, done.stderr
    assert "Fix: " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("answer", ["391", "It is **391**.", "17\u00d723=391", "$391$", "Maple: 391, then heron"])
def test_a_word_is_found_in_any_setting(answer: str) -> None:
    assert ready_probe.has_word(answer, "391")
    assert ready_probe.has_word(answer, "maple") == ("Maple" in answer)


@pytest.mark.parametrize("case", ["rubbish", "rubbish from the cache", "no call"])
def test_what_is_wrong_at_each_attempt_is_not_ready(ask: Ask, server: Server, case: str) -> None:
    instead, number, named = WRONG_ANSWERS[case]
    each = 2 if "cache" in case else 1
    server.instead = {number + each * attempt: instead for attempt in range(ready_probe.ATTEMPTS)}
    done = ask(process=os.getpid())
    assert done.returncode == 1 and all(part in done.stderr for part in named), done.stderr
    assert len(server.asked) == number + each * (ready_probe.ATTEMPTS - 1)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_one_unlucky_sample_is_forgiven(ask: Ask, server: Server, number: int) -> None:
    """The model samples. An attempt at a long text is both its answers, to a text of its own."""
    server.instead[number] = reply("it is 390")
    done = ask(process=os.getpid())
    assert done.returncode == 0 and "attempt 1 of 3" in done.stdout
    texts = [asked["messages"][0]["content"] for asked in server.asked]
    assert len(texts) == {3: 6}.get(number, 5)
    if number in (2, 3):
        assert texts[number - 1] != texts[number] == texts[number + 1]


def test_a_slow_answer_is_waited_for_no_longer_than_the_start_may_take(ask: Ask, server: Server) -> None:
    server.seconds = 4
    began = time.monotonic()
    done = ask(process=os.getpid(), seconds=2)
    assert done.returncode == 1 and "no answer to the question within 2 s" in done.stderr and "Fix: " in done.stderr
    assert time.monotonic() - began < 10


def test_a_refused_question_says_why_without_the_key(ask: Ask, server: Server) -> None:
    server.instead = dict.fromkeys(range(1, 9), 401)
    done = ask(process=os.getpid())
    assert done.returncode == 1 and "the server refused the question: 401" in done.stderr
    assert KEY not in done.stdout + done.stderr


def test_a_dead_server_is_told_at_once(ask: Ask, server: Server) -> None:
    """Waiting for the time-out of an hour would hide a crash that took seconds."""
    server.health = [503]
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    began = time.monotonic()
    done = ask(process=child.pid, seconds=1000)
    assert done.returncode == 1 and f"process {child.pid} ended" in done.stderr
    assert time.monotonic() - began < 10


def test_a_server_that_dies_of_a_question_is_told_at_once(ask: Ask, server: Server) -> None:
    """The first request is the first to run many kernels."""
    child = subprocess.Popen(["/bin/sleep", "600"])
    server.instead = dict.fromkeys(range(1, 9), 500)
    child.kill()
    child.wait()
    done = ask(process=child.pid, seconds=1000)
    assert done.returncode == 1 and f"process {child.pid} ended" in done.stderr
    assert len(server.asked) == 1


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen(["/bin/true"])
    try:
        for _ in range(200):
            if not ready_probe.alive(child.pid):
                break
            time.sleep(0.02)
        assert not ready_probe.alive(child.pid)
    finally:
        child.wait()
    assert ready_probe.alive(os.getpid())


def test_time_is_up_with_what_was_last_seen(ask: Ask, server: Server) -> None:
    server.health = [503]
    done = ask(process=os.getpid(), seconds=1)
    assert done.returncode == 1 and "says that it is starting" in done.stderr and "Fix: " in done.stderr


def test_by_hand_it_asks_each_question_and_prints_a_line_for_each_answer(ask: Ask, server: Server) -> None:
    done = ask("--now")
    assert done.returncode == 0, done.stderr
    given = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["question"] for answer in given] == [
        "sampled answer",
        "long prefix",
        "long prefix, again",
        "tool call",
    ]
    assert given[0]["answer"] == "17 times 23 is 391." and given[2]["cached_tokens"] == 390
    assert len(server.asked) == 4


def test_by_hand_no_server_is_told(ask: Ask, server: Server) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        done = ask("--now", address=f"http://127.0.0.1:{free.getsockname()[1]}")
    assert done.returncode == 1 and "refused" in done.stderr and "Fix: " in done.stderr


def test_a_reply_without_usage_is_judged_all_the_same(ask: Ask, server: Server) -> None:
    server.instead[1] = {"choices": reply("391")["choices"]}
    done = ask("--now")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["prompt_tokens"] is None


def test_no_key_is_told(ask: Ask, tmp_path: Path) -> None:
    done = ask(key=str(tmp_path / "nowhere"))
    assert done.returncode == 1 and "Fix: " in done.stderr


# --- the warm-up ---


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, Any]:
    """A configuration whose nvcc is a script that says its version."""
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    return {
        "release": "a" * 16,
        "architecture": "12.0f",
        "environment": {"CUDA_HOME": str(tmp_path / "cuda")},
        "library": str(tmp_path / "cache"),
        "receipt": str(tmp_path / "cache/warmed.json"),
        "nvcc": "13.0",
    }


def write_receipt(asked: dict[str, Any]) -> Path:
    """A receipt that holds, and its one library."""
    library = Path(asked["library"], "sampling/sampling.so")
    library.parent.mkdir(parents=True)
    library.write_bytes(b"code")
    files = [{"path": str(library), "sha256": jit_warmup.digest(library)}]
    receipt = {"format": jit_warmup.FORMAT, "asked": asked, "nvcc": "13.0.88", "modules": [{"files": files}]}
    jit_warmup.write_json(Path(asked["receipt"]), receipt)
    return library


def test_a_receipt_that_holds_is_warm(asked: dict[str, Any]) -> None:
    assert jit_warmup.why_not_warm(asked)
    write_receipt(asked)
    assert jit_warmup.why_not_warm(asked) == []


def test_a_changed_library_is_seen_and_removed(asked: dict[str, Any]) -> None:
    """To ninja a library that is newer than its sources is good, whatever is in it."""
    library = write_receipt(asked)
    library.write_bytes(b"cod3")
    assert any("other content" in reason for reason in jit_warmup.why_not_warm(asked))
    jit_warmup.forget_changed(Path(asked["receipt"]))
    assert not library.parent.exists()


def test_an_unchanged_library_is_kept(asked: dict[str, Any]) -> None:
    library = write_receipt(asked)
    jit_warmup.forget_changed(Path(asked["receipt"]))
    assert library.exists()


@pytest.mark.parametrize(("name", "value"), [("architecture", "10.3a"), ("release", "b" * 16), ("nvcc", "12.8")])
def test_another_wish_is_not_warm(asked: dict[str, Any], name: str, value: str) -> None:
    write_receipt(asked)
    assert any(name in reason for reason in jit_warmup.why_not_warm({**asked, name: value}))


def test_another_compiler_is_not_warm(asked: dict[str, Any]) -> None:
    write_receipt(asked)
    nvcc = Path(asked["environment"]["CUDA_HOME"], "bin/nvcc")
    nvcc.write_text(nvcc.read_text().replace("88", "99"))
    assert jit_warmup.why_not_warm(asked) == ["nvcc was 13.0.88, now 13.0.99"]


def test_a_compiler_of_another_toolkit_is_named(asked: dict[str, Any]) -> None:
    nvcc = Path(asked["environment"]["CUDA_HOME"], "bin/nvcc")
    nvcc.write_text(nvcc.read_text().replace("13.0", "12.8"))
    with pytest.raises(jit_warmup.Problem, match=r"release 12\.8, wanted 13\.0.*Fix: "):
        jit_warmup.nvcc_version(asked)
    nvcc.unlink()
    with pytest.raises(jit_warmup.Problem, match=r"no compiler that runs.*Fix: "):
        jit_warmup.nvcc_version(asked)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"modules": 3}', '{"modules": [{"files": [{}]}]}'])
def test_a_receipt_that_is_none_is_not_warm(asked: dict[str, Any], text: str) -> None:
    Path(asked["library"]).mkdir()
    Path(asked["receipt"]).write_text(text)
    assert jit_warmup.why_not_warm(asked)
    jit_warmup.forget_changed(Path(asked["receipt"]))


def test_an_environment_other_than_the_servers_is_refused(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled under another CUDA_HOME lies where nobody looks for it."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(jit_warmup.Problem, match=r"CUDA_HOME.*Fix: "):
        jit_warmup.check_environment(asked)
    monkeypatch.setenv("CUDA_HOME", asked["environment"]["CUDA_HOME"])
    jit_warmup.check_environment(asked)
    monkeypatch.setenv("FLASHINFER_JIT_VERBOSE", "1")
    with pytest.raises(jit_warmup.Problem, match="changes flags"):
        jit_warmup.check_environment(asked)


def fat_binary(*entries: tuple[int, int]) -> bytes:
    """(kind, architecture) of each entry, in the form that nvcc 13.0 writes."""
    body = b"".join(
        struct.pack("<HHIQIIHHI", kind, 0x101, 64, 8, 0, 0, 0, 0, architecture) + bytes(32) + b"compress"
        for kind, architecture in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_architectures_are_read_from_the_libraries_themselves() -> None:
    assert jit_warmup.gpu_architectures(b"\x7fELF" + fat_binary((2, 120)) + b"..." + fat_binary((2, 120))) == {120}
    assert jit_warmup.gpu_architectures(fat_binary((1, 90), (2, 103), (2, 120))) == {103, 120}
    assert jit_warmup.gpu_architectures(b"no GPU code" + bytes.fromhex("50ed55ba")) == set()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="wants nvcc")
def test_architectures_of_what_nvcc_writes(tmp_path: Path) -> None:
    """The form is documented nowhere: so it is held against the compiler itself."""
    (tmp_path / "a.cu").write_text("__global__ void twice(int *a) { *a *= 2; }\n")
    for number, more in ((120, []), (103, ["-Xfatbin=-compress-all"])):
        flags = [f"-gencode=arch=compute_{number}a,code=sm_{number}a", *more]
        output = tmp_path / "a.o"
        done = subprocess.run(["nvcc", "-c", tmp_path / "a.cu", "-o", output, *flags], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert jit_warmup.gpu_architectures(output.read_bytes()) == {number}


def test_as_many_compilers_as_memory_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for free_kib, jobs in ((1 << 20, 1), (8 << 20, 4), (1 << 30, 64)):
        monkeypatch.setattr(
            Path, "read_text", lambda self, free=free_kib, **kw: f"MemFree: 1 kB\nMemAvailable: {free} kB\n"
        )
        assert jit_warmup.jobs() == jobs
