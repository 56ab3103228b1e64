"""A fresh machine, deployed, verified, asked, deployed again, broken in every way that it must notice, and mended.

The tests run in this order on one machine, each beginning where the one before it ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from node import layout
from node.toolkits import TOOLKITS
from tests.proof.conftest import PROJECT, Node, lab

MOST_COMMANDS = 25  # of a deploy that changes nothing, whatever the round-trip time


def test_the_verify_suite_fails_on_an_empty_host_in_every_file(node: Node) -> None:
    """A suite that is content with nothing proves nothing. Preflight is the exception: the machine itself is as
    declared."""
    files = {path.name for path in (PROJECT / "tests/host").glob("test_*.py")} - {"test_preflight.py"}
    verified = node.verify()
    assert {name.split("::")[0] for name in verified.failed} >= files, verified.output
    passed = re.findall(r"^(tests/host/\S+) PASSED", verified.output, re.MULTILINE)
    assert not [name for name in passed if "test_preflight" not in name]


def test_deploy_from_bare(node: Node) -> None:
    deployed = node.deploy()
    assert deployed.code == 0, deployed.output
    assert deployed.changed


def test_the_verify_suite_is_green(node: Node) -> None:
    verified = node.verify()
    assert verified.code == 0, verified.output


def test_a_real_question_is_answered(node: Node) -> None:
    """Sampled, over HTTP, through the same port and key as any client."""
    assert "391" in lab("ask", node.name)


def test_the_second_deploy_changes_nothing(node: Node) -> None:
    deployed = node.deploy()
    assert deployed.code == 0, deployed.output
    assert deployed.changed == (), deployed.output
    assert deployed.unchanged
    commands = re.search(r"remote commands: (\d+)", deployed.output)
    assert commands, deployed.output
    assert int(commands[1]) <= MOST_COMMANDS, deployed.output


@dataclass(frozen=True)
class Break:
    """One state broken on purpose. do: shell, on the machine. role: whose verify file must fail, saying `named`.

    refused: what deploy says when it must not repair this by itself, and mend: what its Fix tells to do. Otherwise it
    repairs.
    """

    name: str
    role: str
    do: str
    named: tuple[str, ...]
    refused: str | None = None
    mend: str = ""


NEW, OLD = TOOLKITS["13.0"].prefix, TOOLKITS["12.8"].prefix
SITE = f"$(echo {layout.CURRENT}/lib/python3*/site-packages)"
WEIGHTS = "$(find /srv/weights -name '*.safetensors' -not -path '*/.staging/*' | sort | head -1)"

FAULT, DROP_IN = "/run/fault", "/run/systemd/system/sglang-cpu.service.d"
READ_BACK_WRONG = (PROJECT / "tests/proof/prefix_fault_on_node.py").read_text()

BREAKS = (
    Break(
        "a part of the toolkit is removed",
        "cuda_toolkit",
        "apt-get remove -y -q libcurand-dev-13-0",
        ("curand.h", "Fix: "),
    ),
    Break(
        "a header is replaced by a link into the other toolkit",
        "cuda_toolkit",
        f"ln -sf {OLD}/include/cuda_runtime.h {NEW}/include/cuda_runtime.h",
        ("cuda_runtime.h", OLD, "Fix: "),
        refused="cuda_runtime.h",
        mend=f"rm {NEW}/include/cuda_runtime.h && apt-get install -y -q --reinstall cuda-cudart-dev-13-0",
    ),
    Break(
        "a patched file is edited",
        "source_patches",
        f"echo '# edited' >> {SITE}/sglang/srt/layers/attention/triton_backend.py",
        ("triton_backend.py", "Fix: "),
        refused="triton_backend.py",
        mend=f"sed -i '$ d' {SITE}/sglang/srt/layers/attention/triton_backend.py",
    ),
    Break(
        "a byte of a weight is flipped",
        "weights",
        f"f={WEIGHTS}; chmod u+w $f; printf X | dd of=$f bs=1 seek=5000 conv=notrunc status=none",
        (".safetensors", "Fix: "),
    ),
    Break(
        "a byte of a weight is flipped and its time put back",
        "weights",
        f"f={WEIGHTS}; t=$(stat -c %y $f); chmod u+w $f; "
        'printf Y | dd of=$f bs=1 seek=6000 conv=notrunc status=none; touch -d "$t" $f',
        (".safetensors", "Fix: "),
    ),
    Break(
        "the service is stopped, and would read its prefix cache wrong",
        "inference_service",
        f"mkdir -p {FAULT} {DROP_IN} && cat > {FAULT}/sitecustomize.py <<'END'\n{READ_BACK_WRONG}\nEND\n"
        f"echo PYTHONPATH={FAULT}:{layout.TOOLS} > {FAULT}/env\n"
        f"printf '[Service]\\nEnvironmentFile={FAULT}/env\\n' > {DROP_IN}/fault.conf\n"
        "systemctl stop 'sglang-*.service'",
        ("sglang-cpu.service", "Fix: "),
        refused="long prefix, again: the same text was answered right the first time; now, with 396 of its 397 tokens",
        mend=f"rm -r {FAULT} {DROP_IN}",
    ),
    Break(
        "current is pointed elsewhere",
        "python_release",
        f"ln -sfn /usr {layout.CURRENT}",
        (layout.CURRENT, "Fix: "),
    ),
)


@pytest.mark.parametrize("case", BREAKS, ids=lambda case: case.name.replace(" ", "-"))
def test_what_is_broken_is_named_and_mended(node: Node, case: Break) -> None:
    node.ssh(case.do)
    verified = node.verify(case.role)
    assert verified.failed, f"nothing noticed that {case.name}\n{verified.output}"
    for word in case.named:
        assert word in verified.output, verified.output
    deployed = node.deploy()
    if case.refused:
        refused = deployed
        node.ssh(case.mend)  # first of all: the tests that follow want the machine whole
        deployed = node.deploy()
        assert refused.code == 1 and case.refused in refused.output and "Fix: " in refused.output, refused.output
    assert deployed.code == 0, deployed.output
    again = node.verify(case.role)
    assert again.code == 0, again.output


def test_after_all_repairs_the_node_is_whole_and_answers(node: Node) -> None:
    assert node.deploy().changed == ()
    verified = node.verify()
    assert verified.code == 0, verified.output
    assert "391" in lab("ask", node.name)


BAD_INVENTORIES = {
    "unknown key": ("tensor_paralel=8", "tensor_paralel"),
    "unknown profile": ("profile=tp9", "tp9"),
    "wrong type": ("port=many", "'many' (str)"),
    "relative path": ("weights_directory=weights", "an absolute path"),
    "a profile of another device": ("profile=tp8", "a profile for cuda with model lab-tiny"),
    "the machine is not the declared one": ("gpu=b300", "wanted NVIDIA B300"),
}


@pytest.mark.parametrize("case", BAD_INVENTORIES)
def test_a_bad_inventory_is_refused_and_changes_nothing(node: Node, case: str) -> None:
    data, named = BAD_INVENTORIES[case]
    node.ssh("touch /run/before-deploy; sleep 0.1")
    deployed = node.deploy(data)
    assert deployed.code == 1, deployed.output
    assert named in deployed.output and "Fix: " in deployed.output
    assert "Traceback" not in deployed.output
    changed = node.ssh("find /etc /opt /usr /srv /var/lib /var/cache -xdev -newercm /run/before-deploy -not -type d")
    assert changed == "", changed


def test_no_secret_is_in_any_output_of_a_deploy(node: Node) -> None:
    """The key that clients use is on the node, in files that only root, the server and the edge read."""
    key = node.ssh(f"cat {layout.KEYS}/api-key")
    assert len(key) >= 32
    assert key not in node.deploy().output
    places = "/etc /opt/kimi-nodes/tools /var/lib/kimi-nodes /run/systemd/system /proc/[0-9]*/cmdline"
    found = node.ssh(f"grep -rlF -f {layout.KEYS}/api-key {places} 2>/dev/null", check=False)  # not in our own argv
    assert set(found.split()) <= {f"{layout.KEYS}/api-key", f"{layout.KEYS}/keys.yaml", layout.EDGE_UPSTREAM}, found
