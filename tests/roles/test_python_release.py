"""python_release: whole or built anew, never half in use; the current link is right or as it was; old releases go."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from files.tools import release_builder as builder
from kit import testing
from kit.on_host import Problem
from node import layout
from node.lock import distributions
from roles.python_release import deploy, probe, switch_on_host
from roles.python_release.facts import CurrentFacts, ReleaseFacts
from roles.python_release.operations import build, make_current, reasons_to_build

PROJECT = Path(__file__).resolve().parents[2]
DIGEST = "0123456789abcdef"
OLD = ["1" * 16, "2" * 16, "3" * 16, "4" * 16]
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
REQUEST = {
    "bytes": 14 * 10**9,
    "digest": DIGEST,
    "distributions": {"torch": "2.11.0", "typing-extensions": "4.16.0"},
    "environment": f"/opt/kimi-nodes/releases/{DIGEST}",
    "lock": "torch==2.11.0\n",
    "receipts": ["/receipts/release.json", "/receipts/patches.json"],
    "release": "sglang-0.5.17",
    "site_packages": "/site",
    "status": "/status.json",
}
RECEIPT = {"digest": DIGEST, "lock_sha256": hashlib.sha256(b"torch==2.11.0\n").hexdigest()}
INSTALLED = ["torch-2.11.0.dist-info", "typing_extensions-4.16.0.dist-info"]


def found(**changes: Any) -> dict[str, Any]:
    """A host with the release whole, but for what is changed."""
    state = {
        "receipt": RECEIPT,
        "installed": INSTALLED,
        "there": True,
        "free": 10**12,
        "files": {"/units/kimi-release@.service": None, "/request.json": None},
        "unit": testing.unit(active="inactive", enabled="static"),
    }
    return {**state, **changes}


def release(state: dict[str, Any]) -> testing.Result:
    return testing.prepare(
        build,
        {
            "request": REQUEST,
            "request_file": "/request.json",
            "unit_file": "/units/kimi-release@.service",
            "unit_text": "[Service]\n",
            "unit": f"kimi-release@{DIGEST}.service",
            "release_digest": DIGEST,
        },
        {ReleaseFacts: state},
    )


def test_a_whole_release_costs_nothing() -> None:
    result = release(found())
    assert (result.commands, result.refused) == ([], []) and result.noop


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"receipt": None, "there": False, "installed": []}, "not built"),
        ({"receipt": None}, "half built"),
        ({"there": False, "installed": []}, "its folder is gone"),
        ({"installed": INSTALLED[:1]}, "typing-extensions missing, wanted 4.16.0"),
        ({"installed": [*INSTALLED, "wcwidth-1.dist-info"]}, "wcwidth 1, wanted nothing"),
        ({"installed": ["torch-2.12.0.dist-info", INSTALLED[1]]}, "torch 2.12.0, wanted 2.11.0"),
        ({"receipt": {**RECEIPT, "lock_sha256": "0" * 64}}, "its receipt is of something else"),
    ],
)
def test_anything_less_is_built_by_a_unit_that_is_waited_for(changes: dict[str, Any], reason: str) -> None:
    state = found(**changes)
    assert reasons_to_build(state, DIGEST, str(REQUEST["lock"]), REQUEST["distributions"]) == [reason]  # type: ignore[arg-type]
    result = release(state)
    assert result.commands == [
        "files: /units/kimi-release@.service /request.json",
        f"systemctl daemon-reload && systemctl restart --no-block -- kimi-release@{DIGEST}.service",
        f"Join(kimi-release@{DIGEST}.service)",
    ]
    assert json.loads(result.files["/request.json"].content) == REQUEST


def test_a_building_under_way_is_joined_and_not_begun_again() -> None:
    state = found(receipt=None, unit=testing.unit(active="activating", enabled="static"))
    assert release(state).commands == [f"Join(kimi-release@{DIGEST}.service)"]


def test_too_small_a_disk_refuses_before_anything_is_written() -> None:
    result = release(found(receipt=None, there=False, installed=[], free=9 * 10**9))
    assert not result.commands
    assert result.refused == [
        f"disk space at /opt/kimi-nodes/releases/{DIGEST}: found 9.0 GB free, wanted 14.0 GB to build release "
        "sglang-0.5.17. Fix: free space on that file system (df -h), then run deploy.py again"
    ]


def current(target: str | None, releases: list[str]) -> testing.Result:
    state = None if target is None else testing.link(target)
    return testing.prepare(
        make_current,
        {
            "digest": DIGEST,
            "link": "/opt/kimi-nodes/current",
            "releases": "/opt/kimi-nodes/releases",
            "receipts": ["/receipts/a"],
            "keep": 3,
            "belongings": ["/receipts/{digest}"],
        },
        {CurrentFacts: {"files": {"/opt/kimi-nodes/current": state}, "releases": releases}},
    )


@pytest.mark.parametrize("releases", [[DIGEST], [DIGEST, *OLD[:2]]])
def test_a_current_link_that_is_right_stays(releases: list[str]) -> None:
    assert current(f"/opt/kimi-nodes/releases/{DIGEST}", releases).commands == []


@pytest.mark.parametrize(
    ("target", "releases"),
    [
        (None, [DIGEST]),
        (f"/opt/kimi-nodes/releases/{OLD[0]}", [DIGEST, OLD[0]]),
        (f"/opt/kimi-nodes/releases/{DIGEST}", [DIGEST, *OLD[:3]]),
    ],
)
def test_a_link_repointed_or_a_release_too_many_is_one_command(target: str | None, releases: list[str]) -> None:
    assert len(current(target, releases).commands) == 1


@pytest.fixture
def house(tmp_path: Path) -> dict[str, Any]:
    """Five whole releases, the newest wanted, the oldest current; and no process that uses any."""
    for name in ("releases", "receipts", "caches", "proc"):
        (tmp_path / name).mkdir()
    for age, digest in enumerate([*OLD, DIGEST]):
        (tmp_path / "releases" / digest / "bin").mkdir(parents=True)
        (tmp_path / "caches" / digest).mkdir()
        receipt = tmp_path / "receipts" / digest
        receipt.write_text("{}")
        os.utime(receipt, (age, age + 1))
    (tmp_path / "current").symlink_to(tmp_path / "releases" / OLD[0])
    return {
        "link": str(tmp_path / "current"),
        "releases": str(tmp_path / "releases"),
        "digest": DIGEST,
        "receipts": [str(tmp_path / "receipts" / DIGEST)],
        "keep": 3,
        "belongings": [f"{tmp_path}/receipts/{{digest}}", f"{tmp_path}/caches/{{digest}}"],
        "processes": str(tmp_path / "proc"),
        "lock_file": str(tmp_path / "lock"),
    }


def left(house: dict[str, Any]) -> list[str]:
    return sorted(os.listdir(house["releases"]))


def test_the_newest_stay_and_the_others_go_with_all_that_is_theirs(house: dict[str, Any], tmp_path: Path) -> None:
    switch_on_host.act(**house)
    assert os.readlink(house["link"]) == f"{house['releases']}/{DIGEST}"
    assert left(house) == sorted([DIGEST, *OLD[2:]])
    assert sorted(os.listdir(tmp_path / "receipts")) == sorted(os.listdir(tmp_path / "caches")) == left(house)


def test_a_release_in_use_is_not_taken_from_under_its_process(house: dict[str, Any], tmp_path: Path) -> None:
    for number, (digest, source) in enumerate([(OLD[0], "cmdline"), (OLD[1], "maps")], start=10):
        process = tmp_path / "proc" / str(number)
        process.mkdir()
        (process / source).write_text(f"{house['releases']}/{digest}/bin/python\0-m\0sglang")
    switch_on_host.act(**house)
    assert left(house) == sorted([DIGEST, *OLD])


def test_what_is_half_built_goes_first_and_unknown_folders_stay(house: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "receipts" / OLD[3]).unlink()
    (tmp_path / "releases" / "notes-of-the-owner").mkdir()
    switch_on_host.act(**house)
    assert left(house) == sorted([DIGEST, OLD[1], OLD[2], "notes-of-the-owner"])


def test_nothing_goes_while_a_release_is_being_built(house: dict[str, Any]) -> None:
    with open(house["lock_file"], "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        switch_on_host.act(**house)
    assert left(house) == sorted([DIGEST, *OLD]) and os.readlink(house["link"]).endswith(DIGEST)


def test_a_release_without_its_receipts_does_not_become_current(house: dict[str, Any]) -> None:
    os.unlink(house["receipts"][0])
    with pytest.raises(Problem, match=r"only what is built and patched may\. Fix: "):
        switch_on_host.act(**house)
    assert os.readlink(house["link"]).endswith(OLD[0]) and len(left(house)) == 5


def test_a_folder_in_the_place_of_the_link_is_not_removed(house: dict[str, Any]) -> None:
    os.unlink(house["link"])
    os.mkdir(house["link"])
    with pytest.raises(Problem, match="found a folder, wanted a link"):
        switch_on_host.act(**house)


def test_the_unit_runs_the_builder_with_the_request_of_its_instance() -> None:
    text = deploy.unit_text()
    assert (
        "ExecStart=/usr/bin/python3 /opt/kimi-nodes/tools/release_builder.py /var/lib/kimi-nodes/builds/%i.json\n"
        in text
    )
    assert "Type=oneshot" in text and "TimeoutStartSec=infinity" in text
    assert f"EnvironmentFile=-{layout.MACHINE_ENVIRONMENT}\n" in text  # the machine's proxies hold for it


def test_the_probe_measures_what_is_not_there_yet(tmp_path: Path) -> None:
    assert probe.free(str(tmp_path / "a" / "b")) > 0
    assert probe.installed(str(tmp_path / "none")) == []


def request(tmp_path: Path, lock: str, wanted: dict[str, str], uv: str) -> dict[str, Any]:
    for name in ("receipts", "releases"):
        (tmp_path / name).mkdir()
    environment = tmp_path / "releases" / DIGEST
    return {
        **REQUEST,
        "bytes": 10**6,
        "cache": str(tmp_path / "cache"),
        "distributions": wanted,
        "environment": str(environment),
        "lock": lock,
        "python": os.path.realpath(sys.executable),
        "receipts": [str(tmp_path / "receipts" / "release.json"), str(tmp_path / "receipts" / "patches.json")],
        "site_packages": f"{environment}/lib/python{PYTHON}/site-packages",
        "status": str(tmp_path / "status.json"),
        "uv": uv,
    }


FAKE_UV = """#!{python}
import os, pathlib, sys, time
given = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*given, os.environ.get("UV_SYSTEM_CERTS"), file=log)
if given[:2] == ["cache", "dir"]:
    print(os.environ.get("FAKE_CACHE") or os.environ["XDG_CACHE_HOME"] + "/uv")
elif given[0] == "venv":
    pathlib.Path(given[-1], "bin").mkdir(parents=True)
    os.symlink(sys.executable, given[-1] + "/bin/python")
else:
    print("Resolved 1 package", flush=True)
    if os.environ.get("FAKE_SAYS"):
        sys.exit(os.environ["FAKE_SAYS"])
    site = pathlib.Path({site!r})
    (site / "one-1.dist-info").mkdir(parents=True)
    (site / "one-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\\nName: one\\nVersion: 1\\n")
    (site / "one.py").write_text("answer = 1\\n")
    (site / "one.py").chmod(0o666)
    time.sleep(float(os.environ.get("FAKE_SECONDS", 0)))
"""


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A request whose uv writes one small distribution and logs how it was called."""
    uv = tmp_path / "uv"
    made = request(tmp_path, "one==1 --hash=sha256:00\n", {"one": "1"}, str(uv))
    uv.write_text(FAKE_UV.format(python=sys.executable, log=str(tmp_path / "log"), site=made["site_packages"]))
    uv.chmod(0o755)
    monkeypatch.setattr(builder, "LOCK_FILE", str(tmp_path / "lock"))
    return made


def test_a_building_ends_with_bytecode_closed_files_and_the_receipt(faked: dict[str, Any], tmp_path: Path) -> None:
    builder.build(faked)
    site = Path(faked["site_packages"])
    assert (site / "one.py").stat().st_mode & 0o022 == 0
    assert list((site / "__pycache__").glob("one.*.pyc"))
    receipt = json.loads(Path(faked["receipts"][0]).read_text())
    assert receipt["distributions"] == {"one": "1"} and receipt["digest"] == DIGEST
    assert (Path(faked["environment"]) / "release.lock.txt").read_text() == faked["lock"]
    calls = (tmp_path / "log").read_text().splitlines()
    assert all(call.endswith(" 1") for call in calls), "the system's authorities are trusted"
    install = calls[-1]
    for option in ("--require-hashes", "--no-deps", "--no-build", "--link-mode hardlink"):
        assert option in install
    builder.build(faked)
    assert (tmp_path / "log").read_text().splitlines() == calls, "what is whole is never built again"


def test_a_building_makes_the_receipts_of_later_steps_void(faked: dict[str, Any]) -> None:
    Path(faked["receipts"][1]).write_text("{}")
    builder.build(faked)
    assert not Path(faked["receipts"][1]).exists()


def test_what_a_killed_building_left_is_removed(
    faked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(faked))
    code = (
        "import sys; from files.tools import release_builder as builder; "
        f"builder.LOCK_FILE = {str(tmp_path / 'lock')!r}; builder.main(sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(file)],
        cwd=PROJECT,
        env={**os.environ, "FAKE_SECONDS": "60"},
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 30
        while not (Path(faked["site_packages"]) / "one.py").exists() and time.monotonic() < until:
            time.sleep(0.05)
        (Path(faked["site_packages"]) / "left.py").write_text("")
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    assert not Path(faked["receipts"][0]).exists()
    builder.build(faked)
    assert Path(faked["receipts"][0]).exists() and not (Path(faked["site_packages"]) / "left.py").exists()


def test_only_a_cache_of_our_own_is_removed(
    faked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, others = tmp_path / "cache" / "uv", tmp_path / "of-the-owner"
    own.mkdir(parents=True)
    others.mkdir()
    monkeypatch.setenv("FAKE_CACHE", str(others))
    builder.build(faked)
    assert others.exists() and "--link-mode copy" in (tmp_path / "log").read_text(), (
        "no link into a cache that others write"
    )
    os.unlink(faked["receipts"][0])
    monkeypatch.delenv("FAKE_CACHE")
    builder.build(faked)
    assert others.exists() and not own.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bytes": 10**18}, "GB free, wanted 1000000000.0 GB. Fix: free space"),
        ({"distributions": {"one": "1", "two": "2"}}, "two found nothing, wanted 2. Fix: run deploy.py again"),
        ({"uv": "/usr/bin/false"}, "uv does not run"),
    ],
)
def test_what_cannot_be_built_has_no_receipt(
    faked: dict[str, Any], change: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps({**faked, **change}))
    assert builder.main([str(file)]) == 1
    assert says in capsys.readouterr().err
    assert not Path(faked["receipts"][0]).exists()


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ("error: Hash mismatch for `one==1`", "never edit the lock by hand"),
        ("error: No space left on device (os error 28)", "free space"),
        ("invalid peer certificate: UnknownIssuer", "update-ca-certificates"),
        ("something new", "reaches its package index"),
    ],
)
def test_what_uv_says_is_told_with_a_way_out(
    faked: dict[str, Any], said: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SAYS", said)
    with pytest.raises(builder.Failed) as caught:
        builder.build(faked)
    assert said in str(caught.value) and fix in str(caught.value)


@pytest.mark.slow
def test_a_real_lock_is_installed_by_the_real_uv(tmp_path: Path) -> None:
    lock = (PROJECT / "files" / "locks" / "tools.txt").read_bytes()
    made = request(tmp_path, lock.decode(), distributions(lock, PYTHON), f"{os.path.dirname(sys.executable)}/uv")
    builder.build(made)
    python = f"{made['environment']}/bin/python"
    assert subprocess.run([python, "-c", "import huggingface_hub"], check=False).returncode == 0
    assert json.loads(Path(made["receipts"][0]).read_text())["distributions"] == distributions(lock, PYTHON)
    os.unlink(made["receipts"][0])
    broken = "".join(
        f"{name}=={version} --hash=sha256:{'0' * 64}\n" for name, version in distributions(lock, PYTHON).items()
    )
    with pytest.raises(builder.Failed, match="never edit the lock by hand"):
        builder.build({**made, "lock": broken})
    assert not Path(made["receipts"][0]).exists()
