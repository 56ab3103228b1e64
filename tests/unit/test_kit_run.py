"""Exit codes tell how a run ended, and pyinfra's insides are still where kit reaches for them."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit_project import DEPLOY, ROOT, Project

from kit import connection


def test_ctrl_c_exits_130_and_says_what_goes_on(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write(
        "deploy.py",
        DEPLOY + "from kit.role import operation\n"
        "@operation('Wait')\ndef wait(path):\n    yield f'touch {path}; sleep 20'\n"
        f"wait({str(tmp_path / 'begun')!r})\n",
    )
    process = project.start("-y")
    try:
        until = time.monotonic() + 20
        while not (tmp_path / "begun").exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, err = process.communicate(timeout=15)
    finally:
        process.kill()
    assert process.returncode == 130, out + err
    assert time.monotonic() - began < 5
    assert "Stopped by Ctrl-C. Units started on the hosts go on" in err
    assert "Traceback" not in out + err


HOSTS = "gpu = ['@local']\nlab = ['one.invalid', 'two.invalid']\n"


@pytest.mark.parametrize(
    ("arguments", "inventory", "told"),
    [
        (
            ["--limit", "four"],
            "hosts.py",
            "found no host for --limit and --exclude, wanted one of @local, one",
        ),
        (["--exclude", "*"], "hosts.py", "found no host for --limit and --exclude"),
        (["--limit", "gpu", "--exclude", "@*"], "hosts.py", "found no host for --limit and --exclude"),
        ([], "nobody.py", "found no host in the inventory"),
        ([], "no_such_file.py", "found no host in the inventory"),
    ],
)
def test_a_run_for_no_host_is_refused(tmp_path: Path, arguments: list[str], inventory: str, told: str) -> None:
    """pyinfra by itself warns at most, runs nothing and exits 0: to a script it is a good deploy."""
    project = guarded(tmp_path)
    done = project.run("-y", *arguments, inventory=inventory)
    assert done.code == 1, done.text
    assert told in done.err and "Fix: " in done.err and "Traceback" not in done.err


def test_a_run_for_some_hosts_is_for_those(tmp_path: Path) -> None:
    project = guarded(tmp_path)
    for arguments in (["--limit", "gpu"], ["--exclude", "lab"], ["--limit", "@l*", "--limit", "four"]):
        done = project.run("-y", *arguments, inventory="hosts.py")
        assert done.code == 0, done.text
        assert done.out.count("deployed to") == 1


def guarded(folder: Path) -> Project:
    """A project with the real config.py."""
    project = Project(folder)
    project.write("config.py", (ROOT / "config.py").read_text())
    project.write("hosts.py", HOSTS)
    project.write("nobody.py", "hosts = []\n")
    project.write("deploy.py", DEPLOY + "print('deployed to', host.name)\n")
    return project


def test_ctrl_c_exits_130_while_a_host_is_being_connected_to(tmp_path: Path) -> None:
    """A host that takes the connection and says nothing: paramiko waits, and no deploy code has run yet."""
    project = guarded(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        data = {"ssh_hostname": "127.0.0.1", "ssh_port": silent.getsockname()[1]}
        project.write("silent.py", f"hosts = [('silent', {data!r})]\n")
        process = project.start("-y", inventory="silent.py")
        try:
            silent.settimeout(20)
            connected, _ = silent.accept()
            with connected:
                time.sleep(0.3)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode == 130, out + err
    assert "Traceback" not in out + err


def test_a_good_run_exits_0_and_a_failed_command_1(tmp_path: Path) -> None:
    project = Project(tmp_path)
    for name, command, code in (("good.py", "true", 0), ("bad.py", "exit 7", 1)):
        project.write(
            name, DEPLOY + f"from kit.role import operation\n@operation('Do')\ndef do():\n    yield {command!r}\ndo()\n"
        )
        assert project.run("-y", deploy=name).code == code


def test_the_socket_of_a_connection_is_mended() -> None:
    """A real TCP connection, held the way paramiko holds it."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connected:
        client = SimpleNamespace(get_transport=lambda: SimpleNamespace(sock=connected))
        host = SimpleNamespace(connector=SimpleNamespace(client=client))
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 0
        assert connection.mend(host)  # type: ignore[arg-type]
        found = {
            name: connected.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        }
        assert found == {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0


@pytest.mark.parametrize(
    "connector",
    [
        SimpleNamespace(),
        SimpleNamespace(client=None),
        SimpleNamespace(client=SimpleNamespace(get_transport=lambda: None)),
        SimpleNamespace(client=SimpleNamespace(get_transport=lambda: SimpleNamespace(sock=object()))),
    ],
    ids=["@local", "not connected", "no transport", "behind a jump host"],
)
def test_where_there_is_no_socket_nothing_is_mended(connector: SimpleNamespace) -> None:
    assert not connection.mend(SimpleNamespace(connector=connector))  # type: ignore[arg-type]


def test_commands_are_counted_once_a_host_and_by_stage(tmp_path: Path) -> None:
    project = Project(tmp_path, environment={"KIMI_NODES_COUNT_COMMANDS": "1"})
    project.write(
        "deploy.py",
        DEPLOY + "run.begin()\nfrom pyinfra.facts.server import Kernel\nfrom kit.role import operation\n"
        "@operation('Do')\ndef do():\n    host.get_fact(Kernel)\n    yield 'true'\n    yield 'true'\n"
        "do()\n",
    )
    assert "[@local] remote commands: 3 (Execute 3)" in project.run("-y").err
    assert "[@local] remote commands: 1 (Prepare 1)" in project.run("--dry").err
    project.environment.clear()
    assert "remote commands" not in project.run("-y").err
