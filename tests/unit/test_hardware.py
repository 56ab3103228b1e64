"""A machine is put together from what its programs print, and told apart from the one that is declared."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hardware_samples as samples
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from node import hardware
from node.hardware import GPU_MODELS, QUERY_FIELDS, Hardware
from node.problems import Malformed, Problem

FIXTURES = Path(__file__).parents[1] / "fixtures"
SHARED = Path(__file__).parents[3] / "shared" / "fixtures"
RTX = "rtx-pro-6000-blackwell-server"
FLOOR = "580.65.06"


def ours(name: str) -> str:
    return (FIXTURES / name).read_bytes().decode()


def machine(
    key: str, count: int, links: samples.Links | None = None, lspci: str = "", **changes: dict[int, dict[str, str]]
) -> Hardware:
    """A machine of our own writing, through its printed words."""
    links = links or (samples.all_nvlink if GPU_MODELS[key].interconnect == "nvlink" else samples.two_sockets)
    outputs = {
        "query": samples.query(key, count, **changes),
        "topology": samples.topology(count, links),
        "lspci": lspci,
    }
    return hardware.from_probe(outputs)


def only(problems: list[Problem]) -> Problem:
    (problem,) = problems
    return problem


# --- from_probe --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detail", ["smi_q", "smi_xml"])
def test_two_h200_from_all_that_the_host_printed(detail: str) -> None:
    found = hardware.from_probe(
        {
            "query": ours("h200x2.query.csv"),
            "topology": ours("h200x2.topo-m.txt"),
            detail: ours("h200x2.smi-q.xml" if detail == "smi_xml" else "h200x2.smi-q.txt"),
            "nvlink": ours("h200x2.nvlink-s.txt"),
            "lspci": "",
        }
    )
    assert (found.count, found.interconnect, found.seen_by, found.driver) == (2, "nvlink", "nvidia-smi", "580.159.04")
    assert found.links == (("X", "NV18"), ("NV18", "X"))
    assert found.model is GPU_MODELS["h200"]
    assert found.fabric_states == ("Completed", "Completed")
    assert [(gpu.bus_id, gpu.numa_node, gpu.cpu_affinity, gpu.nvlinks) for gpu in found.gpus] == [
        ("0000:00:06.0", 0, "0-31", 18),
        ("0000:00:07.0", 0, "0-31", 18),
    ]
    assert hardware.disagreements(found, hardware.expected("h200", 2), FLOOR) == []


def test_eight_gpus_on_pcie_from_a_host_behind_switches() -> None:
    names = {"smi_q": "smi-q.txt", "topology": "topo-m.txt", "lspci": "lspci.txt"}
    paths = {key: SHARED / f"rtxpro6000x8-switch.{name}" for key, name in names.items()}
    if not all(path.is_file() for path in paths.values()):
        pytest.skip("no rtxpro6000x8-switch.* beside this checkout")
    found = hardware.from_probe({key: path.read_bytes().decode() for key, path in paths.items()})
    assert (found.count, found.interconnect, found.driver) == (8, "pcie", "595.58.03")
    assert found.model is GPU_MODELS[RTX]
    assert [gpu.numa_node for gpu in found.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.on_bus == tuple(gpu.bus_id for gpu in found.gpus)
    assert found.off_fabric == ()
    assert hardware.disagreements(found, hardware.expected(RTX, 8), FLOOR) == []


def test_the_later_texts_fill_what_the_query_leaves_open() -> None:
    bare = "index, name, pci.bus_id\n0, NVIDIA H200, 00000000:00:07.0\n"
    gpu = hardware.from_probe({"query": bare, "smi_q": ours("h200x2.smi-q.txt")}).gpus[0]
    assert (gpu.bus_id, gpu.memory_mib, gpu.fabric_state, gpu.compute_capability) == (
        "0000:00:07.0",
        143771,
        "Completed",
        "9.0",
    )


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        (samples.NO_DRIVER, "install the driver"),
        (samples.MISMATCH, "reboot"),
        (samples.NOT_INSTALLED, "install the driver"),
        (samples.NO_DEVICES, "open kernel modules"),
    ],
    ids=["no driver", "mismatch", "not installed", "no devices"],
)
def test_a_host_whose_nvidia_smi_refuses_is_seen_through_lspci(said: str, fix: str) -> None:
    found = hardware.from_probe({"query": said, "topology": said, "smi_xml": said, "lspci": samples.LSPCI_B300})
    assert (found.seen_by, found.count, found.driver, found.interconnect) == ("lspci", 8, None, "none")
    assert found.model is GPU_MODELS["b300"]
    assert found.driver_failure == said.splitlines()[0]
    problem = only(hardware.disagreements(found, hardware.expected("b300", 8), FLOOR))
    assert (problem.subject, problem.wanted) == ("driver", f"NVIDIA driver {FLOOR} or newer")
    assert problem.found == f"none ({said.splitlines()[0]})"
    assert fix in problem.fix


def test_a_bare_host_without_anything_of_nvidia_has_no_gpus() -> None:
    for outputs in ({}, dict.fromkeys(("query", "topology", "smi_q", "smi_xml", "nvlink", "lspci"), "")):
        found = hardware.from_probe(outputs)
        assert found == Hardware(gpus=(), interconnect="none", seen_by="lspci")
        assert [problem.subject for problem in hardware.disagreements(found, hardware.expected(RTX, 8))] == [
            "driver",
            "GPU count",
        ]


def test_a_driver_too_old_for_the_query_is_seen_through_the_long_form() -> None:
    found = hardware.from_probe({"query": samples.OLD_DRIVER, "smi_q": ours("h200x2.smi-q.txt")})
    assert (found.count, found.driver, found.driver_failure) == (2, "580.159.04", None)


def test_one_gpu_that_answers_nothing_is_named_and_the_others_are_kept() -> None:
    rows = samples.query("b300", 8).splitlines(keepends=True)
    found = hardware.from_probe({"query": "".join([*rows[:5], samples.LOST, *rows[6:]]), "lspci": samples.LSPCI_B300})
    assert found.count == 7
    count = hardware.disagreements(found, hardware.expected("b300", 8))[0]
    assert (count.subject, count.wanted) == ("GPU count", "8")
    assert count.found == "7 that answer, and no answer from 0000:5a:00.0"
    # and when nothing but that sentence is printed, lspci tells how many there should be
    found = hardware.from_probe({"query": samples.LOST, "lspci": samples.LSPCI_B300})
    driver, count = hardware.disagreements(found, hardware.expected("b300", 8))
    assert "0000:5a:00.0" in driver.found
    assert count.found == "7 that answer, and no answer from 0000:5a:00.0"


def test_topology_and_query_of_different_machines_are_malformed() -> None:
    outputs = {"query": samples.query("b300", 8), "topology": samples.topology(7, samples.all_nvlink)}
    with pytest.raises(Malformed, match="topo -m shows GPUs"):
        hardware.from_probe(outputs)


# --- interconnect ------------------------------------------------------------------------------------------------


def test_nvlink_between_all_pairs() -> None:
    found = machine("b300", 8)
    assert (found.interconnect, found.off_fabric) == ("nvlink", ())


def test_nvlink_between_no_pair_is_pcie() -> None:
    found = machine(RTX, 8)
    assert (found.interconnect, found.off_fabric) == ("pcie", ())


@pytest.mark.parametrize(
    ("links", "off"),
    [
        (samples.without(2), (2,)),
        (samples.without(0, 7), (0, 7)),
        (lambda a, b: "SYS" if {a, b} == {3, 5} else "NV18", (3, 5)),
        (lambda a, b: "SYS" if (a, b) == (3, 5) else "NV18", (3, 5)),
        (lambda a, b: "NV18" if a // 4 == b // 4 else "SYS", tuple(range(8))),
    ],
    ids=["one GPU", "two GPUs", "one pair", "one pair, one way", "two halves"],
)
def test_nvlink_between_some_pairs_is_broken_and_names_the_gpus(links: samples.Links, off: tuple[int, ...]) -> None:
    found = machine("b300", 8, links)
    assert (found.interconnect, found.off_fabric) == ("broken", off)
    problem = only(hardware.disagreements(found, hardware.expected("b300", 8), FLOOR))
    assert problem.subject == "interconnect"
    for index in off:
        assert str(index) in problem.found or off == tuple(range(8))
    assert "nvidia-fabricmanager" in problem.fix


def test_what_nvlink_says_on_pcie_does_not_matter() -> None:
    outputs = {"query": samples.query(RTX, 8), "topology": samples.topology(8, samples.two_sockets)}
    assert hardware.from_probe({**outputs, "nvlink": "NVLink is not supported here\n"}) == hardware.from_probe(outputs)


def test_one_gpu_has_no_interconnect() -> None:
    assert machine("h200", 1).interconnect == "none"
    assert hardware.disagreements(machine("h200", 1), hardware.expected("h200", 1), FLOOR) == []


# --- expected ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", GPU_MODELS)
@pytest.mark.parametrize("count", [1, 8])
def test_a_machine_that_is_as_declared_has_no_problems(key: str, count: int) -> None:
    declared = hardware.expected(key, count)
    assert declared.seen_by == "inventory"
    assert (declared.count, declared.model) == (count, GPU_MODELS[key])
    assert hardware.disagreements(machine(key, count), declared, FLOOR) == []


def test_the_declared_interconnect_is_the_models() -> None:
    assert hardware.expected(RTX, 8).interconnect == "pcie"
    assert hardware.expected("b300", 8).interconnect == "nvlink"
    assert hardware.expected("b300", 8).links == machine("b300", 8).links
    assert hardware.expected("b300", 1).interconnect == "none"


def test_what_cannot_be_declared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'gb300'.*b200, b300, h200, rtx-pro-6000"):
        hardware.expected("gb300", 8)
    with pytest.raises(ValueError, match="GPU count: found 0"):
        hardware.expected("b300", 0)


def test_the_models_are_those_of_the_supported_machines() -> None:
    assert {
        key: (model.pci_ids, model.compute_capability, model.flashinfer_architecture, model.memory_mib)
        for key, model in GPU_MODELS.items()
    } == {
        RTX: (("10de:2bb5",), "12.0", "12.0f", 97887),
        "b300": (("10de:3182",), "10.3", "10.3a", 275040),
        "b200": (("10de:2901",), "10.0", "10.0a", 183359),
        "h200": (("10de:2335",), "9.0", "9.0a", 143771),
    }


def test_no_two_models_share_a_name_or_an_id() -> None:
    names = [name.casefold() for model in GPU_MODELS.values() for name in {*model.names, *model.pci_names}]
    ids = [pci_id for model in GPU_MODELS.values() for pci_id in model.pci_ids]
    assert len(set(names)) == len(names) and len(set(ids)) == len(ids)


# --- disagreements -----------------------------------------------------------------------------------------------


def test_seven_of_eight_gpus_name_the_one_that_is_silent() -> None:
    found = machine("b300", 7, lspci=samples.LSPCI_B300)
    problem = only(hardware.disagreements(found, hardware.expected("b300", 8), FLOOR))
    assert str(problem) == (
        "GPU count: found 7 that answer, and no answer from 0000:8a:00.0, wanted 8. Fix: look for Xid lines in dmesg, "
        "then power the machine off and on; a GPU silent after that needs service"
    )


def test_seven_of_eight_gpus_without_lspci() -> None:
    problem = only(hardware.disagreements(machine("b300", 7), hardware.expected("b300", 8), FLOOR))
    assert (problem.subject, problem.found, problem.wanted) == ("GPU count", "7", "8")
    assert "lspci -d 10de:" in problem.fix


def test_more_gpus_than_declared_is_the_inventorys_mistake() -> None:
    problem = only(hardware.disagreements(machine("b300", 8), hardware.expected("b300", 4), FLOOR))
    assert (problem.found, problem.wanted, problem.fix) == ("8", "4", hardware.INVENTORY_FIX)


def test_the_wrong_model_is_told_once_for_all_gpus() -> None:
    problem = only(hardware.disagreements(machine("b200", 8), hardware.expected("b300", 8), FLOOR))
    assert (problem.subject, problem.found, problem.wanted) == ("GPUs 0-7", "NVIDIA B200", "NVIDIA B300 SXM6 AC")
    assert "inventory" in problem.fix


def test_one_gpu_of_another_model_is_named() -> None:
    changes = {5: {"name": "NVIDIA GeForce RTX 5090", "pci.device_id": "0x2B8510DE", "memory.total": "32607 MiB"}}
    problem = only(hardware.disagreements(machine(RTX, 8, changes=changes), hardware.expected(RTX, 8), FLOOR))
    assert (problem.subject, problem.found) == ("GPU 5", "NVIDIA GeForce RTX 5090")


def test_mig_names_the_gpus_and_the_command() -> None:
    on = {"mig.mode.current": "Enabled"}
    found = machine("h200", 8, changes={0: on, 1: on, 6: on})
    problem = only(hardware.disagreements(found, hardware.expected("h200", 8), FLOOR))
    assert (problem.subject, problem.found) == ("GPUs 0-1, 6", "MIG enabled")
    assert problem.fix.startswith("nvidia-smi -i 0,1,6 -mig 0")


def test_a_fabric_that_is_not_up_is_error_802_foretold() -> None:
    waiting = {"fabric.state": "In Progress", "fabric.status": "N/A"}
    found = machine("b300", 8, changes=dict.fromkeys(range(8), waiting))
    problem = only(hardware.disagreements(found, hardware.expected("b300", 8), FLOOR))
    assert problem.subject == "GPUs 0-7"
    assert "In Progress" in problem.found and "802" in problem.found
    assert "nvlsm" in problem.fix and "ib_umad" in problem.fix


def test_a_fabric_that_came_up_with_a_fault_is_told() -> None:
    found = machine("b300", 8, changes={4: {"fabric.status": "Unknown Error"}})
    problem = only(hardware.disagreements(found, hardware.expected("b300", 8), FLOOR))
    assert (problem.subject, problem.found) == ("GPU 4", "fabric state Completed, status Unknown Error")


def test_nvlink_gpus_without_any_nvlink_are_told() -> None:
    found = machine("b300", 8, samples.two_sockets)
    problem = only(hardware.disagreements(found, hardware.expected("b300", 8), FLOOR))
    assert (problem.subject, problem.found) == ("interconnect", "PCIe between the GPUs, no NVLink")


def test_a_host_that_does_not_show_its_topology_is_told() -> None:
    found = hardware.from_probe({"query": samples.query("b300", 8)})
    problem = only(hardware.disagreements(found, hardware.expected("b300", 8), FLOOR))
    assert (problem.subject, problem.found) == ("interconnect", "no answer from nvidia-smi topo -m")


def test_a_gpu_with_links_down_is_named_though_every_pair_still_talks() -> None:
    found = machine("b300", 8, lambda a, b: "NV12" if 3 in (a, b) else "NV18")
    problem = only(hardware.disagreements(found, hardware.expected("b300", 8), FLOOR))
    assert (problem.subject, problem.found, problem.wanted) == ("GPU 3", "12 NVLinks up", "18")
    status = ours("h200x2.nvlink-s.txt").replace("Link 17: 26.562 GB/s", "Link 17: <inactive>", 1)
    found = hardware.from_probe(
        {"query": ours("h200x2.query.csv"), "topology": ours("h200x2.topo-m.txt"), "nvlink": status}
    )
    problem = only(hardware.disagreements(found, hardware.expected("h200", 2), FLOOR))
    assert (problem.subject, problem.found) == ("GPU 0", "17 NVLinks up")


def test_a_slice_of_a_gpu_is_not_the_gpu() -> None:
    found = machine(RTX, 8, changes={2: {"memory.total": "48384 MiB"}})
    problem = only(hardware.disagreements(found, hardware.expected(RTX, 8), FLOOR))
    assert (problem.subject, problem.found, problem.wanted) == (
        "GPU 2",
        "48384 MiB of memory",
        "about 97887 MiB, the whole GPU",
    )


@pytest.mark.parametrize(
    ("driver", "good"),
    [("570.124.06", False), ("580.65.05", False), ("580.65.06", True), ("580.105.08", True), ("610.43.02", True)],
)
def test_the_driver_floor_is_the_callers(driver: str, good: bool) -> None:
    found = hardware.from_probe(
        {"query": samples.query(RTX, 8, driver), "topology": samples.topology(8, samples.two_sockets)}
    )
    problems = hardware.disagreements(found, hardware.expected(RTX, 8), FLOOR)
    assert [(problem.subject, problem.found) for problem in problems] == ([] if good else [("driver", driver)])
    assert hardware.disagreements(found, hardware.expected(RTX, 8)) == []


def test_every_fault_of_a_host_is_told_at_once() -> None:
    changes = {0: {"mig.mode.current": "Enabled"}, 1: {"fabric.state": "In Progress"}}
    found = replace(machine("b300", 7, samples.without(6), changes=changes), driver="570.124.06")
    problems = hardware.disagreements(found, hardware.expected("b300", 8), FLOOR)
    assert [problem.subject for problem in problems] == ["driver", "GPU count", "GPU 0", "GPU 1", "interconnect"]
    assert all(problem.fix and ". Fix: " in str(problem) for problem in problems)


# --- no text breaks the parsers ----------------------------------------------------------------------------------

PARSERS: dict[str, tuple[Callable[[str], Any], list[str]]] = {
    "query": (hardware.parse_query, [ours("h200x2.query.csv"), samples.query(RTX, 8), samples.LOST]),
    "topology": (
        hardware.parse_topology,
        [ours("h200x2.topo-m.txt"), samples.topology(8, samples.two_sockets, ["NIC0"]), samples.NO_DRIVER],
    ),
    "smi_q": (hardware.parse_smi_q, [ours("h200x2.smi-q.txt"), samples.SMI_Q_610]),
    "smi_xml": (hardware.parse_smi_xml, [ours("h200x2.smi-q.xml")]),
    "nvlink": (hardware.parse_nvlink_status, [ours("h200x2.nvlink-s.txt")]),
    "lspci": (hardware.parse_lspci, [samples.LSPCI_B300]),
    "banner": (hardware.parse_banner, [ours("h200x2.banner.txt"), samples.BANNER_610]),
}
SCRAPS = ["", "\t", " ", "\r", "\x00", "\x1b[4m", "\x1b", ":", ",", "\n", "[", "]", "<", ">", "&", "%", "-1", "9" * 30]
SCRAPS += ["é", "٣", "\u2028", "\ud800", "N/A", "[N/A]", "X", "NV18", "GPU0", "GPU 00000000:06:00.0", "Legend:", '"']


def mutated(text: str, seed: int, changes: int) -> str:
    """The text with some changes: scraps put in or over it, pieces cut out, lines moved, doubled, or cut short."""
    choose = random.Random(seed)
    for _ in range(changes):
        start = choose.randrange(len(text) + 1)
        end = min(len(text), start + choose.choice([0, 1, 2, 8, 40]))
        lines = text.splitlines(keepends=True) or [""]
        line = choose.randrange(len(lines))
        kind = choose.randrange(6)
        if kind <= 1:
            text = text[:start] + choose.choice(SCRAPS) + text[end if kind else start :]
        elif kind == 2:
            text = text[:start] + text[end:]
        elif kind == 3:
            text = "".join([*lines[:line], lines[line], *lines[line:]])
        elif kind == 4:
            text = "".join([*lines[:line], *lines[line + 1 :]])
        else:
            text = text[:start] if choose.random() < 0.3 else text.replace(choose.choice(lines).strip() or "x", "", 1)
    return text


@pytest.mark.parametrize("name", PARSERS)
@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), changes=st.integers(1, 12))
def test_a_mutated_answer_is_read_or_malformed_and_nothing_else(name: str, seed: int, changes: int) -> None:
    parse, texts = PARSERS[name]
    text = mutated(texts[seed % len(texts)], seed, changes)
    try:
        parse(text)
    except Malformed as error:
        assert str(error) and ". Fix: " in str(error.problem())


@pytest.mark.parametrize("name", PARSERS)
@given(text=st.text())
@example(text="\x00")
@example(text="\ud800")
@example(text='<?xml version="1.0" encoding="no-such-encoding"?><nvidia_smi_log/>')
@example(text='<?xml version="1.0" encoding="utf-16"?><nvidia_smi_log/>')
def test_any_text_is_read_or_malformed_and_nothing_else(name: str, text: str) -> None:
    try:
        PARSERS[name][0](text)
    except Malformed as error:
        assert str(error)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), changes=st.integers(0, 6))
def test_a_mutated_host_is_compared_or_malformed_and_nothing_else(seed: int, changes: int) -> None:
    outputs = {
        name: mutated(texts[seed % len(texts)], seed + position, changes)
        for position, (name, (_, texts)) in enumerate(PARSERS.items())
        if name != "banner" and (seed >> position) % 4
    }
    try:
        found = hardware.from_probe(outputs)
        for problem in hardware.disagreements(found, hardware.expected("h200", 2), FLOOR):
            assert ". Fix: " in str(problem)
    except Malformed as error:
        assert str(error)


def test_the_mutations_reach_both_outcomes_in_every_parser() -> None:
    """The property tests mean something only if mutated text is sometimes read and sometimes refused."""
    for name, (parse, texts) in PARSERS.items():
        outcomes = set()
        for seed in range(60):
            try:
                parse(mutated(texts[0], seed, 1 + seed % 12))
                outcomes.add("read")
            except Malformed:
                outcomes.add("refused")
        assert outcomes == {"read", "refused"}, name


def test_the_query_fields_are_asked_once_each() -> None:
    assert len(set(QUERY_FIELDS)) == len(QUERY_FIELDS)
    assert {"index", "name", "pci.bus_id", "fabric.state"} <= set(QUERY_FIELDS)
