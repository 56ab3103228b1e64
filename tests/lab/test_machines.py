"""A lab machine is an ordinary server whose host key is checked, with NVIDIA's repository and the hub in reach."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.lab import nvidia_repository, settings
from tests.lab.shell import LabError
from tests.lab.tiny_model import REPOSITORY

pytestmark = pytest.mark.lab
ENVIRONMENT = {**os.environ, "KIMI_NODES_LAB": "machines", "KIMI_NODES_LAB_NETWORK": "10.213.9"}
LAB = settings.read(ENVIRONMENT)


def lab(*arguments: str, ok: bool = True, input: str | None = None) -> str:
    command = [str(settings.CHECKOUT / "bin/lab"), *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=180, input=input)
    assert not ok or done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module", autouse=True)
def machines() -> Iterator[None]:
    lab("down")
    lab("up", "1")
    try:
        yield
    finally:
        lab("down")


def test_it_is_an_ordinary_server() -> None:
    assert lab("ssh", "h1", "systemctl is-system-running --wait").strip() == "running"
    for program in ("python3", "sudo", "curl"):
        assert lab("ssh", "h1", f"command -v {program}")
    for program in ("gcc", "pip3", "nvcc"):
        assert lab("ssh", "h1", f"command -v {program}", ok=False) == "", "roles install what they need themselves"


def test_a_wrong_host_key_is_refused() -> None:
    true_keys = LAB.known_hosts.read_text()
    kind, _ = true_keys.split()[1:]
    other = LAB.identity.with_suffix(".pub").read_text().split()[1]
    try:
        LAB.known_hosts.write_text(f"h1,{LAB.address('h1')} {kind} {other}\n")
        assert "Host key verification failed" in lab("ssh", "h1", "-o", "ControlPath=none", "true", ok=False)
    finally:
        LAB.known_hosts.write_text(true_keys)


def test_a_machine_is_ready_for_ssh_in_seconds() -> None:
    began = time.monotonic()
    lab("reset", "h1")
    assert time.monotonic() - began < 20


def test_it_survives_a_reboot_and_a_shutdown() -> None:
    before = lab("ssh", "h1", "echo kept > /root/kept; cat /proc/sys/kernel/random/boot_id")
    lab("ssh", "h1", "systemctl reboot", ok=False)
    end = time.monotonic() + 60
    while (after := lab("ssh", "h1", "cat /proc/sys/kernel/random/boot_id", ok=False)) == before or len(after) != 37:
        assert time.monotonic() < end, after
        time.sleep(0.2)
    lab("poweroff", "h1")
    assert " off " in lab("ls")
    lab("up", "h1")
    assert lab("ssh", "h1", "cat /root/kept") == "kept\n"


def test_a_cut_link_swallows_everything_until_it_is_healed() -> None:
    lab("cut", "h1")
    said = lab("ssh", "h1", "-o", "ControlPath=none", "-o", "ConnectTimeout=2", "true", ok=False)
    assert "timed out" in said
    lab("heal", "h1")
    assert lab("ssh", "h1", "-o", "ControlPath=none", "echo again") == "again\n"


def test_it_shows_the_gpus_that_were_described() -> None:
    assert lab("ssh", "h1", "nvidia-smi -L").count("RTX PRO 6000 Blackwell Server Edition") == 8
    lab("gpus", "h1", json.dumps({"model": "B300 SXM6 AC", "links": "nvlink", "missing": [5]}))
    assert lab("ssh", "h1", "nvidia-smi -L").count("B300") == 7
    assert lab("ssh", "h1", "lspci -nn -d 10de:").count("[10de:3182]") == 7
    assert "unknown keys colour" in lab("gpus", "h1", '{"colour": "green"}', ok=False)
    lab("gpus", "h1", "{}")


def test_without_the_driver_only_the_bus_tells() -> None:
    lab("ssh", "h1", "dpkg --purge nvidia-driver-stand-in")
    assert "command not found" in lab("ssh", "h1", "nvidia-smi", ok=False)
    assert lab("ssh", "h1", "ldconfig -p | grep -c libcuda.so.1", ok=False).strip() == "0"
    assert lab("ssh", "h1", "lspci -nn").count("[10de:2bb5]") == 8


APT = f"""
set -e
site={nvidia_repository.HOST}/{nvidia_repository.PATH}/debian12/x86_64
curl -fsSO $site/cuda-keyring_1.1-1_all.deb
dpkg -i cuda-keyring_1.1-1_all.deb >/dev/null
apt-get update -q
apt-cache policy cuda-toolkit-13-0
"""


def test_nvidias_repository_answers_over_https_and_apt_trusts_its_key() -> None:
    said = lab("ssh", "h1", "bash -s", input=APT)
    assert "Candidate: 13.0.2-1" in said
    assert "W: " not in said and "E: " not in said
    lab("ssh", "h1", "cp /usr/share/keyrings/debian-archive-keyring.gpg /usr/share/keyrings/cuda-archive-keyring.gpg")
    assert "NO_PUBKEY" in lab("ssh", "h1", "apt-get update -q")  # which exits 0 all the same


def test_the_hub_answers_under_its_own_name_and_its_requests_are_logged() -> None:
    lab(
        "ssh",
        "h1",
        f"curl -fsSL https://huggingface.co/{REPOSITORY}/resolve/main/model-00001-of-00002.safetensors -o m",
    )
    hosts = [json.loads(line)["host"] for line in lab("hub", "log").splitlines()]
    assert hosts == ["huggingface.co", "cdn-lfs.huggingface.co"]


def test_a_token_is_wanted_when_told_and_is_for_root_only() -> None:
    lab("hub", "token", "on")
    try:
        assert "401" in lab("ssh", "h1", f"curl -fsS https://huggingface.co/api/models/{REPOSITORY}", ok=False)
        token = LAB.state / "hub-token"
        assert token.stat().st_mode & 0o777 == 0o600
        assert token.read_text().strip() not in lab("hub", "show")
    finally:
        lab("hub", "clear")
    lab("ssh", "h1", f"curl -fsS https://huggingface.co/api/models/{REPOSITORY}")


def test_machines_share_the_download_cache() -> None:
    """What one machine has fetched, the next one finds."""
    lab("ssh", "h1", "echo from h1 > /var/cache/lab-uv/.shared")
    shared = LAB.uv_cache / ".shared"
    try:
        assert shared.read_text() == "from h1\n"
    finally:
        shared.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "words", [("up", "x1"), ("ssh", "h9", "true"), ("reset", "h9"), ("hub", "fault", "melt", "f", "0")]
)
def test_nonsense_is_refused_with_what_to_do(words: tuple[str, ...]) -> None:
    said = lab(*words, ok=False)
    assert said.startswith("lab: ") and "Fix: " in said


@pytest.mark.parametrize("bad", [{"KIMI_NODES_LAB": "Lab-1"}, {"KIMI_NODES_LAB_NETWORK": "10.0"}])
def test_a_bad_name_or_network_is_refused(bad: dict[str, str]) -> None:
    with pytest.raises(LabError, match="Fix: "):
        settings.read(bad)


def test_too_small_a_disk_is_said_before_anything_is_written() -> None:
    from tests.lab import controller

    with pytest.raises(LabError, match=r"GB free, .* wants 1000000 GB\nFix: "):
        controller.require_disk(LAB.parts, 10**15, "this test")
