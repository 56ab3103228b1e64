"""node_tools: what is as wanted costs nothing, what is not is brought about, and nobody's account is taken."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit import files, testing
from kit.on_host import Problem
from node.lock import distributions
from node.packages import BASE
from node.tools import Tools
from roles.node_tools import deploy, environment_on_host, packages_on_host, probe
from roles.node_tools.facts import NodeToolsFacts
from roles.node_tools.operations import NO_SHELL, lay_ground

PROJECT = Path(__file__).resolve().parents[2]
LINK = "/opt/kimi-nodes/tools/environment"
FOLDER = "/opt/kimi-nodes/tools"
TOOLS = Tools(b"uv==1 --hash=sha256:00\n", "3.11")
WANTED = [
    files.Directory("/etc/kimi-nodes/keys", mode="700"),
    files.File(f"{FOLDER}/builder.py", "print()\n", mode="755"),
]
SERVICE = {"uid": 999, "shell": NO_SHELL, "groups": ["render", "video"]}


def state(**changes: Any) -> dict[str, Any]:
    """A host on which all is as wanted, but for what is changed."""
    return {
        "packages": {"aria2": "1.36-1"},
        "unfinished": [],
        "files": {
            **testing.as_wanted([*WANTED, files.Link(LINK, TOOLS.environment)]),
            TOOLS.uv: testing.file("uv"),
        },
        "users": {"sglang": SERVICE},
        "groups": ["video", "render"],
        "programs": ["builder.py"],
        "receipt": "{}",
        **changes,
    }


def lay(found: dict[str, Any]) -> testing.Result:
    return testing.prepare(
        lay_ground,
        {
            "packages": ["aria2"],
            "users": {"sglang": ("video", "render")},
            "wanted": WANTED,
            "tools": TOOLS,
            "distributions": {"uv": "1"},
            "tools_link": LINK,
            "programs_folder": FOLDER,
        },
        {NodeToolsFacts: found},
    )


def test_a_second_run_sends_nothing() -> None:
    result = lay(state())
    assert (result.commands, result.refused) == ([], [])
    assert result.noop


def test_a_bare_host_gets_all_of_it_in_an_order_that_works() -> None:
    everything: dict[str, Any] = dict.fromkeys([*(item.path for item in WANTED), LINK, TOOLS.uv])
    result = lay(
        state(
            packages={"aria2": None},
            files=everything,
            users={"sglang": None},
            groups=["video"],
            programs=[],
            receipt=None,
        )
    )
    kinds = [command.split()[0] for command in result.commands]
    assert kinds == ["python3", "useradd", "files:", "python3", "files:"]
    assert result.commands[0].endswith(" aria2")
    assert "--groups video sglang" in result.commands[1], "a group that does not exist makes useradd fail"
    assert set(result.files) == {*(item.path for item in WANTED), LINK}


def test_an_interrupted_dpkg_is_mended_even_where_nothing_is_missing() -> None:
    assert len(lay(state(unfinished=["libc6"])).commands) == 1


def test_a_user_joins_the_groups_that_it_lacks() -> None:
    assert lay(state(users={"sglang": {**SERVICE, "groups": ["video"]}})).commands == [
        "usermod --append --groups render sglang"
    ]


@pytest.mark.parametrize("found", [{**SERVICE, "shell": "/bin/bash", "uid": 1000}, {**SERVICE, "uid": 0}])
def test_an_account_of_somebody_is_not_taken(found: dict[str, Any]) -> None:
    result = lay(state(users={"sglang": found}))
    assert not result.commands
    assert len(result.refused) == 1 and "user sglang" in result.refused[0] and "Fix: usermod" in result.refused[0]


def test_a_program_of_an_older_version_goes() -> None:
    result = lay(state(programs=["builder.py", "of_last_year.py"]))
    assert isinstance(result.files[f"{FOLDER}/of_last_year.py"], files.Absent)
    assert set(result.files) == {f"{FOLDER}/of_last_year.py"}


@pytest.mark.parametrize("broken", [{"receipt": None}, {"uv": None}])
def test_tools_half_built_or_damaged_are_built_anew(broken: dict[str, Any]) -> None:
    found = state()
    if "uv" in broken:
        found["files"][TOOLS.uv] = None
    else:
        found |= broken
    result = lay(found)
    assert len(result.commands) == 1 and result.commands[0].endswith(TOOLS.environment)


def test_every_program_of_the_project_is_laid_down() -> None:
    laid = {file.path: file.data for file in deploy.programs()}
    assert laid == {f"{FOLDER}/{path.name}": path.read_bytes() for path in (PROJECT / "files" / "tools").glob("*.py")}
    assert f"{FOLDER}/release_builder.py" in laid


def test_keys_are_closed_to_everybody_else() -> None:
    modes = {folder.path: folder.mode for folder in deploy.FOLDERS}
    assert modes["/etc/kimi-nodes/keys"] == "700"
    assert all(int(mode, 8) & 0o022 == 0 for mode in modes.values())


def test_every_package_says_why_it_is_there() -> None:
    assert all(len(reason.split()) > 3 for reason in BASE.values())


def test_states_of_packages() -> None:
    text = "a\tii \t1\nb\thi \t2\nc\trc \t3\nd\tiU \t4\ne\tiiR\t5\nf\tiF \t6\n"
    versions, unfinished = probe.parse_packages(text, ["a", "b", "c", "g"], [])
    assert versions == {"a": "1", "b": "2", "c": None, "g": None}, "a held package is installed, a removed one is not"
    assert unfinished == ["d", "e", "f"]
    assert probe.parse_packages("", [], ["0001"])[1] == ["(journal)"]


def test_the_probe_reads_this_machine() -> None:
    found = probe.probe(
        ["dpkg", "no-such-package"], ["/etc"], ["root", "no-such-user"], ["root"], "/nowhere", "/nowhere"
    )
    assert found["packages"]["dpkg"] and found["packages"]["no-such-package"] is None
    assert found["users"]["root"]["uid"] == 0 and found["users"]["no-such-user"] is None
    assert (found["groups"], found["programs"], found["receipt"]) == (["root"], [], None)
    json.dumps(found)


def _program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)


def test_apt_is_asked_only_for_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("apt-get", "dpkg"):
        _program(
            tmp_path,
            name,
            f'echo {name} "$@" >>{tmp_path}/log; echo $DEBIAN_FRONTEND $NEEDRESTART_SUSPEND >>{tmp_path}/env',
        )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    packages_on_host.act([], [])
    assert not (tmp_path / "log").exists()
    packages_on_host.act(["aria2"], ["(journal)"])
    verbs = [" ".join(line.split()[:2]) for line in (tmp_path / "log").read_text().splitlines()]
    assert verbs == ["dpkg --configure", "apt-get install", "apt-get update", "apt-get install"]
    assert set((tmp_path / "env").read_text().splitlines()) == {"noninteractive 1"}


def test_what_apt_says_is_told_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(
        tmp_path,
        "apt-get",
        'test "$1" = update && echo "W: GPG error: somebody else" && exit; '
        'echo "E: Unable to locate package aria2"; exit 100',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Problem) as caught:
        packages_on_host.act(["aria2"], [])
    for part in ("Unable to locate package aria2", "install aria2", "GPG error", "Fix: see that main"):
        assert part in str(caught.value)


def _tools(tmp_path: Path, lock: str, wanted: dict[str, str]) -> dict[str, Any]:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    environment = tmp_path / "environments" / hashlib.sha256(lock.encode()).hexdigest()[:16]
    return {
        "environment": str(environment),
        "link": str(tmp_path / "environment"),
        "python": sys.executable,
        "lock": lock,
        "site_packages": f"{environment}/lib/python{version}/site-packages",
        "distributions": wanted,
        "receipt": f"{environment}/complete.json",
        "uv": f"{environment}/bin/python",
        "machine_environment": str(tmp_path / "machine"),
    }


def test_an_environment_that_cannot_be_completed_leaves_nothing(tmp_path: Path) -> None:
    arguments = _tools(tmp_path, "no-such-distribution-of-anybody==1 --hash=sha256:" + "0" * 64 + "\n", {})
    with pytest.raises(Problem, match=r"install the tools' lock\. Fix: "):
        environment_on_host.act(**arguments)
    assert os.listdir(tmp_path / "environments") == []


def test_pip_goes_by_the_machines_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the login did not read it: PAM does for ssh, and sudo may drop it."""
    monkeypatch.delenv("https_proxy", raising=False)
    arguments = _tools(tmp_path, "", {})
    (tmp_path / "machine").write_text('# site\nhttps_proxy="http://proxy.site:3128"\nexport no_proxy=localhost\n=x\n')
    python = tmp_path / "python"
    tell = f'printf "%s %s" "$https_proxy" "$no_proxy" >{tmp_path}/told'
    python.write_text(f'#!/bin/sh\n{tell}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment_on_host.act(**{**arguments, "python": str(python)})
    assert (tmp_path / "told").read_text() == "http://proxy.site:3128 localhost"


def test_an_environment_that_lacks_a_distribution_is_not_complete(tmp_path: Path) -> None:
    arguments = _tools(tmp_path, "", {"uv": "1"})
    with pytest.raises(Problem, match="uv found nothing, wanted 1"):
        environment_on_host.act(**arguments)
    assert os.listdir(tmp_path / "environments") == []


def test_a_half_built_environment_is_built_anew_and_the_one_in_use_stays(tmp_path: Path) -> None:
    arguments = _tools(tmp_path, "", {})
    half = Path(arguments["environment"])
    for name in ("in-use", "forgotten"):
        (tmp_path / "environments" / name).mkdir(parents=True)
    half.mkdir()
    (half / "left").write_text("of a killed run")
    os.symlink("environments/in-use", arguments["link"])
    environment_on_host.act(**arguments)
    assert sorted(os.listdir(tmp_path / "environments")) == sorted(["in-use", half.name])
    assert not (half / "left").exists()
    assert json.loads(Path(arguments["receipt"]).read_text())["distributions"] == {}
    inode = half.stat().st_ino
    environment_on_host.act(**arguments)
    assert half.stat().st_ino == inode, "a complete environment is not built again"
    assert subprocess.run([half / "bin" / "python", "-c", ""], check=False).returncode == 0


def test_the_lock_of_the_tools_brings_uv_and_the_hub_client_on_every_python() -> None:
    lock = (PROJECT / "files" / "locks" / "tools.txt").read_bytes()
    for python in ("3.10", "3.11", "3.12", "3.13"):
        assert {"uv", "huggingface-hub"} <= set(distributions(lock, python))
