"""A host that is refused stops alone, with clear lines, and the run exits 1."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit_project import DEPLOY, Project

from kit.refusal import Refusal, refuse

ROLES = """
from kit.command import host
from kit.refusal import Refusal, refuse, warn
from kit.role import operation, role


@operation("Touch")
def touch(path, refused=None, unexpected=False):
    if refused:
        raise Refusal(refused)
    if unexpected:
        raise KeyError("nobody thought of this")
    yield f"echo ran >> {path}"


@role("first")
def first(folder):
    data = host().data
    name = host().name.strip("@").replace("/", "-")
    refuse(data.get("problems", []))
    warn(data.get("warnings", []))
    if data.get("broken"):
        raise KeyError("nobody thought of this")
    touch(path=f"{folder}/{name}-first", refused=data.get("late"), unexpected=data.get("late_broken", False))
    touch(path=f"{folder}/{name}-after")
    return "plan of " + name


@role("second")
def second(folder, plan):
    assert plan is not None
    name = host().name.strip("@").replace("/", "-")
    touch(path=f"{folder}/{name}-second")
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    made.write("project_roles.py", ROLES)
    made.write(
        "deploy.py", DEPLOY + f"import project_roles as r\nr.second({str(tmp_path)!r}, r.first({str(tmp_path)!r}))\n"
    )
    return made


def inventory(project: Project, **bad: object) -> str:
    """Three hosts: @local really runs, @fake/good runs nothing, @fake/bad has the data of a host to refuse."""
    quiet = {"fake_delay": 0, "fake_delay_jitter": 0}
    hosts = [("@local", {}), ("@fake/good", quiet), ("@fake/bad", {**quiet, **bad})]
    return str(project.write("hosts.py", f"hosts = {hosts!r}\n"))


PROBLEMS = ["driver is 470, wanted 580. Fix: apt-get install nvidia-driver-580", "2 GPUs, wanted 8. Fix: add GPUs"]


@pytest.mark.parametrize("mode", [["-y"], ["--dry"], ["-y", "--no-wait"], ["-y", "--serial"]], ids=" ".join)
def test_a_refusal_in_prepare_is_one_line_a_problem_and_touches_that_host_only(
    project: Project, mode: list[str]
) -> None:
    done = project.run(*mode, inventory=inventory(project, problems=PROBLEMS))
    assert done.code == 1
    lines = [line.strip() for line in done.err.splitlines() if "Refused" in line]
    assert lines == [f"[@fake/bad]  Refused: {problem}" for problem in PROBLEMS]
    assert "Traceback" not in done.text
    assert "[@fake/bad]  Success" not in done.text
    if mode != ["--dry"]:
        assert done.err.count("[@fake/good] Success") == 3
        assert (project.folder / "local-second").read_text() == "ran\n"


def test_a_refusal_in_an_operation_fails_that_host_and_the_others_go_on(project: Project) -> None:
    done = project.run("-y", inventory=inventory(project, late=PROBLEMS[:1]))
    assert done.code == 1
    assert f"[@fake/bad]  Refused: {PROBLEMS[0]}" in done.err
    assert "Traceback" not in done.text
    assert "[@fake/bad]  Success" not in done.text
    assert done.err.count("[@fake/good] Success") == 3
    assert (project.folder / "local-second").exists()


def test_no_wait_does_not_hide_a_failed_host(project: Project) -> None:
    done = project.run("-y", "--no-wait", inventory=inventory(project, late=PROBLEMS[:1]))
    assert done.code == 1
    assert "[@fake/bad]  Success" not in done.text


def test_a_dry_run_shows_a_refusal_of_an_operation_and_exits_1(project: Project) -> None:
    done = project.run("--dry", inventory=inventory(project, late=PROBLEMS[:1]))
    assert done.code == 1
    assert done.err.count(f"Refused: {PROBLEMS[0]}") == 1
    assert not (project.folder / "local-first").exists()


@pytest.mark.parametrize("where", ["broken", "late_broken"])
def test_an_unexpected_fault_is_that_hosts_own(project: Project, where: str) -> None:
    done = project.run("-y", inventory=inventory(project, **{where: True}))
    assert done.code == 1
    assert "unexpected KeyError: 'nobody thought of this'. Fix: " in done.err
    assert "[@fake/bad]  Success" not in done.text
    assert done.err.count("[@fake/good] Success") == 3


def test_the_last_host_refused_ends_the_run_with_nothing_done(project: Project) -> None:
    project.write("hosts.py", f"hosts = [('@local', {{'problems': {PROBLEMS!r}}})]\n")
    done = project.run("-y", inventory="hosts.py")
    assert done.code == 1
    assert f"[@local] Refused: {PROBLEMS[1]}" in done.err
    assert "Traceback" not in done.text
    assert not list(project.folder.glob("local-*"))


def test_fail_percent_counts_refused_hosts(project: Project) -> None:
    done = project.run("-y", "--fail-percent", "30", inventory=inventory(project, problems=PROBLEMS))
    assert done.code == 1
    assert "Over 30% of hosts failed (33%)" in done.err
    assert not list(project.folder.glob("local-*"))


def test_without_problems_all_hosts_go_through_all_roles_and_exit_0(project: Project) -> None:
    done = project.run("-y", inventory=inventory(project))
    assert done.code == 0
    assert done.err.count("Success") - done.err.count("Success   Error") == 9
    assert sorted(path.name for path in project.folder.glob("local-*")) == [
        "local-after",
        "local-first",
        "local-second",
    ]


def test_a_warning_is_told_once_and_refuses_nothing(project: Project) -> None:
    done = project.run("-y", inventory=inventory(project, warnings=PROBLEMS))
    assert done.code == 0, done.text
    lines = [line.strip() for line in done.err.splitlines() if "Warning" in line]
    assert lines == [f"[@fake/bad]  Warning: {problem}" for problem in PROBLEMS]
    assert done.err.count("[@fake/bad]  Success") == 3


def test_a_problem_of_several_lines_is_printed_as_one() -> None:
    assert Refusal("found a\nwanted b").lines() == ["found a wanted b"]
    with pytest.raises(Refusal) as raised:
        refuse([ValueError("x. Fix: y")])
    assert raised.value.lines() == ["x. Fix: y"]
    refuse([])
