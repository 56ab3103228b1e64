"""What the owner wrote is told apart from what is pyinfra's; an inventory is read without importing pyinfra here."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from kit_project import DEPLOY, ROOT, Project

from kit.inventory import InventoryError, limited, load, pyinfra_keys

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
    entries = load(inventory)
    assert limited(entries, []) == entries
    assert list(limited(entries, ["two"])) == ["two"]
    assert list(limited(entries, ["t*"])) == ["two", "three"]
    assert list(limited(entries, ["lab"])) == ["three"]
    assert list(limited(entries, ["lab", "one"])) == ["one", "three"]
    with pytest.raises(InventoryError, match=r"no host of .* matches 'four', wanted one of one, two, three.*Fix: "):
        limited(entries, ["two", "four"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu = [", "bad.py:1: SyntaxError"),
        ("\nraise KeyError('x')", "bad.py:2: KeyError: 'x'"),
        ("gpu = [('a', {'key': object()})]", "wanted text, numbers, lists or tables only"),
        ("gpu = []", "found no host in it"),
        ("raise SystemExit('no machine is up. Fix: bin/lab up 1')", "no machine is up"),
    ],
)
def test_an_inventory_that_cannot_be_read_is_one_clear_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(InventoryError) as raised:
        load(tmp_path / "bad.py")
    assert told in str(raised.value)
    assert "Fix: " in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_group_data_that_cannot_be_read_is_named_by_file_and_line(inventory: Path) -> None:
    (inventory.parent / "group_data/nodes.py").write_text("profile = 'tp8'\ngpu = b300\n")
    with pytest.raises(InventoryError, match=r"group_data/nodes\.py:2: NameError: name 'b300' is not defined"):
        load(inventory)


def test_the_labs_inventory_without_a_lab_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_NODES_LAB", "nolab")
    with pytest.raises(InventoryError, match=r"^lab 'nolab' has no machine that is up\nFix: bin/lab up 1$"):
        load(ROOT / "inventory/lab.py")


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
    data = "{'profile': 'tp8', '_sudo_user': 'root', 'weights_directory': Path('/w'), 'toolkits_beside': ('12.8',)}"
    project.write("hosts.py", f"from pathlib import Path\nhosts = [('@local', {data})]\n")
    project.write(
        "deploy.py",
        DEPLOY + "from kit.inventory import node_data\nfrom kit.command import host as h\nprint('D', node_data(h()))\n",
    )
    done = project.run("--dry", "--data", "extra=3", inventory="hosts.py")
    (line,) = (line for line in done.out.splitlines() if line.startswith("D "))
    assert ast.literal_eval(line.removeprefix("D ")) == load(tmp_path / "hosts.py", ["extra=3"])["@local"].data
    assert "'weights_directory': '/w', 'toolkits_beside': ['12.8']" in line


def pyinfras_reading(folder: Path, values: list[str]) -> dict[str, object]:
    """The values of --data k0=... k1=... in a real run of pyinfra."""
    project = Project(folder)
    project.write("hosts.py", "hosts = ['@local']\n")
    project.write("deploy.py", "import json\nfrom pyinfra import host\nprint('D', json.dumps(host.data.dict()))\n")
    data = [part for number, value in enumerate(values) for part in ("--data", f"k{number}={value}")]
    done = project.run("--dry", *data, inventory="hosts.py")
    (line,) = (line for line in done.out.splitlines() if line.startswith("D "))
    return dict(json.loads(line.removeprefix("D ")))


# What neither Python nor JSON, JSON and not Python, Python and not JSON, or int() alone takes.
READ_DIFFERENTLY = [
    "ep4", "30001", "0.9", "true", "False", "TRUE", "null", "None", '["12.8"]', "['12.8']", "(1, 2)", '{"a": [1]}',
    "'quoted'", '"quoted"', "1_000", " 7 ", "007", "0x10", "1e3", "\u0663", "-", "", "a=b", "[1,", "b'x'", "{}", "1.0",
]  # fmt: skip


VALUES = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(0, 9) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ).map(json.dumps),
)


@settings(max_examples=1, deadline=None, phases=[Phase.explicit, Phase.generate])
@example(values=READ_DIFFERENTLY)
@given(values=st.lists(VALUES, min_size=40, max_size=60))
def test_data_of_a_run_is_read_as_pyinfra_reads_it(tmp_path_factory: pytest.TempPathFactory, values: list[str]) -> None:
    folder = tmp_path_factory.mktemp("project")
    wanted = pyinfras_reading(folder, values)
    found = load(folder / "hosts.py", [f"k{number}={value}" for number, value in enumerate(values)])
    assert json.dumps(found["@local"].data) == json.dumps(wanted), "compared as text: NaN is not equal to itself"


def test_data_overrides_what_the_inventory_says_pyinfras_keys_too(inventory: Path) -> None:
    entries = load(inventory, ["profile=pp8", "ssh_port=2200", 'toolkits_beside=["12.8"]', "misspelt_key=['12.8']"])
    assert {entry.data["profile"] for entry in entries.values()} == {"pp8"}
    assert entries["two"].data["toolkits_beside"] == ["12.8"]
    assert entries["two"].data["misspelt_key"] == "['12.8']", "no Python literal is read"
    assert {entry.ssh["ssh_port"] for entry in entries.values()} == {2200}


@pytest.mark.parametrize("text", ["profile", "=ep4", ""])
def test_data_without_a_key_or_a_value_is_refused(inventory: Path, text: str) -> None:
    with pytest.raises(InventoryError, match=r"found no key and value, wanted KEY=VALUE\. Fix: "):
        load(inventory, [text])
