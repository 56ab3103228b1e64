"""What the owner wrote is told apart from what is pyinfra's; an inventory is read without importing pyinfra here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kit_project import DEPLOY, ROOT, Project

from kit.inventory import InventoryError, load, pyinfra_keys

INVENTORY = """
gpu = [("one", {"profile": "tp8", "ssh_port": 2222}), "two"]
lab = (["three"], {"weights_directory": "/w"})
"""


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    (tmp_path / "group_data").mkdir()
    (tmp_path / "group_data/all.py").write_text(
        "ssh_user = 'root'\n_sudo = True\nprofile = 'ep8'\nmisspelt_key = {1, 2}\n"
    )
    (tmp_path / "nodes.py").write_text(INVENTORY)
    return tmp_path / "nodes.py"


def test_our_keys_and_pyinfras_are_told_apart(inventory: Path) -> None:
    entries = load(inventory)
    assert list(entries) == ["one", "two", "three"]
    assert entries["one"].data == {"profile": "tp8", "misspelt_key": [1, 2]}
    assert entries["one"].ssh == {"ssh_user": "root", "_sudo": True, "ssh_port": 2222}
    assert entries["two"].data["profile"] == "ep8"
    assert entries["three"].data["weights_directory"] == "/w"
    assert "gpu" in entries["one"].groups and "gpu" not in entries["three"].groups


def test_a_limit_is_a_name_a_pattern_or_a_group(inventory: Path) -> None:
    assert list(load(inventory, "two")) == ["two"]
    assert list(load(inventory, "t*")) == ["two", "three"]
    assert list(load(inventory, "lab")) == ["three"]
    with pytest.raises(InventoryError, match=r"no host of .* matches 'four', wanted one of one, two, three.*Fix: "):
        load(inventory, "four")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu = [", "SyntaxError"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("gpu = [('a', {'key': object()})]", "cannot be told to other programs"),
    ],
)
def test_an_inventory_that_cannot_be_read_is_one_clear_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(InventoryError) as raised:
        load(tmp_path / "bad.py")
    assert told in str(raised.value)
    assert "Fix: " in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_a_missing_inventory_is_named(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match=r"none\.py: no such file, wanted an inventory\. Fix: "):
        load(tmp_path / "none.py")


def test_reading_an_inventory_leaves_this_process_unpatched(inventory: Path) -> None:
    code = (
        "import socket, sys; from kit.inventory import load; load(sys.argv[1]); "
        "assert not [name for name in sys.modules if name.startswith(('gevent', 'pyinfra'))]"
    )
    subprocess.run([sys.executable, "-c", code, str(inventory)], cwd=ROOT, check=True)


def test_pyinfras_keys_come_from_its_own_tables() -> None:
    assert {"ssh_user", "ssh_key", "ssh_known_hosts_file", "_sudo", "_env", "name"} <= pyinfra_keys()
    assert not {"profile", "release", "weights_directory"} & pyinfra_keys()


def test_the_data_of_a_host_in_a_deploy_is_the_same(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("hosts.py", "hosts = [('@local', {'profile': 'tp8', '_sudo_user': 'root'})]\n")
    project.write(
        "deploy.py",
        DEPLOY + "from kit.inventory import node_data\nfrom kit.command import host as h\nprint('D', node_data(h()))\n",
    )
    done = project.run("--dry", "--data", "extra=3", inventory="hosts.py")
    assert "D {'profile': 'tp8', 'extra': 3}" in done.out, done.text
