"""The server runs what the plan says, answers who has the key, and has nothing left to compile in front of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kit import files
from kit.program import probe_command
from node import layout
from node.patches import wanted_digest
from node.plan import Plan
from roles.inference_service import content
from tests.host import firewall_rules

COLLECTOR = Path(__file__).parent / "inference_service_on_host.py"
MEND = "Fix: run deploy.py"
RESTART = "Fix: run deploy.py; where it changes nothing, systemctl restart the service"
SCHEDULER = "sglang::scheduler"  # what SGLang calls these processes (setproctitle)


@pytest.fixture(scope="module")
def found(host: Any, plan: Plan) -> dict[str, Any]:
    """What there is of the service on the host, looked at in one command."""
    service = plan.service
    arguments = {
        "unit": service.unit,
        "units": [service.unit, layout.FIREWALL_UNIT, *service.conflicts],
        "paths": [
            layout.CURRENT,
            *(item.path for item in content.wanted(plan)),
            *content.patched_files(plan),
            *(path for other in content.other_services(plan) for path in other.files),
        ],
        "keys": layout.KEYS,
        "key": layout.API_KEY,
        "configuration": layout.API_KEY_CONFIGURATION,
        "searched": [
            layout.CONFIGURATION,
            layout.UNITS,
            layout.TOOLS,
            layout.STATE,
            plan.paths.cache,
            "/run/systemd/system",
        ],
        "receipt": plan.paths.warmup_receipt,
        "ninja": f"{plan.paths.bin}/ninja",
        "table": layout.FIREWALL_TABLE,
        "user": layout.SERVICE_USER,
        "address": f"http://{service.host}:{service.port}",
        "question": service.questions[0].body(service.name),
        "seconds": 300,
        "readiness": [
            "/usr/bin/python3",
            "-I",
            f"{layout.TOOLS}/ready_probe.py",
            plan.service_paths.readiness,
            "--now",
        ],
        "modules": plan.service_paths.modules,
        "cubins": plan.cubins and ["/usr/bin/python3", layout.CUBINS_AGENT, layout.CUBINS_CONFIGURATION, "--check"],
    }
    answer = host.run(probe_command(COLLECTOR, arguments).get_raw_value())
    assert answer.rc == 0, f"the host gives no answer: {answer.stderr.strip() or answer.stdout.strip()}"
    collected = json.loads(answer.stdout.splitlines()[-1])
    assert "found" in collected, f"the host cannot be looked at: {collected}"
    result: dict[str, Any] = collected["found"]
    return result


def main_process(found: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The server's main process. Fails where there is none."""
    processes = [process for process in found["processes"] if process["pid"] == found["main"]]
    assert processes, f"{plan.service.unit} has no process, wanted the server. Fix: journalctl -u {plan.service.unit}"
    process: dict[str, Any] = processes[0]
    return process


def test_the_unit_is_active_and_comes_back_after_a_boot(found: dict[str, Any], plan: Plan) -> None:
    """Active means that it has answered: its start ends with right answers to all that readiness asks. Enabled outlives
    a reboot."""
    state = found["units"][plan.service.unit]
    installed = state["UnitFileState"] or "not installed"
    wrong = f"{plan.service.unit} is {state['ActiveState']} ({state['Result']}), {installed}"
    ready = (state["ActiveState"], state["UnitFileState"]) == ("active", "enabled")
    assert ready, f"{wrong}, wanted active and enabled. Fix: run deploy.py; journalctl -u {plan.service.unit} says why"


def test_no_other_profile_is_left(found: dict[str, Any], plan: Plan) -> None:
    """Two servers want the same GPUs: whoever starts second dies of no memory, and after a boot it may be either."""
    missing = set(plan.service.conflicts) - set(found["conflicts"])
    assert not missing, f"{plan.service.unit} does not conflict with {', '.join(sorted(missing))}. {MEND}"
    running = [
        name for name in plan.service.conflicts if found["units"][name]["ActiveState"] not in ("inactive", "failed")
    ]
    assert not running, f"{', '.join(running)} runs beside {plan.service.unit}. {MEND}"
    left = [path for other in content.other_services(plan) for path in other.files if found["files"][path]]
    assert not left, f"files of another profile are left: {', '.join(left)}. {MEND}"


def test_files_are_the_plans(found: dict[str, Any], plan: Plan) -> None:
    """A unit edited by hand works until the next deploy undoes the edit: such a difference is to be seen now."""
    wrong = files.compare(found["files"], content.wanted(plan))
    assert not wrong, "; ".join(f"{path}: {reason}" for path, reason in wrong.items()) + f". {MEND}"


def test_systemd_has_read_the_files_that_are_there(found: dict[str, Any], plan: Plan) -> None:
    """A unit changed on disk and not loaded starts as something else after a boot than it runs as now."""
    state = found["units"][plan.service.unit]
    assert state["LoadState"] == "loaded", f"{plan.service.unit} is {state['LoadState']}. {MEND}"
    assert state["NeedDaemonReload"] == "no", f"{plan.service.unit} changed after systemd read it. {MEND}"


def test_the_process_was_started_as_planned(found: dict[str, Any], plan: Plan) -> None:
    """Files prove what the next start will be. CUDA_HOME and PATH of the running process decide what compiles for it
    now."""
    process = main_process(found, plan)
    wanted = [*plan.service.arguments, "--config", f"/run/credentials/{plan.service.unit}/keys.yaml"]
    assert process["arguments"] == wanted, f"found arguments {process['arguments']}, wanted {wanted}. {MEND}"
    wrong = {
        name: f"found {process['environment'].get(name)!r}, wanted {value!r}"
        for name, value in plan.service.environment.items()
        if process["environment"].get(name) != value
    }
    assert not wrong, "; ".join(f"{name}: {difference}" for name, difference in wrong.items()) + f". {MEND}"
    users = {each["user"] for each in found["processes"]}
    assert users == {layout.SERVICE_USER}, f"its processes run as {users}, wanted {layout.SERVICE_USER}. {MEND}"


def test_every_process_runs_the_current_release(found: dict[str, Any], plan: Plan) -> None:
    """A patch in the tree is worth nothing while the schedulers run an older release: what each process has mapped
    names its release."""
    link = found["files"][layout.CURRENT]
    assert link and link["target"] == plan.paths.environment, (
        f"{layout.CURRENT}: found {link and link['target']}, wanted {plan.paths.environment}. {MEND}"
    )
    main_process(found, plan)
    engines = []
    for process in found["processes"]:
        releases = {
            "/".join(path.split("/")[:5]) for path in process["mapped"] if path.startswith(layout.RELEASES + "/")
        }
        strangers = releases - {plan.paths.environment}
        assert not strangers, f"process {process['pid']} has libraries of {', '.join(sorted(strangers))} mapped. {MEND}"
        if any("/torch/lib/" in path for path in process["mapped"]):
            engines.append(process)
    assert len(engines) >= 2, (
        f"{len(engines)} processes of {plan.service.unit} have torch of {plan.paths.environment} mapped, "
        f"wanted the server and its scheduler. {MEND}"
    )


def test_the_running_schedulers_have_the_patches(found: dict[str, Any], plan: Plan) -> None:
    """The tree may have been patched after a scheduler read it, and Python keeps no source file open: so each process
    says itself which file it has loaded, and that the functions it holds are that file's (files/tools/engine_log.py).
    """
    schedulers = [
        process for process in found["processes"] if process["arguments"][:1] and SCHEDULER in process["arguments"][0]
    ]
    wanted_count = plan.profile.ranks
    assert len(schedulers) == wanted_count, (
        f"{plan.service.unit} has {len(schedulers)} schedulers, wanted {wanted_count}. "
        f"Fix: journalctl -u {plan.service.unit}"
    )
    arguments = " ".join(plan.service.arguments)
    for process in schedulers:
        said = found["modules"][str(process["pid"])]
        where = f"{plan.service_paths.modules}/{process['pid']}.json"
        assert said is not None, f"{where}: missing, wanted what {process['arguments'][0]} has loaded. {RESTART}"
        for module, patch in content.patched_modules(plan).items():
            seen = said[module]
            if seen is None and " ".join(patch.loaded_with) not in arguments:
                continue
            assert seen, f"{where}: {module} is not loaded, wanted it in a server with these arguments. {MEND}"
            path = f"{plan.site_packages}/{patch.file}"
            wanted = wanted_digest(patch, plan.release.pins[patch.package], plan.toolkit.nvcc)
            assert (seen["file"], seen["sha256"]) == (path, wanted), (
                f"{process['arguments'][0]} ({process['pid']}) has loaded {seen['file']}, sha256 {seen['sha256']}, "
                f"wanted {path}, sha256 {wanted} (patch {patch.id}). {RESTART}"
            )
            assert seen["runs"], (
                f"{process['arguments'][0]} ({process['pid']}) holds other functions than those of {path}. {RESTART}"
            )


def test_it_answers_right(found: dict[str, Any], plan: Plan) -> None:
    """Temperature and top_p are set, so that the kernels run that a health check never touches, and the content is
    checked: servers have been seen healthy while they said rubbish."""
    question, got = plan.service.questions[0], found["answers"]["with the key"]
    assert got["status"] == 200 and all(text in got["answer"] for text in question.expected), (
        f"asked {question.prompt!r}, found {got['answer']!r} (status {got['status']}), wanted "
        f"{' and '.join(question.expected)} in it. Fix: journalctl -u {plan.service.unit}; systemctl restart "
        f"{plan.service.unit} waits for a right one"
    )


def answers(found: dict[str, Any], plan: Plan) -> dict[str, dict[str, Any]]:
    """Question -> its answer, of all that the host's own readiness probe got right just now. Fails where one was
    not."""
    done = found["readiness"]
    assert done["code"] == 0, f"{plan.service.unit}: {done['err'].strip() or done['out'].strip() or done}"
    given = [json.loads(line) for line in done["out"].splitlines()]
    return {each["question"]: each for each in given}


def test_it_answers_all_that_makes_it_ready(found: dict[str, Any], plan: Plan) -> None:
    """What it could at its start it must still be able to: a text of several chunks of prefill, the same from the
    prefix cache, and a call of a function in the form that clients read (files/tools/ready_probe.py judges all)."""
    asked = [
        question.name if turn == 0 else f"{question.name}, again"
        for question in plan.service.questions
        for turn in range(question.times)
    ]
    assert list(answers(found, plan)) == asked, f"found answers to {list(answers(found, plan))}, wanted {asked}. {MEND}"


def test_a_prefix_is_read_from_the_cache(found: dict[str, Any], plan: Plan) -> None:
    """A chat sends all that was said before with each message: a server that computes it again each time is as slow as
    its longest conversation."""
    for question in plan.service.questions:
        if question.times > 1:
            again = answers(found, plan)[f"{question.name}, again"]
            asked, cached = again["prompt_tokens"], again["cached_tokens"]
            assert cached and cached > asked / 2, (
                f"{question.name}, asked again: {cached} of {asked} tokens came from the prefix cache, wanted most. "
                f"Fix: the line server_args= in journalctl -u {plan.service.unit} says why where it has "
                "disable_radix_cache=True"
            )


def test_a_new_prefix_is_not_read_from_the_cache(found: dict[str, Any], plan: Plan) -> None:
    """Otherwise the two answers would have taken the same way, and the one proof would stand for neither."""
    for question in plan.service.questions:
        if question.times > 1:
            first = answers(found, plan)[question.name]
            asked, cached = first["prompt_tokens"], first["cached_tokens"]
            assert cached is not None and cached < asked / 2, (
                f"{question.name}: {cached} of {asked} tokens came from the prefix cache the first time, wanted few. "
                f"{MEND}"
            )


@pytest.mark.parametrize("who", ["with no key", "with another key"])
def test_it_answers_nobody_without_the_key(found: dict[str, Any], plan: Plan, who: str) -> None:
    """Every program on the node reaches loopback; only who can read the key may use the GPUs."""
    status = found["answers"][who]["status"]
    assert status == 401, f"a question {who} got status {status}, wanted 401. {MEND}"


def test_nobody_but_root_can_read_the_key(found: dict[str, Any], plan: Plan) -> None:
    """Arguments and environment are for everybody or for every child, logs are copied: the key belongs in two root-only
    files."""
    for path, mode in (
        (layout.KEYS, "700"),
        (layout.API_KEY, "600"),
        (layout.API_KEY_CONFIGURATION, "600"),
    ):
        state = found["keys"][path]
        shown = f"{state['user']}, mode {state['mode']}" if state else "nothing"
        assert shown == f"root, mode {mode}", f"{path}: found {shown}, wanted root, mode {mode}. {MEND}"
    assert found["key_is_configured"], f"{layout.API_KEY_CONFIGURATION} does not hold the key. {MEND}"
    allowed = {layout.API_KEY, layout.API_KEY_CONFIGURATION}
    allowed |= {layout.EDGE_UPSTREAM} if plan.edge else set()  # root's and the edge's, see test_edge
    elsewhere = sorted(set(found["key_found_in"]) - allowed)
    assert not elsewhere, (
        f"the key is also in {', '.join(elsewhere)}. Fix: remove it there, and the key: deploy.py makes anew"
    )


def test_only_this_machine_reaches_the_server(found: dict[str, Any], plan: Plan) -> None:
    """SGLang's port takes commands that load weights and unpickle data; torch's store has no password at all."""
    sockets = found["listening"]
    served = [each for each in sockets if each["port"] == plan.service.port]
    assert served, f"nothing of {plan.service.unit} listens on port {plan.service.port}. {MEND}"
    wrong = [each for each in served if each["address"] != plan.service.host]
    assert not wrong, f"port {plan.service.port} is open on {wrong[0]['address']}, wanted {plan.service.host}. {MEND}"
    state = found["units"][layout.FIREWALL_UNIT]
    is_on = state["ActiveState"] == "active" and state["UnitFileState"] == "enabled"
    assert is_on, f"{layout.FIREWALL_UNIT} is {state['ActiveState']}, {state['UnitFileState']}. {MEND}"
    closed = closed_ports(found["firewall"])
    for each in sockets:
        loopback = each["address"].startswith("127.") or each["address"] in ("::1", "::ffff:127.0.0.1")
        assert loopback or each["port"] in closed, (
            f"process {each['pid']} listens on {each['address']} port {each['port']}, wanted loopback, or a port that "
            f"table {layout.FIREWALL_TABLE} closes ({sorted(closed)}). {MEND}"
        )


def test_the_server_reaches_nothing_but_what_it_may(found: dict[str, Any], plan: Plan) -> None:
    """SGLang fetches what a client names in image_url: so a client could make it ask the cloud's metadata, or machines
    that only the node reaches. What the kernel does with its connections is read from the rules that are loaded."""
    table, user = found["firewall"], found["service_user"]
    assert table, f"table {layout.FIREWALL_TABLE}: not loaded, wanted the server's connections judged by it. {MEND}"
    assert user is not None, f"user {layout.SERVICE_USER}: missing, wanted the server's own. {MEND}"
    public = "accept" if plan.service.fetch_media == "public" else "reject"
    wanted = {
        ("eth0", "169.254.169.254", 80): "reject",
        ("eth0", "10.0.0.1", 443): "reject",
        ("eth0", "100.64.0.1", 443): "reject",
        ("eth0", "fd00::1", 443): "reject",
        ("eth0", "9.9.9.9", 22): "reject",
        ("eth0", "9.9.9.9", 443): public,
        ("eth0", "2620:fe::fe", 443): public,
        ("lo", "127.0.0.1", 443): "reject",
        ("lo", "127.0.0.1", plan.service.nccl_port): "accept",
    }
    for (interface, address, port), verdict in wanted.items():
        seen = firewall_rules.verdict(table["nftables"], "output", user, interface, "tcp", address, port)
        assert seen == verdict, (
            f"a connection of {layout.SERVICE_USER} to {address} port {port}: found {seen} by table "
            f"{layout.FIREWALL_TABLE}, wanted {verdict}. {MEND}"
        )


def closed_ports(table: dict[str, Any] | None) -> set[int]:
    """Ports that a rule of nft's JSON drops for every interface but loopback."""
    ports: set[int] = set()
    for entry in (table or {}).get("nftables", []):
        rule = json.dumps(entry.get("rule", {}).get("expr", []))
        if '{"drop": null}' not in rule or '"op": "!=", "left": {"meta": {"key": "iif"}}, "right": "lo"' not in rule:
            continue
        for part in entry["rule"]["expr"]:
            match = part.get("match", {})
            if match.get("left") == {"payload": {"protocol": "tcp", "field": "dport"}}:
                right = match["right"]
                ports |= set(right["set"] if isinstance(right, dict) else [right])
    return ports


def test_nothing_is_left_to_compile(found: dict[str, Any], plan: Plan) -> None:
    """A server whose kernels are compiled by its first request passes every health check and keeps, or kills, its first
    user."""
    warm = found["warm"]
    check = f"Fix: run deploy.py; systemctl start {plan.service_paths.warmup_unit} compiles by itself"
    assert warm, f"{plan.paths.warmup_receipt}: missing, wanted the receipt of what was compiled. {check}"
    asked = content.warmup(plan)
    assert warm["receipt"]["asked"] == asked, f"compiled for {warm['receipt']['asked']}, wanted {asked}. {check}"
    recorded = {file["path"]: file["sha256"] for module in warm["receipt"]["modules"] for file in module["files"]}
    libraries = [path for path in recorded if path.endswith("/sampling/sampling.so")]
    assert libraries and all(path.startswith(plan.paths.cache + "/") for path in recorded), (
        f"found {list(recorded)}. {check}"
    )
    for path, digest in recorded.items():
        now = warm["files"][path]
        assert now and now["sha256"] == digest, f"{path}: {'other content' if now else 'missing'}. {check}"
    for path, said in warm["ninja"].items():
        assert "no work to do" in said, f"{path}: ninja would still do: {said.strip()[-200:]}. {check}"


def test_kernels_that_nvidia_ships_compiled_are_there(found: dict[str, Any], plan: Plan) -> None:
    """The server's user reaches no network: one that is missing is an error of whichever request first wants it."""
    if plan.cubins is None:
        pytest.skip(f"{plan.release.name} on this architecture uses none, or has them in its lock")
    done = found["cubins"]
    assert done["code"] == 0, (
        f"{plan.cubins.directory}: {(done['out'] + done['err']).strip()}. "
        f"Fix: systemctl start {layout.CUBINS_UNIT}, then journalctl -u {layout.CUBINS_UNIT} where it fails"
    )


def test_what_is_compiled_is_for_these_gpus(found: dict[str, Any], plan: Plan) -> None:
    """Code for another architecture loads, and fails at its first launch: the flags and the libraries themselves must
    say so."""
    assert found["warm"], f"{plan.paths.warmup_receipt}: missing, wanted compiled kernels. {MEND}"
    number = {
        architecture: int(architecture.rstrip("af").replace(".", "")) for architecture in plan.service.architectures
    }
    for path, flags in found["warm"]["flags"].items():
        names = {flag.rpartition("sm_")[2].rstrip("af") for flag in flags}
        assert names == {str(each) for each in number.values()}, f"{path}: found {flags}, wanted sm_{number}. {MEND}"
    assert found["warm"]["code"], f"no library of {plan.paths.warmup_receipt} is there. {MEND}"
    for path, code in found["warm"]["code"].items():
        assert code == sorted(number.values()), f"{path}: found code for {code}, wanted {number}. {MEND}"
