"""What systemd makes of a start of the server: the unit as it is laid down, the readiness probe, and a real systemd, on
this machine's own /usr. In place of the engine, and of what wants the release or nftables before it, stands a program
that loads, dies or lies as it is told."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_inference_service import KEY, TOOLS, planned

from node import layout, systemd
from roles.inference_service import content

pytestmark = pytest.mark.lab

PLAN = planned("cpu", start_timeout=900)
UNIT = PLAN.service.unit
USER = 60_900  # in no /etc/passwd but the one that is laid down here

INSTEAD = """\
[Service]
ExecStartPre=
ExecStart=
ExecStart=/usr/bin/python3 -I /in/engine.py
RestartSec=1
"""

ENGINE = '''\
"""Instead of the engine. /out/told: {"loads": seconds, "dies": seconds or null, "rubbish": for a text come before}."""
import http.server, json, os, pathlib, re, signal, threading, time

told = json.loads(pathlib.Path("/out/told").read_text())
began, asked = time.monotonic(), []


def die():
    time.sleep(told["dies"])
    print("RuntimeError: what the engine says before it dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # as SGLang ends itself and its children


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() > began + told["loads"] else 503)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        asked.append(text)
        function = {"name": "multiply", "arguments": '{"a": 17, "b": 23}'}
        words = " and ".join(re.findall(r"the word (\\w+)", text)) or "391"
        message = {"content": words, **({"tool_calls": [{"function": function}]} if "tools" in body else {})}
        if told["rubbish"] and text in asked[:-1]:
            message = {"content": "!!!!!!"}
        cached = 390 if text in asked[:-1] else 0
        usage = {"prompt_tokens": 400, "prompt_tokens_details": {"cached_tokens": cached}}
        reply = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *arguments):
        pass


print("loading", flush=True)
if told["dies"] is not None:
    threading.Thread(target=die, daemon=True).start()
http.server.ThreadingHTTPServer(("127.0.0.1", 30000), Handler).serve_forever()
'''

DRIVE = '''\
"""Each case of /in/cases.json in turn, on one systemd. What came of them is /out/seen.json."""
import json, pathlib, subprocess, time

UNIT = "%(unit)s"


def systemctl(*arguments):
    return subprocess.run(["systemctl", *arguments], capture_output=True, text=True)


def state():
    shown = systemctl("show", "-p", "ActiveState,SubState,Result,NRestarts,MainPID", UNIT).stdout
    return dict(line.split("=", 1) for line in shown.splitlines())


def wait(condition, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until and not condition(state()):
        time.sleep(0.2)


seen = {}
for name, case in json.loads(pathlib.Path("/in/cases.json").read_text()).items():
    systemctl("stop", UNIT)
    systemctl("reset-failed", UNIT)
    pathlib.Path("/out/told").write_text(json.dumps(case["told"]))
    began, at = time.monotonic(), time.time()
    done = systemctl("start", UNIT)
    found = {"code": done.returncode, "seconds": time.monotonic() - began, "after": state()}
    if case["then"] == "loop":
        wait(lambda now: now["ActiveState"] == "failed", 60)
    if case["then"] == "kill":
        subprocess.run(["kill", "-KILL", found["after"]["MainPID"]])
        wait(lambda now: now["ActiveState"] == "active" and now["MainPID"] != found["after"]["MainPID"], 30)
    if case["then"] == "stop":
        found["stop"] = systemctl("stop", UNIT).returncode
    found["end"] = state()
    status = pathlib.Path("%(status)s")
    found["status"] = json.loads(status.read_text()) if status.exists() else None
    journal = ["journalctl", "-o", "cat", "--since", f"@{at:.6f}", "-u", UNIT]
    found["journal"] = subprocess.run(journal, capture_output=True, text=True).stdout
    seen[name] = found
    pathlib.Path("/out/seen.json").write_text(json.dumps(seen))
'''

CASES: dict[str, dict[str, Any]] = {
    "good": {"told": {"loads": 3, "dies": None, "rubbish": False}, "then": "kill"},
    "stopped": {"told": {"loads": 0, "dies": None, "rubbish": False}, "then": "stop"},
    "dies while it loads": {"told": {"loads": 600, "dies": 2, "rubbish": False}, "then": "loop"},
    "rubbish from the cache": {"told": {"loads": 0, "dies": None, "rubbish": True}, "then": ""},
}


def lay(folder: Path) -> list[str]:
    """What the unit wants, below `folder`: options that bind it to its place."""
    options = []

    def bind(place: str, writable: bool = False, text: str | None = None, mode: int = 0o644) -> Path:
        source = folder / place.replace("/", "_")
        if text is None:
            source.mkdir()
        else:
            source.write_text(text)
            source.chmod(mode)
        options.append(f"--bind{'' if writable else '-ro'}={source}:{place}")
        return source

    users = f"root:x:0:0::/root:/bin/sh\n{layout.SERVICE_USER}:x:{USER}:{USER}::/:/usr/sbin/nologin\n"
    bind("/etc/passwd", text=users)
    bind("/etc/group", text=f"root:x:0:\n{layout.SERVICE_USER}:x:{USER}:\n")
    bind(PLAN.service_paths.environment, text=systemd.environment_file(PLAN.service.environment))
    bind(PLAN.service_paths.readiness, text=json.dumps(content.readiness(PLAN)))
    for item in content.key_files(KEY):
        bind(item.path, text=str(item.content), mode=0o600)
    os.chown(bind(PLAN.paths.cache, writable=True), USER, USER)
    for part in PLAN.weights:
        bind(part.paths.snapshot)
    options.append(f"--bind-ro={TOOLS}:{layout.TOOLS}")
    units = "/run/systemd/system"
    bind(f"{units}/{UNIT}", text=content.render("sglang.service.j2", PLAN))
    bind(f"{units}/{UNIT}.d/instead.conf", text=INSTEAD)
    drive = "[Unit]\nRequires=basic.target\nAfter=basic.target\n[Service]\nType=oneshot\n"
    drive += "ExecStart=/usr/bin/python3 -I /in/drive.py\nExecStopPost=/bin/systemctl --no-block --force poweroff\n"
    bind(f"{units}/drive.service", text=drive)
    given = {"unit": UNIT, "status": PLAN.service_paths.status}
    bind("/in/drive.py", text=DRIVE % given)
    bind("/in/engine.py", text=ENGINE)
    bind("/in/cases.json", text=json.dumps(CASES))
    bind("/out", writable=True)
    return options


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of each case."""
    folder = tmp_path_factory.mktemp("start")
    folder.chmod(0o755)
    command = [
        "systemd-nspawn", "--quiet", "--directory=/", "--volatile=yes", "--register=no", "--keep-unit", "--boot",
        "--private-network", "--console=pipe", f"--machine=kimi-start-{os.getpid()}", *lay(folder),
        "systemd.unit=drive.service",
    ]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, check=False)
    result = folder / "_out/seen.json"
    assert result.exists(), f"{done.returncode}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    found: dict[str, dict[str, Any]] = json.loads(result.read_text())
    assert list(found) == list(CASES), f"{done.returncode}: {done.stdout[-3000:]}"
    return found


def test_a_start_is_over_when_all_is_answered_right(seen: dict[str, dict[str, Any]]) -> None:
    """Not when the process runs, not when the port is open: whoever waits for the start can use the server."""
    good = seen["good"]
    assert good["code"] == 0, good["journal"]
    assert good["seconds"] > CASES["good"]["told"]["loads"]
    assert (good["after"]["ActiveState"], good["after"]["SubState"]) == ("active", "running")
    assert good["status"]["phase"] == "ready" and len(good["status"]["answers"]) == 4
    assert "the server listens and says that it is starting" in good["journal"]


def test_a_killed_server_comes_back_and_is_asked_again(seen: dict[str, dict[str, Any]]) -> None:
    good = seen["good"]
    assert good["end"]["ActiveState"] == "active" and good["end"]["NRestarts"] == "1", good["journal"]
    assert good["end"]["MainPID"] != good["after"]["MainPID"]
    assert good["journal"].count("tool call: ") == 2


def test_a_stop_is_no_failure_and_no_restart(seen: dict[str, dict[str, Any]]) -> None:
    stopped = seen["stopped"]
    assert (stopped["code"], stopped["stop"]) == (0, 0)
    assert (stopped["end"]["ActiveState"], stopped["end"]["Result"]) == ("inactive", "success")


def test_a_server_that_dies_while_it_loads_fails_its_start_at_once(seen: dict[str, dict[str, Any]]) -> None:
    """SGLang ends itself by SIGKILL, which the unit takes for a good end: the probe is who notices. Fifteen minutes are
    left to it here."""
    dead = seen["dies while it loads"]
    assert dead["code"] != 0 and dead["seconds"] < 15, dead
    said = dead["journal"].splitlines()
    last = next(at for at, line in enumerate(said) if line.startswith("not ready: "))
    assert "the server's process" in said[last] and "ended" in said[last] and "Fix: its last lines" in said[last]
    assert said[last - 1] == "RuntimeError: what the engine says before it dies"


def test_a_crash_loop_ends(seen: dict[str, dict[str, Any]]) -> None:
    """An engine that dies of its weights would else load 595 GB for ever."""
    dead = seen["dies while it loads"]
    assert dead["end"]["ActiveState"] == "failed", dead["journal"]
    assert dead["journal"].count("RuntimeError: what the engine says") == content.STARTS
    assert "Start request repeated too quickly" in dead["journal"]


def test_rubbish_from_the_prefix_cache_is_not_ready(seen: dict[str, dict[str, Any]]) -> None:
    rubbish = seen["rubbish from the cache"]
    assert rubbish["code"] != 0 and rubbish["after"]["ActiveState"] != "active", rubbish["journal"]
    assert "not ready: long prefix, again: the same text was answered right the first time" in rubbish["journal"]


def test_the_key_is_in_no_log(seen: dict[str, dict[str, Any]]) -> None:
    assert not [name for name, case in seen.items() if KEY in case["journal"]]
