"""Files appear whole or not at all, with their owner and mode; secrets are seen nowhere."""

from __future__ import annotations

import base64
import getpass
import grp
import io
import json
import os
import random
import stat
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit_project import DEPLOY, Project

from kit import files, on_host, testing, write_on_host
from kit.program import act_command

USER = getpass.getuser()
GROUP = grp.getgrgid(os.getgid()).gr_name
PROGRAM = Path(write_on_host.__file__)


def payload(items: Iterable[files.Item]) -> str:
    return base64.b64encode(zlib.compress(json.dumps([item.sent() for item in items]).encode())).decode() + "\n"


def file(path: Path | str, content: str | bytes, mode: str = "644", secret: bool = False) -> files.File:
    return files.File(str(path), content, mode, USER, GROUP, secret)


def bring(*items: files.Item) -> None:
    """Do on this machine, in this process, what the program does on a host."""
    before, mask = sys.stdin, os.umask(0o022)
    sys.stdin = io.StringIO(payload(items))
    try:
        write_on_host.act()
    finally:
        sys.stdin = before
        os.umask(mask)


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*.kimi-nodes-new")]


@settings(max_examples=60, deadline=None)
@given(content=st.one_of(st.text(), st.binary(max_size=3000)))
def test_any_content_arrives_byte_for_byte(tmp_path_factory: pytest.TempPathFactory, content: str | bytes) -> None:
    path = tmp_path_factory.mktemp("content") / "file"
    try:
        wanted = file(path, content)
        bring(wanted)
    except UnicodeEncodeError:
        assert isinstance(content, str)  # lone surrogates are no text that a file can hold
        return
    assert path.read_bytes() == wanted.data
    assert files.compare(on_host.files([str(path)]), [wanted]) == {}


names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=40)


@settings(max_examples=12, deadline=None)
@given(name=names.filter(lambda name: name not in (".", "..") and len(name.encode()) < 200))
def test_any_name_survives_the_shell(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.mktemp("names")
    wanted = [file(folder / name, "x")]
    command = act_command(PROGRAM, {}, shown=tuple(item.path for item in wanted)).get_raw_value()
    done = subprocess.run(
        ["/bin/sh", "-c", command], input=payload(wanted), cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(folder) == [name]


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, mask: int) -> None:
    command = act_command(PROGRAM, {}).get_raw_value()
    wanted = [
        file(tmp_path / "a/b/secret", "s", "600"),
        file(tmp_path / "a/tool", "#!/bin/sh\n", "755"),
        files.Directory(str(tmp_path / "private"), "700", USER, GROUP),
    ]
    subprocess.run(["/bin/sh", "-c", f"umask {mask:o}; {command}"], input=payload(wanted), text=True, check=True)
    modes = {
        name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b", "a/b/secret", "a/tool", "private")
    }
    assert modes == {"a": 0o755, "a/b": 0o755, "a/b/secret": 0o600, "a/tool": 0o755, "private": 0o700}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_files_get_their_owner(tmp_path: Path) -> None:
    bring(files.File(str(tmp_path / "file"), "x", "640", "nobody", "nogroup"))
    found = on_host.file_state(str(tmp_path / "file"))
    assert found is not None and (found["user"], found["group"], found["mode"]) == ("nobody", "nogroup", "640")


def test_an_unknown_owner_changes_nothing_and_says_so(tmp_path: Path) -> None:
    bring(file(tmp_path / "one", "old"))
    with pytest.raises(on_host.Problem, match=r"no-such-user.*Fix: "):
        bring(file(tmp_path / "one", "new"), files.File(str(tmp_path / "two"), "x", user="no-such-user"))
    assert (tmp_path / "one").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["one"]


def test_a_full_disk_changes_nothing_and_says_so(tmp_path: Path) -> None:
    bring(file(tmp_path / "one", "old"))
    script = (
        "import resource,signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        "import os; os.execvp('sh', ['sh', '-c', os.environ['RUN']])"
    )
    wanted = [file(tmp_path / "one", "new"), file(tmp_path / "two", os.urandom(50_000))]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "RUN": act_command(PROGRAM, {}).get_raw_value()},
        input=payload(wanted),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "File too large; wanted to write" in done.stderr and "Fix: " in done.stderr
    assert (tmp_path / "one").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["one"]


def test_killed_at_any_moment_a_file_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([65 + number]) * 3_000_000 for number in range(2)]
    path.write_bytes(contents[0])
    sent = [payload([file(path, content, "600")]) for content in contents]
    command = ["/bin/sh", "-c", "exec " + act_command(PROGRAM, {}).get_raw_value()]
    chance = random.Random(7)
    began = time.monotonic()
    subprocess.run(command, input=sent[0], text=True, check=True)
    whole = time.monotonic() - began
    killed = 0
    for round_number in range(24):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert process.stdin is not None
        feed = threading.Thread(target=_feed, args=(process.stdin, sent[round_number % 2]))
        feed.start()
        try:
            process.wait(timeout=whole * chance.uniform(0.3, 1.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
        feed.join()
        assert path.read_bytes() in contents
    assert killed >= 8
    subprocess.run(command, input=sent[1], text=True, check=True)
    assert path.read_bytes() == contents[1]
    assert left_over(tmp_path) == []  # what the killed ones left has been taken over


def _feed(stdin: IO[str], text: str) -> None:
    try:
        stdin.write(text)
        stdin.close()
    except BrokenPipeError:
        pass


def test_two_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    contents = [bytes([65 + number]) * 400_000 for number in range(6)]
    command = ["/bin/sh", "-c", "exec " + act_command(PROGRAM, {}).get_raw_value()]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in contents]
    feeds = [
        threading.Thread(target=_feed, args=(process.stdin, payload([file(tmp_path / "file", content)])))
        for process, content in zip(running, contents, strict=True)
    ]
    for feed in feeds:
        feed.start()
    assert [process.wait(timeout=30) for process in running] == [0] * len(running)
    for feed in feeds:
        feed.join()
    assert (tmp_path / "file").read_bytes() in contents
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_is_switched_without_a_moment_of_nothing(tmp_path: Path) -> None:
    link = tmp_path / "current"
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "here").touch()
    bring(files.Link(str(link), "old"))
    seen, stop = [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.append((link / "here").exists())

    watcher = threading.Thread(target=look)
    watcher.start()
    for number in range(300):
        bring(files.Link(str(link), ("new", "old")[number % 2]))
    stop.set()
    watcher.join()
    assert len(seen) > 300 and all(seen)
    assert os.readlink(link) == "old"


def test_what_stands_in_the_way_is_named_and_kept(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/precious").touch()
    (tmp_path / "file").touch()
    for item in (
        file(tmp_path / "folder", "x"),
        files.Link(str(tmp_path / "folder"), "x"),
        files.Absent(str(tmp_path / "folder")),
    ):
        with pytest.raises(on_host.Problem, match=r"folder: is a directory, wanted a .*Fix: "):
            bring(item)
    with pytest.raises(on_host.Problem, match=r"file: is not a directory, wanted one\. Fix: "):
        bring(files.Directory(str(tmp_path / "file"), "755", USER, GROUP))
    with pytest.raises(on_host.Problem, match="Fix: "):
        bring(file(tmp_path / "file/below", "x"))
    assert (tmp_path / "folder/precious").exists()


def test_a_link_in_the_way_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other")
    (tmp_path / "file").symlink_to("other")
    bring(file(tmp_path / "file", "new"))
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "other").read_text() == "other"


def test_files_links_and_trees_are_removed(tmp_path: Path) -> None:
    (tmp_path / "tree/below").mkdir(parents=True)
    (tmp_path / "tree/below/file").touch()
    (tmp_path / "file").touch()
    (tmp_path / "kept").touch()
    (tmp_path / "link").symlink_to("kept")
    bring(*(files.Absent(str(tmp_path / name), tree=True) for name in ("tree", "file", "link", "none", "none/below")))
    assert os.listdir(tmp_path) == ["kept"]


def test_compare_gives_the_reason_for_each_difference(tmp_path: Path) -> None:
    wanted = [
        file("/same", "x"),
        file("/content", "x"),
        file("/mode", "x", "600"),
        files.File("/owner", "x", user="nobody"),
        file("/missing", "x"),
        file("/folder", "x"),
        files.Directory("/made", "755", USER, GROUP),
        files.Link("/link", "new"),
        files.Absent("/gone"),
        files.Absent("/there"),
    ]
    state = {
        "/same": testing.file("x", "0644", USER, GROUP),
        "/content": testing.file("y", user=USER, group=GROUP),
        "/mode": testing.file("x", user=USER, group=GROUP),
        "/owner": testing.file("x"),
        "/missing": None,
        "/folder": testing.directory(),
        "/made": testing.directory(user=USER, group=GROUP),
        "/link": testing.link("old"),
        "/gone": None,
        "/there": testing.link("x"),
    }
    assert files.compare(state, wanted) == {
        "/content": "other content",
        "/mode": "mode 644, wanted 600",
        "/owner": "owner root:root, wanted nobody:root",
        "/missing": "missing",
        "/folder": "is a directory, wanted a file",
        "/link": "points to old, wanted new",
        "/there": "is there (link), wanted nothing",
    }
    with pytest.raises(KeyError):
        files.compare({}, wanted)


def test_only_what_differs_is_written_and_nothing_is_a_noop() -> None:
    wanted = [files.File("/etc/a", "a"), files.File("/etc/b", "b"), files.Link("/c", "d")]
    state = testing.as_wanted(wanted)
    assert testing.prepare(files.apply, {"wanted": wanted, "state": state}) == testing.Result(
        noop=["/etc/a, /etc/b, /c: as wanted"]
    )
    result = testing.prepare(files.apply, {"wanted": wanted, "state": {**state, "/etc/b": None}})
    assert result.commands == ["files: /etc/b"]
    assert result.files == {"/etc/b": wanted[1]}


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/a//b", "/a/", "/a/..", ""])
def test_a_path_that_is_not_absolute_and_plain_is_an_error(path: str) -> None:
    with pytest.raises(ValueError, match="not an absolute path"):
        list(files.write(path, "x"))


SECRET = "hunter2-do-not-show-me"
SECRETS_ROLE = """
import getpass, grp, os
from kit import files
from kit.probe import Probe
from kit.role import operation, role


class Facts(Probe):
    program = "looking.py"


@operation("Write")
def write(folder, secret, public):
    owner = dict(user=getpass.getuser(), group=grp.getgrgid(os.getgid()).gr_name)
    wanted = [
        files.File(f"{folder}/secret", secret, mode="600", secret=True, **owner),
        files.File(f"{folder}/public", public, **owner),
    ]
    found = Facts.read(paths=[item.path for item in wanted])
    yield from files.apply(wanted, found["files"])


@role("secrets")
def secrets(folder, secret, public):
    write(folder, secret, public=public)
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    made.write("looking.py", "from kit import on_host\ndef probe(paths):\n    return {'files': on_host.files(paths)}\n")
    made.write("secrets_role.py", SECRETS_ROLE)
    made.write("secret.txt", SECRET)
    made.write("public.txt", "line one\nline two\n")
    made.write(
        "deploy.py",
        DEPLOY + "from secrets_role import secrets\n"
        f"secrets({str(tmp_path / 'host')!r}, open('secret.txt').read(), open('public.txt').read())\n",
    )
    return made


def test_a_second_run_changes_nothing(project: Project) -> None:
    project.environment["KIMI_NODES_COUNT_COMMANDS"] = "1"
    first, second = project.run("-y"), project.run("-y", "-v")
    assert (first.code, second.code) == (0, 0)
    assert "[@local] Success" in first.err and "No changes" not in first.err
    assert "[@local] No changes" in second.err and "noop: " in second.err
    assert "remote commands: 2 (Execute 2)" in first.err
    assert "remote commands: 1 (Execute 1)" in second.err
    assert stat.S_IMODE((project.folder / "host/secret").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "arguments",
    [
        ["-y", "-vvv", "--debug", "--diff"],
        ["--dry", "-vvv", "--debug-all", "--diff"],
        ["-y", "--json"],
        ["--dry", "--debug-operations"],
    ],
    ids=" ".join,
)
def test_a_secret_is_shown_nowhere(project: Project, arguments: list[str]) -> None:
    process = project.start(*arguments)
    seen: set[str] = set()
    stop = threading.Event()
    watcher = threading.Thread(target=_watch_processes, args=(seen, stop))
    watcher.start()
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        stop.set()
        watcher.join()
    assert process.returncode == 0
    written = (project.folder / "host/secret").exists()
    assert written == ("--dry" not in arguments)
    forms = [SECRET, base64.b64encode(SECRET.encode()).decode().rstrip("=")[:-1], SECRET.encode().hex()]
    if written:
        assert any("def act" in word for text in seen for word in unpacked(text))  # it has watched the writing
    for shown in (out + err, *seen):
        for word in (shown, *unpacked(shown)):
            assert not [form for form in forms if form in word]
    if "--diff" in arguments:
        assert "+line two" in err
        assert "secret: will change (secret, not shown)" in err


def unpacked(text: str) -> Iterable[str]:
    """What the base64 words of a text say once decompressed: the form in which kit sends things."""
    for word in text.split():
        if len(word) > 60:
            try:
                yield zlib.decompress(base64.b64decode(word)).decode()
            except (ValueError, zlib.error):
                continue


def _watch_processes(seen: set[str], stop: threading.Event) -> None:
    while not stop.is_set():
        for process in Path("/proc").glob("[0-9]*"):
            for name in ("cmdline", "environ"):
                try:
                    seen.add((process / name).read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                except OSError:
                    continue


def test_a_diff_shows_what_changes_once(project: Project) -> None:
    assert project.run("-y").code == 0
    project.write("public.txt", "line one\nline 2\n")
    for arguments in (["--dry", "--diff"], ["-y", "--diff"]):
        done = project.run(*arguments)
        assert done.err.count("-line two") == done.err.count("+line 2") == 1
        assert " line one" in done.err
    assert "line two" not in project.run("-y", "--diff").err
