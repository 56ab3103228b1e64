"""Bind the verify suite to the hosts of an inventory and to their Plans.

    pytest tests/host --inventory inventory/pro6000.py [--limit NAME-OR-GROUP]     over ssh, from the controller

Each test gets `host` (testinfra) and `plan` (node.plan.Plan), made from the same inventory data and from what the host
says of itself now, so that nothing here restates a path or a version.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import testinfra

from kit import ssh_config
from kit.inventory import HostEntry, InventoryError, limited, load, neighbours
from kit.program import probe_command
from node import plan as plan_module
from node.hardware import QUERY_FIELDS
from node.plan import Observed, Plan
from node.render import read_file
from node.sharing import Neighbour
from roles.preflight.deploy import observe
from roles.preflight.facts import HostFacts

ENTRIES = pytest.StashKey[Mapping[str, HostEntry]]()
NEIGHBOURS = pytest.StashKey[list[tuple[str, str, Mapping[str, Any]]]]()
SSH_CONFIG = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--inventory", help="the pyinfra inventory whose hosts are verified")
    parser.addoption("--limit", action="append", default=[], help="only hosts of this name, pattern or group")
    parser.addoption(
        "--data", action="append", default=[], metavar="KEY=VALUE", help="as pyinfra's: one key for all hosts"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("help"):
        return
    inventory = config.getoption("--inventory")
    if not inventory:
        raise pytest.UsageError("the verify suite wants hosts. Fix: pytest tests/host --inventory inventory/pro6000.py")
    try:
        everyone = load(inventory, config.getoption("--data"))
        config.stash[NEIGHBOURS] = neighbours(everyone)
        config.stash[ENTRIES] = limited(everyone, config.getoption("--limit"))
    except InventoryError as error:
        raise pytest.UsageError(str(error)) from None
    connections = contextlib.ExitStack()
    config.stash[SSH_CONFIG] = connections.enter_context(ssh_config.written(config.stash[ENTRIES]))
    config.add_cleanup(connections.close)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "entry" in metafunc.fixturenames:
        entries = metafunc.config.stash[ENTRIES]
        metafunc.parametrize("entry", list(entries.values()), ids=list(entries), scope="session")


@pytest.fixture(scope="session")
def host(entry: HostEntry, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The testinfra host of one inventory entry."""
    if ssh_config.is_local(entry):
        yield testinfra.get_host("local://")
        return
    sudo = "&sudo=True" if entry.ssh.get("_sudo") else ""
    yield testinfra.get_host(f"ssh://{entry.name}?ssh_config={request.config.stash[SSH_CONFIG]}{sudo}")


@pytest.fixture(scope="session")
def data(entry: HostEntry) -> Mapping[str, Any]:
    """The inventory data of the host."""
    return entry.data


@pytest.fixture(scope="session")
def observed(host: Any, data: Mapping[str, Any]) -> Observed:
    """What the host says of itself now."""
    arguments = {"query_fields": list(QUERY_FIELDS), "weights_directory": data.get("weights_directory")}
    answer = host.run(probe_command(HostFacts.source(), arguments).get_raw_value())
    assert answer.rc == 0, f"the host gives no answer: {answer.stderr.strip() or answer.stdout.strip()}"
    found = json.loads(answer.stdout.splitlines()[-1])
    assert "found" in found, f"the host cannot be looked at: {found}"
    return observe(found["found"])


@pytest.fixture(scope="session")
def plan(entry: HostEntry, data: Mapping[str, Any], observed: Observed, request: pytest.FixtureRequest) -> Plan:
    """The Plan of the host. Where the host is not what it should be, the Plan for what it should be: the other tests
    then still say what is missing, and test_preflight says why."""
    everyone = [Neighbour(*each) for each in request.config.stash[NEIGHBOURS]]
    made = plan_module.make(entry.name, data, read_file, observed, neighbours=everyone)
    if isinstance(made, list):
        made = plan_module.make(entry.name, data, read_file, None, observed.system, everyone)
    if isinstance(made, list):
        pytest.fail("no plan for this host: " + "; ".join(map(str, made)), pytrace=False)
    return made


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line a role: what was proved, and whether it holds."""
    roles: dict[str, dict[str, int]] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            if outcome == "passed" and report.when != "call":
                continue
            role = Path(report.nodeid.split("::")[0]).stem.removeprefix("test_")
            counts = roles.setdefault(role, {"passed": 0, "failed": 0})
            counts["passed" if outcome == "passed" else "failed"] += 1
    terminalreporter.section("roles verified")
    for role, counts in sorted(roles.items()):
        verdict = "ok" if not counts["failed"] else "NOT AS PLANNED"
        terminalreporter.write_line(f"{role:20} {verdict:15} {counts['passed']} checks hold, {counts['failed']} do not")
