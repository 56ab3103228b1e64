"""kit on a real machine: SSH with checked host keys, an ordinary user with sudo, real systemd, links that are cut."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit_project import DEPLOY, ROOT, Project

pytestmark = [pytest.mark.slow, pytest.mark.lab]

# A lab of its own, beside whatever lab is up.
LAB = {"KIMI_NODES_LAB": "kit", "KIMI_NODES_LAB_NETWORK": "10.78.0"}
SECRET = "hunter2-do-not-show-me"

ROLE = """
from kit import files, starting, units
from kit.command import host
from kit.probe import Probe
from kit.role import operation, role

WORK = '''import json, os, sys, time
for number in range(int(sys.argv[1])):
    with open("/run/work.new", "w") as file:
        json.dump({"phase": "working", "done": number, "total": int(sys.argv[1]), "unit": "steps"}, file)
    os.rename("/run/work.new", "/run/work.json")
    time.sleep(1)
while os.path.exists("/run/hold"):
    time.sleep(0.2)
print("last words")
sys.exit(int(sys.argv[2]))
'''


class Facts(Probe):
    program = "looking.py"


@operation("Lay down")
def lay_down(secret):
    wanted = [
        files.Directory("/etc/kit", "750", "root", "owner"),
        files.File("/etc/kit/secret", secret, mode="600", secret=True),
        files.File("/etc/kit/owned", "x", user="owner", group="owner"),
        files.Link("/etc/kit/current", "owned"),
    ]
    yield from files.apply(wanted, Facts.read(paths=[item.path for item in wanted], unit="x.service")["files"])


@operation("Work")
def work(seconds, code):
    path = "/etc/systemd/system/kit-work.service"
    unit = f"[Service]\\nType=oneshot\\nExecStart=/usr/bin/python3 /run/work.py {seconds} {code}\\n"
    yield from files.apply([files.File(path, unit), files.File("/run/work.py", WORK)])
    yield "systemctl daemon-reload"
    yield from units.start("kit-work.service")
    yield from units.join("kit-work.service", "Working", status_file="/run/work.json")


@operation("Join")
def join():
    state = Facts.read(paths=[], unit="kit-work.service")["units"]["kit-work.service"]
    yield from units.join("kit-work.service", "Working", status_file="/run/work.json", state=state)


@operation("Serve")
def serve(seconds, code):
    # Ready, or failed, some seconds after its start; systemd would try again half a minute later.
    path = "/etc/systemd/system/kit-serve.service"
    unit = (f"[Service]\\nType=exec\\nExecStart=/bin/sleep infinity\\nExecStartPost=/usr/bin/python3 /run/work.py "
            f"{seconds} {code}\\nTimeoutStartSec=600\\nRestart=always\\nRestartSec=30\\n"
            "[Install]\\nWantedBy=multi-user.target\\n")
    state = Facts.read(paths=[path], unit="kit-serve.service")
    state = state["units"]["kit-serve.service"]
    if state["ActiveState"] == "active":
        host().noop("it serves")
        return
    if state["ActiveState"] != "activating":
        yield from files.apply([files.File(path, unit), files.File("/run/work.py", WORK)])
        yield from starting.start("kit-serve.service")
    yield from starting.join("kit-serve.service", "Starting", status_file="/run/work.json", wait_seconds=300)


@role("options")
def options():
    import socket
    sock = host().connector.client.get_transport().sock
    print("OPTIONS", [sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                      for name in ("TCP_NODELAY", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT")])
"""


class Machine:
    """h1 of the lab and a project whose inventory has it, reached as `owner`, who must use sudo."""

    def __init__(self, folder: Path):
        from tests.lab import settings

        lab = settings.read({**os.environ, **LAB})
        self.ssh_config = lab.ssh_config
        self.project = Project(folder, {"KIMI_NODES_COUNT_COMMANDS": "1"})
        data = {
            "ssh_hostname": lab.address("h1"),
            "ssh_user": "owner",
            "ssh_key": str(lab.identity),
            "ssh_known_hosts_file": str(lab.known_hosts),
            "ssh_strict_host_key_checking": "yes",
            "_sudo": True,
        }
        self.project.write("hosts.py", f"hosts = [('h1', {data!r})]\n")
        self.project.write("role.py", ROLE)
        self.project.write(
            "looking.py",
            "from kit import on_host\ndef probe(paths, unit):\n"
            "    return {'files': on_host.files(paths), 'units': on_host.units([unit])}\n",
        )

    def deploy(self, *calls: str) -> None:
        self.project.write("deploy.py", DEPLOY + "import role\n" + "".join(f"role.{call}\n" for call in calls))

    def shell(self, command: str) -> str:
        ssh = ["ssh", "-F", str(self.ssh_config), "-o", "ControlPath=none", "h1", command]
        return subprocess.run(ssh, capture_output=True, text=True, check=True).stdout


def lab(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.lab", *arguments], cwd=ROOT, env={**os.environ, **LAB}, check=True, timeout=400
    )


@pytest.fixture(scope="module")
def booted() -> Iterator[None]:
    try:
        lab("up", "h1")
        yield
    finally:
        lab("down")


@pytest.fixture
def machine(booted: None, tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_socket_options_reach_the_real_connection(machine: Machine) -> None:
    machine.deploy("options()")
    assert "OPTIONS [1, 15, 30000]" in machine.project.run("-y", inventory="hosts.py").out


def test_files_over_ssh_and_sudo_and_a_second_run_without_change(machine: Machine) -> None:
    machine.deploy(f"lay_down({SECRET!r})")
    first = machine.project.run("-y", "-vvv", "--debug", "--diff", inventory="hosts.py")
    assert first.code == 0, first.text
    assert SECRET not in first.text
    found = machine.shell("cd /etc/kit && stat -c '%n %a %U:%G' . secret owned && readlink current && cat secret")
    assert found == f". 750 root:owner\nsecret 600 root:root\nowned 644 owner:owner\nowned\n{SECRET}"
    second = machine.project.run("-y", inventory="hosts.py")
    assert second.code == 0
    assert "[h1] No changes" in second.err
    assert "[h1] remote commands: 1 (Execute 1)" in second.err


def test_a_secret_stands_in_no_process_of_the_machine(machine: Machine) -> None:
    """Looked for on the machine itself, as often as it can look, while the file is written again and again."""
    watch = (
        "end=$(($(date +%s) + 8)); n=0; while [ $(date +%s) -lt $end ]; do n=$((n+1)); "
        "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; done > /run/seen; echo $n rounds"
    )
    ssh = ["ssh", "-F", str(machine.ssh_config), "-o", "ControlPath=none", "h1", watch]
    with subprocess.Popen(ssh, stdout=subprocess.PIPE, text=True) as watcher:
        for number in range(3):
            machine.deploy(f"lay_down({SECRET + str(number)!r})")
            assert machine.project.run("-y", inventory="hosts.py").code == 0
        out, _ = watcher.communicate(timeout=30)
    assert "rounds" in out
    assert int(machine.shell("grep -c 'python3 -I -X utf8 -c' /run/seen")) > 0  # it has seen our programs at work
    assert machine.shell("grep -c hunter2 /run/seen || true").strip() == "0"
    assert machine.shell("ls -A /etc/kit").split() == ["current", "owned", "secret"]


def test_work_outlives_a_cut_link_and_is_joined_again(machine: Machine) -> None:
    """45 s without a link: the operating system gives the connection up, the unit goes on, the run joins it again."""
    machine.deploy("work(50, 0)")
    machine.shell("touch /run/hold")  # it ends when it has been joined, however long connecting again takes
    said = ""
    with machine.project.start("-y", inventory="hosts.py") as process:
        watchdog = threading.Timer(240, process.kill)
        watchdog.start()
        try:
            _wait_for(lambda: "ok" in machine.shell("test -e /run/work.json && echo ok || true"))
            lab("cut", "h1")
            try:
                time.sleep(45)
            finally:
                lab("heal", "h1")
            assert process.stderr
            for line in process.stderr:
                said += line
                if "of 50 steps" in said.rpartition("connecting again")[2] and "connecting again" in said:
                    break
            machine.shell("rm /run/hold")
            out, rest = process.communicate(timeout=120)
        finally:
            watchdog.cancel()
            process.kill()
    assert process.returncode == 0, out + said + rest
    assert "Working: connection lost, kit-work.service goes on; connecting again" in said
    assert machine.shell("journalctl --unit=kit-work.service --output=cat | grep -c 'last words'").strip() == "1"


def test_ctrl_c_leaves_the_unit_at_work_and_the_next_run_joins_it(machine: Machine) -> None:
    machine.deploy("work(12, 0)")
    process = machine.project.start("-y", inventory="hosts.py")
    try:
        _wait_for(
            lambda: "working" in machine.shell("systemctl is-active kit-work | sed s/activating/working/ || true")
        )
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130
    assert machine.shell("systemctl is-active kit-work || true").strip() == "activating"
    machine.deploy("join()")
    done = machine.project.run("-y", inventory="hosts.py")
    assert done.code == 0, done.text
    assert "steps" in done.err
    assert machine.shell("systemctl is-active kit-work || true").strip() == "inactive"
    assert "[h1] No changes" in machine.project.run("-y", inventory="hosts.py").err


def test_a_unit_that_fails_shows_its_last_words(machine: Machine) -> None:
    machine.deploy("work(1, 3)")
    done = machine.project.run("-y", inventory="hosts.py")
    assert done.code == 1
    assert "Refused: Working: last words" in done.err
    assert (
        "Refused: Working: kit-work.service failed (exit-code, exit code 3), wanted it to end well. Fix: " in done.err
    )


def test_ctrl_c_leaves_the_start_going_on_and_the_next_run_joins_it(machine: Machine) -> None:
    """A server loads for minutes: who stops to wait for it has not stopped it, and the next one waits for the same
    start."""
    machine.deploy("serve(15, 0)")
    process = machine.project.start("-y", inventory="hosts.py")
    serving = "systemctl show --value --property=MainPID,ActiveState kit-serve | paste -sd ' '"
    try:
        _wait_for(lambda: machine.shell(serving).split()[-1:] == ["activating"])
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130 and "Units started on the hosts go on" in err
    pid, state = machine.shell(serving).split()
    assert state == "activating" and pid != "0"
    done = machine.project.run("-y", inventory="hosts.py")
    assert done.code == 0, done.text
    assert "Starting: working" in done.err
    assert machine.shell(serving).split() == [pid, "active"]
    assert "[h1] No changes" in machine.project.run("-y", inventory="hosts.py").err
    machine.shell("systemctl stop kit-serve")


def test_a_machine_without_python_is_refused_with_the_command_to_mend_it(machine: Machine) -> None:
    machine.shell("for f in /usr/bin/python3*; do mv $f /root/; done")
    try:
        machine.deploy(f"lay_down({SECRET!r})")
        done = machine.project.run("-y", inventory="hosts.py")
    finally:
        machine.shell("mv /root/python3* /usr/bin/")
    assert done.code == 1
    assert "there is no python3 on this host, wanted 3.10 or newer. Fix: apt-get install python3" in done.err


def _wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)
