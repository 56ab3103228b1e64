"""One command tells all that a role wants to know; what goes wrong on a host is that host's clear line."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from pathlib import Path

import pytest
from kit_project import DEPLOY, Project, Run

from kit import on_host, program

PROBE = '''
from kit import on_host


def probe(how, **rest):
    """What a role would ask."""
    print("noise on stdout")
    if how == "crash":
        return {}["no such key"]
    if how == "problem":
        raise on_host.Problem("found 1 GPU, wanted 8. Fix: add 7")
    if how == "exit":
        raise SystemExit("gone")
    if how == "strange":
        return {"set": {1, 2}}
    if how == "slow":
        import time
        time.sleep(20)
    return {"how": how, "rest": rest, "files": on_host.files(["/etc/passwd"])}
'''
FACTS = """
from kit.probe import Probe


class Facts(Probe):
    program = "probe.py"
    timeout = 2
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    made.write("demo/__init__.py", "")
    made.write("demo/probe.py", PROBE)
    made.write("demo/facts.py", FACTS)
    made.write(
        "deploy.py",
        DEPLOY
        + "import json\nfrom kit.role import role\nfrom demo.facts import Facts\n"
        + "@role('demo')\ndef demo():\n    print('READ', json.dumps(Facts.read(**host.data.arguments)))\ndemo()\n",
    )
    return made


def ask(project: Project, how: str, **rest: object) -> Run:
    project.write("hosts.py", f"hosts = [('@local', {{'arguments': {dict(how=how, **rest)!r}}})]\n")
    return project.run("-y", inventory="hosts.py")


def test_what_the_probe_returns_comes_back_whole(project: Project) -> None:
    awkward = {"quotes": "'\"`$(id)\\ %s {}", "unicode": "Größe – 模型\n", "nested": [1, 2.5, None, {"a": True}]}
    done = ask(project, "well", **awkward)
    assert done.code == 0, done.text
    found = json.loads(next(line for line in done.out.splitlines() if line.startswith("READ "))[5:])
    assert found["rest"] == awkward
    assert found["files"]["/etc/passwd"]["sha256"] == on_host.sha256("/etc/passwd")


def test_a_role_asks_once(project: Project) -> None:
    project.environment["KIMI_NODES_COUNT_COMMANDS"] = "1"
    done = ask(project, "well")
    assert "[@local] remote commands: 1 (Prepare 1)" in done.err


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("problem", "found 1 GPU, wanted 8. Fix: add 7"),
        (
            "crash",
            "failed on this host: KeyError: 'no such key' (File \"{folder}/demo/probe.py\", line 9, in probe). Fix: ",
        ),
        ("exit", "failed on this host: SystemExit: gone"),
        ("strange", "failed on this host: TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_a_probe_that_fails_refuses_its_host_and_names_the_place(project: Project, how: str, told: str) -> None:
    done = ask(project, how)
    assert done.code == 1
    refused = [line for line in done.err.splitlines() if "Refused" in line]
    assert len(refused) == 1
    assert told.format(folder=project.folder.name) in refused[0]
    assert "READ" not in done.out


def test_a_probe_that_hangs_ends_after_its_timeout(project: Project) -> None:
    done = ask(project, "slow")
    assert done.code == 1
    assert "timed out after 2s" in done.err


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("bash: nonsense", "printed 'bash: nonsense', wanted one JSON object. Fix: "),
        ("[1]", "printed '[1]', wanted one JSON object. Fix: "),
        ('{"other": 1}', "wanted one JSON object. Fix: "),
        ("", "printed nothing, wanted one JSON object. Fix: "),
    ],
)
def test_an_answer_that_is_no_json_object_refuses_its_host(project: Project, answer: str, told: str) -> None:
    data = {
        "arguments": {"how": "well"},
        "fake_responses": {"python3": answer},
        "fake_delay": 0,
        "fake_delay_jitter": 0,
    }
    project.write("hosts.py", f"hosts = [('@fake/one', {data!r})]\n")
    done = project.run("-y", inventory="hosts.py")
    assert done.code == 1
    assert told in done.err
    assert "Traceback" not in done.text


def shell(command: str, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["/bin/sh", "-c", command], env={"PATH": path}, capture_output=True, text=True, check=False)


def test_a_host_without_python_says_so(tmp_path: Path) -> None:
    source = tmp_path / "probe.py"
    source.write_text(PROBE)
    done = shell(program.probe_command(source, {"how": "well"}).get_raw_value(), path=str(tmp_path))
    assert done.returncode == 0
    assert "there is no python3 on this host, wanted 3.10 or newer. Fix: " in json.loads(done.stdout)["problem"]


def test_a_host_with_an_old_python_says_so(tmp_path: Path) -> None:
    """A stand-in python3 that claims to be 3.8: what an old one would do with the first lines."""
    source = tmp_path / "probe.py"
    source.write_text(PROBE)
    stand_in = tmp_path / "python3"
    stand_in.write_text(
        "#!/bin/sh\nexec /usr/bin/env -S PATH=/usr/bin:/bin:/usr/local/bin python3 - \"$@\" <<'E'\n"
        "import sys\n"
        "class Old(tuple):\n    pass\n"
        "code = sys.argv[sys.argv.index('-c') + 1]\n"
        "sys.version_info = (3, 8, 10)\nsys.version = '3.8.10 (stand-in)'\n"
        "exec(code)\nE\n"
    )
    stand_in.chmod(0o755)
    done = shell(program.probe_command(source, {"how": "well"}).get_raw_value(), path=str(tmp_path))
    assert "python3 is 3.8.10 on this host, wanted 3.10 or newer. Fix: " in json.loads(done.stdout)["problem"]


def test_what_is_too_large_for_one_argument_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    source = tmp_path / "probe.py"
    source.write_text(PROBE)
    with pytest.raises(ValueError, match="at most 122880 fit"):
        program.probe_command(source, {"how": os.urandom(130_000).hex()})


def test_the_helpers_say_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    asked = [str(tmp_path / name) for name in ("file", "link", "", "none", "file/below")]
    file, link, folder, none, below = (on_host.file_state(path) for path in asked)
    assert file is not None and link is not None and folder is not None
    assert (file["kind"], file["mode"], file["bytes"], file["sha256"]) == (
        "file",
        "640",
        7,
        "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73",
    )
    assert (link["kind"], link["target"]) == ("link", "file")
    assert folder["kind"] == "directory"
    assert none is None and below is None
    large = on_host.file_state(asked[0], digest_up_to=3)
    assert large is not None and large["sha256"] is None


def test_a_json_object_is_read_or_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    for content, found in (('{"a": [1]}', {"a": [1]}), ("[1]", None), ('{"a": ', None), ("", None), ("\udcff", None)):
        path.write_text(content, errors="surrogateescape")
        assert on_host.json_object(str(path)) == found
    path.write_text('{"a": "long enough"}')
    assert on_host.json_object(str(path), up_to=8) is None
    assert on_host.json_object(str(tmp_path / "none")) is None


def test_a_file_is_replaced_by_one_rename_and_never_open_to_others(tmp_path: Path) -> None:
    path, beside = tmp_path / "key", tmp_path / ".key.kimi-nodes-new"
    path.write_text("old")
    path.chmod(0o644)
    other = tmp_path / "other"
    os.link(path, other)
    beside.symlink_to("elsewhere")  # left by somebody: not followed
    before = os.umask(0)
    try:
        on_host.replace(str(path), b"new", 0o600, pwd.getpwuid(os.getuid()).pw_name)
    finally:
        os.umask(before)
    assert (path.read_bytes(), path.stat().st_mode & 0o7777, other.read_text()) == (b"new", 0o600, "old")
    with pytest.raises(KeyError):
        on_host.replace(str(path), b"newer", 0o600, "no-such-user")
    assert path.read_bytes() == b"new"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["key", "other"]


def test_programs_are_run_without_a_shell_and_never_raise() -> None:
    assert on_host.run(["printf", "%s", "$HOME; 'x'"]) == {"code": 0, "out": "$HOME; 'x'", "err": ""}
    assert on_host.run(["/no/such/program"]) == {"code": None, "out": "", "err": "no program /no/such/program"}
    assert on_host.run(["/etc/passwd"])["code"] is None
    assert on_host.run(["sleep", "9"], timeout=0.1)["err"] == "sleep did not end within 0.1 s"
    assert on_host.run(["sh", "-c", "echo $LC_ALL $MORE; exit 3"], environment={"MORE": "m"}) == {
        "code": 3,
        "out": "C m\n",
        "err": "",
    }


def test_all_that_a_program_prints_is_one_text_in_its_order() -> None:
    script = "read word; echo out $word; echo err >&2; echo $LC_ALL $DEBIAN_FRONTEND; printf '\\377'; exit 3"
    assert on_host.output(["sh", "-c", script], on_host.PACKAGING) == (3, "out\nerr\nC noninteractive\n\ufffd")
    assert on_host.output(["/no/such/program"]) == (127, "/no/such/program: No such file or directory")
    assert on_host.output(["/etc/passwd"]) == (127, "/etc/passwd: Permission denied")


def test_package_versions_come_from_one_query() -> None:
    found = on_host.packages(["dpkg", "no-such-package-here"])
    assert found["no-such-package-here"] is None
    assert found["dpkg"] == on_host.run(["dpkg-query", "-W", "-f=${Version}", "dpkg"])["out"]
    assert on_host.packages([]) == {}
