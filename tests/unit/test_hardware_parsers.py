"""Each parser reads what its program really prints, to the value, and refuses what it does not."""

from __future__ import annotations

import re
from pathlib import Path

import hardware_samples as samples
import pytest

from node import hardware
from node.hardware import Gpu, NvLinks, Report
from node.problems import Malformed

FIXTURES = Path(__file__).parents[1] / "fixtures"
SHARED = Path(__file__).parents[3] / "shared" / "fixtures"
RTX = "rtx-pro-6000-blackwell-server"


def ours(name: str) -> str:
    return (FIXTURES / name).read_bytes().decode()


def shared(name: str) -> str:
    """A sample that is not ours to carry; the test is left out where it is absent."""
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"no {name} beside this checkout")
    return path.read_bytes().decode()


def h200(index: int, address: str, **said: object) -> Gpu:
    values: dict[str, object] = {
        "name": "NVIDIA H200",
        "model": "h200",
        "compute_capability": "9.0",
        "memory_mib": 143771,
        "power_limit_w": 700.0,
        "pcie_generation_max": 5,
        "pcie_width_max": 16,
        "mig": False,
        "ecc": True,
        "persistence": True,
        **said,
    }
    return Gpu(index=index, bus_id=address, **values)  # type: ignore[arg-type]


# --- --query-gpu -------------------------------------------------------------------------------------------------


def test_the_query_of_two_h200() -> None:
    assert hardware.parse_query(ours("h200x2.query.csv")) == Report(
        gpus=(h200(0, "0000:00:06.0"), h200(1, "0000:00:07.0")), driver="580.159.04"
    )


@pytest.mark.parametrize("units", [True, False], ids=["units", "nounits"])
@pytest.mark.parametrize("header", [True, False], ids=["header", "noheader"])
def test_the_query_reads_the_same_with_and_without_header_and_units(header: bool, units: bool) -> None:
    text = samples.query("b300", 8)
    whole = hardware.parse_query(text)
    if not header:
        text = text.partition("\n")[2]
    if not units:
        text = text.replace(" MiB", "").replace(" W,", ",")
    assert hardware.parse_query(text) == whole
    assert whole.driver == "580.95.05"
    assert whole.gpus[7] == Gpu(
        index=7,
        name="NVIDIA B300 SXM6 AC",
        model="b300",
        compute_capability="10.3",
        memory_mib=275040,
        bus_id="0000:8a:00.0",
        power_limit_w=1100.0,
        pcie_generation_max=5,
        pcie_width_max=16,
        mig=False,
        ecc=True,
        persistence=True,
        fabric_state="Completed",
        fabric_status="Success",
    )


def test_the_query_without_a_header_takes_the_fields_asked_for() -> None:
    fields = (
        "index",
        "name",
        "driver_version",
        "pci.bus_id",
        "pcie.link.gen.max",
        "pcie.link.width.max",
        "power.limit",
    )
    report = hardware.parse_query(shared("rtxpro6000x8-direct.query.csv"), fields)
    assert report.driver == "595.58.03"
    addresses = ["01", "11", "61", "71", "81", "91", "e1", "f1"]
    assert report.gpus == tuple(
        Gpu(
            index=index,
            name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
            model=RTX,
            bus_id=f"0000:{address}:00.0",
            power_limit_w=600.0,
            pcie_generation_max=5,
            pcie_width_max=16,
        )
        for index, address in enumerate(addresses)
    )


def test_the_query_of_eight_b200_has_two_columns_only() -> None:
    report = hardware.parse_query(shared("b200x8.query.csv"))
    assert report == Report(
        gpus=tuple(Gpu(index=i, name="NVIDIA B200", model="b200", compute_capability="10.0") for i in range(8))
    )


def test_what_the_query_leaves_open_is_none() -> None:
    open_values = dict.fromkeys(
        ("memory.total", "power.limit", "ecc.mode.current", "mig.mode.current"), "[Not Supported]"
    )
    gpu = hardware.parse_query(samples.query(RTX, 1, changes={0: {**open_values, "pci.bus_id": "[N/A]"}})).gpus[0]
    assert (gpu.memory_mib, gpu.power_limit_w, gpu.ecc, gpu.mig, gpu.bus_id) == (None, None, None, None, None)
    assert (gpu.fabric_state, gpu.fabric_status) == (None, None)
    assert gpu.model == RTX


def test_a_pci_id_names_the_model_where_the_name_is_new() -> None:
    report = hardware.parse_query(samples.query("b300", 1, changes={0: {"name": "NVIDIA B300 SXM6 AD"}}))
    assert (report.gpus[0].name, report.gpus[0].model) == ("NVIDIA B300 SXM6 AD", "b300")


def test_a_gpu_of_no_known_kind_has_no_model() -> None:
    changes = {0: {"name": "NVIDIA GeForce RTX 5090", "pci.device_id": "0x2B8510DE"}}
    assert hardware.parse_query(samples.query("b300", 1, changes=changes)).gpus[0].model is None


def test_a_lost_gpu_is_named_beside_those_that_answer() -> None:
    rows = samples.query("b300", 8).splitlines(keepends=True)
    report = hardware.parse_query("".join([*rows[:5], samples.LOST, *rows[6:]]))
    assert [gpu.index for gpu in report.gpus] == [0, 1, 2, 3, 5, 6, 7]
    assert report.lost == ("0000:5a:00.0",)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0, NVIDIA H200\n", "2 columns where 15"),
        ("index, name\nzero, NVIDIA H200\n", "not a whole number"),
        ("index, name\n[N/A], NVIDIA H200\n", "without an index"),
        ("index, name\n0, [N/A]\n", "without a name"),
        ("index, name\n0, NVIDIA H200\n0, NVIDIA H200\n", "one GPU twice"),
        ("index, memory.total [MiB]\n0, 140 GiB\n", "not a whole number"),
        ("index, pci.bus_id\n0, 06\n", "not a PCI address"),
        ("index, mig.mode.current\n0, Perhaps\n", "neither Enabled nor Disabled"),
        ("index, driver_version\n0, 580.1\n1, 580.2\n", "several driver versions"),
        ("<html>", "columns"),
    ],
)
def test_a_query_in_another_form_is_malformed(text: str, complaint: str) -> None:
    with pytest.raises(Malformed, match=complaint):
        hardware.parse_query(text)


# --- topo -m -----------------------------------------------------------------------------------------------------


def test_the_topology_of_two_h200() -> None:
    topology = hardware.parse_topology(ours("h200x2.topo-m.txt"))
    assert topology.indices == (0, 1)
    assert topology.links == (("X", "NV18"), ("NV18", "X"))
    assert topology.cpu_affinity == ("0-31", "0-31")
    assert topology.numa_nodes == (0, 0)


def test_the_topology_of_eight_gpus_behind_switches() -> None:
    topology = hardware.parse_topology(shared("rtxpro6000x8-switch.topo-m.txt"))
    assert topology.links[0] == ("X", "PIX", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS")
    assert topology.links[6] == ("SYS", "SYS", "SYS", "SYS", "NODE", "NODE", "X", "PIX")
    assert topology.cpu_affinity == ("0-63,128-191",) * 4 + ("64-127,192-238",) * 4
    assert topology.numa_nodes == (0,) * 4 + (1,) * 4


def test_the_topology_whose_leading_tab_is_lost_and_which_has_a_network_card() -> None:
    topology = hardware.parse_topology(shared("rtxpro6000x8-direct.topo-m.txt"))
    assert topology.indices == tuple(range(8))
    assert topology.links[0] == ("X", "NODE", "NODE", "NODE", "SYS", "SYS", "SYS", "SYS")
    assert topology.links[7] == ("SYS", "SYS", "SYS", "SYS", "NODE", "NODE", "NODE", "X")
    assert topology.cpu_affinity == ("0-63,128-191",) * 4 + ("64-127,192-238",) * 4
    assert topology.numa_nodes == (0,) * 4 + (1,) * 4


def test_the_topology_of_eight_b200_with_eight_network_cards() -> None:
    topology = hardware.parse_topology(shared("b200x8.topo-m.txt"))
    assert topology.links == tuple(tuple("X" if a == b else "NV18" for b in range(8)) for a in range(8))
    assert topology.cpu_affinity == ("0-55,112-167",) * 4 + ("56-111,168-223",) * 4
    assert topology.numa_nodes == (0,) * 4 + (1,) * 4


REFERENCE = samples.topology(8, samples.two_sockets)
DISGUISES = {
    "leading tab lost": REFERENCE.lstrip("\t"),
    "stripped, codes before the tab": "\x1b[4m" + REFERENCE.replace("\x1b[4m", ""),
    "no ANSI codes": re.sub(r"\x1b\[\d*m", "", REFERENCE),
    "more ANSI codes": REFERENCE.replace("GPU3", "\x1b[1;31mGPU3\x1b[0m"),
    "CRLF": REFERENCE.replace("\n", "\r\n"),
    "network cards": samples.topology(8, samples.two_sockets, ["NIC0", "NIC1", "NIC10"]),
    "network cards by their own names": samples.topology(8, samples.two_sockets, ["mlx5_0", "mlx5_bond_1"]),
    "tabs as spaces": re.sub(r"\t+", "   ", REFERENCE),
    "tabs doubled between links": re.sub(r"(SYS|NODE)\t(?=SYS|NODE)", "\\1\t\t", REFERENCE),
    "a tab too many before the CPU list": REFERENCE.replace("\t0-31", "\t\t0-31").replace("\t32-63", "\t\t32-63"),
    "no legend": REFERENCE.partition("\nLegend")[0],
    "text before it": "Sun Nov 29 12:00:00 2026\n" + REFERENCE,
    "blank lines": REFERENCE.replace("\n", "\n\n"),
}


@pytest.mark.parametrize("disguise", DISGUISES.values(), ids=DISGUISES.keys())
def test_the_topology_reads_the_same_in_every_disguise(disguise: str) -> None:
    topology = hardware.parse_topology(disguise)
    assert topology.indices == tuple(range(8))
    assert topology.links == tuple(
        tuple("X" if a == b else samples.two_sockets(a, b) for b in range(8)) for a in range(8)
    )
    assert topology.cpu_affinity == ("0-31,64-95",) * 4 + ("32-63,96-127",) * 4
    assert topology.numa_nodes == (0,) * 4 + (1,) * 4


def test_blank_affinity_cells_are_none() -> None:
    text = re.sub(r"\t(0-31,64-95|32-63,96-127)\t[01]\t", "\t\t\t", samples.topology(2, samples.all_nvlink))
    topology = hardware.parse_topology(text)
    assert (topology.cpu_affinity, topology.numa_nodes) == ((None, None), (None, None))


def test_a_row_that_ends_after_its_links_has_no_affinity() -> None:
    topology = hardware.parse_topology("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n")
    assert topology.links == (("X", "NV18"), ("NV18", "X"))
    assert (topology.cpu_affinity, topology.numa_nodes) == ((None, None), (None, None))


def test_one_gpu_has_a_topology_too() -> None:
    assert hardware.parse_topology(samples.topology(1, samples.all_nvlink)).links == (("X",),)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no header"),
        ("GPU0\t X \tNV18\n", "no header"),
        (samples.NO_DRIVER, "no header"),
        (REFERENCE.replace("GPU5\tSYS", "GPU4\tSYS"), "GPU4 twice"),
        ("".join(REFERENCE.splitlines(keepends=True)[:5]), "its columns show GPUs"),
        (REFERENCE.replace("GPU2\tNODE\tNODE\t X \tNODE", "GPU2\tNODE\tNODE\tNODE\tNODE"), "diagonal"),
        (REFERENCE.replace("GPU2\tNODE", "GPU2\tfar"), "not a kind of link"),
        (REFERENCE.replace("\t0-31,64-95", "\tall of them"), "not a list of CPUs"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \n", "fewer cells"),
    ],
)
def test_a_topology_in_another_form_is_malformed(text: str, complaint: str) -> None:
    with pytest.raises(Malformed, match=complaint):
        hardware.parse_topology(text)


# --- -q and -q -x ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parse", "name"),
    [(hardware.parse_smi_q, "h200x2.smi-q.txt"), (hardware.parse_smi_xml, "h200x2.smi-q.xml")],
    ids=["text", "xml"],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_both_forms_of_smi_q_say_the_same_of_two_h200(parse, name: str, line_end: str) -> None:  # type: ignore[no-untyped-def]
    fabric = {"fabric_state": "Completed", "fabric_status": "Success"}
    assert parse(ours(name).replace("\n", line_end)) == Report(
        gpus=(h200(0, "0000:00:06.0", **fabric), h200(1, "0000:00:07.0", **fabric)), driver="580.159.04", cuda="13.0"
    )


def test_smi_q_of_eight_gpus_on_pcie() -> None:
    report = hardware.parse_smi_q(shared("rtxpro6000x8-switch.smi-q.txt"))
    assert (report.driver, report.cuda) == ("595.58.03", "13.2")
    addresses = ["06", "07", "75", "76", "84", "85", "f4", "f5"]
    assert report.gpus == tuple(
        Gpu(
            index=index,
            name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
            model=RTX,
            compute_capability="12.0",
            memory_mib=97887,
            bus_id=f"0000:{address}:00.0",
            power_limit_w=600.0,
            pcie_generation_max=5,
            pcie_width_max=16,
            mig=False,
            ecc=True,
            persistence=True,
        )
        for index, address in enumerate(addresses)
    )


def test_smi_q_of_driver_610_with_mig_on_and_the_fabric_not_up() -> None:
    report = hardware.parse_smi_q(samples.SMI_Q_610)
    assert (report.driver, report.cuda) == ("610.43.02", "13.3")
    assert report.gpus == (
        Gpu(
            index=0,
            name="NVIDIA B300 SXM6 AC",
            model="b300",
            compute_capability="10.3",
            memory_mib=275040,
            bus_id="0000:1a:00.0",
            power_limit_w=1100.0,
            pcie_generation_max=6,
            pcie_width_max=16,
            mig=True,
            ecc=False,
            persistence=False,
            fabric_state="In Progress",
        ),
    )


def test_smi_q_with_tabs_for_its_indent_reads_the_same() -> None:
    assert hardware.parse_smi_q(samples.SMI_Q_610.replace("    ", "\t")) == hardware.parse_smi_q(samples.SMI_Q_610)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no NVSMI LOG"),
        (re.sub("(Attached GPUs +: )1", r"\g<1>8", samples.SMI_Q_610), "8 attached"),
        (samples.SMI_Q_610.replace("    Product Name", "    Product Noun"), "no product name"),
        (samples.SMI_Q_610.replace("275040 MiB", "many MiB"), "not a whole number"),
        (samples.SMI_Q_610.replace("0x318210DE", "0x3182"), "not a PCI device id"),
    ],
)
def test_smi_q_in_another_form_is_malformed(text: str, complaint: str) -> None:
    with pytest.raises(Malformed, match=complaint):
        hardware.parse_smi_q(text)


def test_smi_xml_cut_short_is_malformed() -> None:
    text = ours("h200x2.smi-q.xml")
    for length in (0, 10, len(text) // 2, len(text) - 20):
        with pytest.raises(Malformed, match="nvidia-smi -q -x"):
            hardware.parse_smi_xml(text[:length])
    with pytest.raises(Malformed, match="root element is html"):
        hardware.parse_smi_xml("<html></html>")


# --- the banner, nvlink -s ---------------------------------------------------------------------------------------


def test_the_banner_in_its_old_and_its_new_words() -> None:
    assert hardware.parse_banner(ours("h200x2.banner.txt")) == Report(driver="580.159.04", cuda="13.0")
    assert hardware.parse_banner(samples.BANNER_610) == Report(driver="610.43.02", cuda="13.3")
    assert hardware.parse_banner(samples.BANNER_610.replace("13.3", "Not Found")) == Report(driver="610.43.02")


@pytest.mark.parametrize("text", ["", samples.NO_DRIVER, samples.MISMATCH, "NVIDIA-SMI 610.43.02"])
def test_no_banner_is_malformed(text: str) -> None:
    with pytest.raises(Malformed, match="nvidia-smi"):
        hardware.parse_banner(text)


def test_eighteen_links_of_each_h200_are_up() -> None:
    assert hardware.parse_nvlink_status(ours("h200x2.nvlink-s.txt")) == tuple(
        NvLinks(index, "NVIDIA H200", (26.562,) * 18) for index in (0, 1)
    )


def test_a_link_that_is_down_is_none_and_not_counted() -> None:
    text = ours("h200x2.nvlink-s.txt").replace("Link 17: 26.562 GB/s", "Link 17: <inactive>", 1)
    first, second = hardware.parse_nvlink_status(text)
    assert (first.active, second.active) == (17, 18)
    assert first.gigabytes_per_second[17] is None


def test_a_gpu_without_nvlink_has_no_links() -> None:
    text = "GPU 0: NVIDIA RTX PRO 6000 Blackwell Server Edition (UUID: GPU-0)\n"
    assert hardware.parse_nvlink_status(text) == (NvLinks(0, "NVIDIA RTX PRO 6000 Blackwell Server Edition", ()),)


@pytest.mark.parametrize("text", ["Link 0: 26.562 GB/s\n", "GPU 0: A\nLink 0: fast\n", "GPU 0: A\nGPU 0: A\n", "no"])
def test_nvlink_status_in_another_form_is_malformed(text: str) -> None:
    with pytest.raises(Malformed, match="nvlink"):
        hardware.parse_nvlink_status(text)


# --- lspci -------------------------------------------------------------------------------------------------------


def test_lspci_shows_the_gpus_among_everything_else() -> None:
    gpus = hardware.parse_lspci(samples.LSPCI_B300)
    assert gpus == tuple(
        Gpu(
            index=index,
            name="NVIDIA B300 SXM6 AC",
            model="b300",
            compute_capability="10.3",
            bus_id=f"0000:{0x1A + 0x10 * index:02x}:00.0",
        )
        for index in range(8)
    )


def test_lspci_that_knows_no_names() -> None:
    gpus = hardware.parse_lspci(shared("rtxpro6000x8-switch.lspci.txt"))
    buses = ["06", "07", "75", "76", "84", "85", "f4", "f5"]
    assert [gpu.bus_id for gpu in gpus] == [f"0000:{bus}:00.0" for bus in buses]
    assert {(gpu.model, gpu.compute_capability) for gpu in gpus} == {(RTX, "12.0")}


def test_lspci_of_one_gpu_of_each_kind() -> None:
    gpus = hardware.parse_lspci(shared("pci-ids.txt"))
    assert [(gpu.bus_id, gpu.model) for gpu in gpus] == [
        ("0000:06:00.0", RTX),
        ("0000:18:00.0", "b200"),
        ("0000:19:00.0", "b300"),
        ("0001:c8:04.5", RTX),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "06:00.0 3D controller: NVIDIA Corporation Device 2335 (rev a1)",
        "06:00.0 3D controller: NVIDIA Corporation GH100 [H200 SXM 141GB] (rev a1)",
        "06:00.0 3D controller [0302]: NVIDIA Corporation GH100 [H200 SXM 141GB] [10de:2335] (rev a1)",
        "0000:06:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2335] (rev a1)",
        "06:00.0 0302: 10de:2335 (rev a1)",
        "0000:06:00.0 0302: 10de:2335",
        "06:00.0 VGA compatible controller: NVIDIA Corporation Device 2335 (rev a1) (prog-if 00 [VGA controller])\r",
        "pcilib: Cannot open /proc/bus/pci\n06:00.0 3D controller: NVIDIA Corporation Device 2335\n\tFlags: fast",
    ],
)
def test_lspci_names_an_h200_in_all_its_forms(line: str) -> None:
    (gpu,) = hardware.parse_lspci(line + "\n")
    assert gpu == Gpu(0, "NVIDIA H200", model="h200", compute_capability="9.0", bus_id="0000:06:00.0")


def test_lspci_shows_a_gpu_of_no_known_kind_by_its_own_words() -> None:
    (gpu,) = hardware.parse_lspci(
        "01:00.0 VGA compatible controller [0300]: NVIDIA Corporation Device [10de:2b85] (rev a1)"
    )
    assert (gpu.name, gpu.model, gpu.compute_capability) == ("NVIDIA Corporation Device [10de:2b85]", None, None)


def test_a_host_without_nvidia_or_without_pci_has_no_gpus() -> None:
    assert hardware.parse_lspci("") == ()
    no_bus = "pcilib: Cannot open /proc/bus/pci\nlspci: Cannot find any working access method.\n"
    assert hardware.parse_lspci(no_bus) == ()
    assert hardware.parse_lspci("00:02.0 VGA compatible controller: Red Hat, Inc. Virtio 1.0 GPU (rev 01)\n") == ()


@pytest.mark.parametrize("text", ["bash: lspci: command not found\n", samples.LSPCI_B300 + samples.LSPCI_B300])
def test_lspci_in_another_form_is_malformed(text: str) -> None:
    with pytest.raises(Malformed, match="lspci"):
        hardware.parse_lspci(text)


# --- values ------------------------------------------------------------------------------------------------------


def test_driver_versions_compare_as_numbers() -> None:
    versions = ["570.124.06", "580.65.06", "580.95.05", "580.105.08", "580.159.04", "610.43.02"]
    assert sorted(reversed(versions), key=hardware.version_key) == versions
    with pytest.raises(Malformed):
        hardware.version_key("580.x")


@pytest.mark.parametrize(
    ("printed", "address"),
    [("00000000:06:00.0", "0000:06:00.0"), ("F4:00.0", "0000:f4:00.0"), ("3E3F8E05:00:00.0", "3e3f8e05:00:00.0")],
)
def test_pci_addresses_are_those_of_sysfs(printed: str, address: str) -> None:
    assert hardware.bus_id(printed) == address
