"""The stand-ins print what the real programs print, and the project's parsers read a described machine as described."""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest

from node import hardware
from tests.lab.settings import CHECKOUT, STAND_INS
from tests.lab.stand_ins.gpu_stand_in import lspci, nvidia_smi
from tests.lab.stand_ins.gpu_stand_in.machine import MODELS, Description, DescriptionError, parse

REAL = CHECKOUT.parent / "shared" / "fixtures"
OWN = CHECKOUT / "tests" / "fixtures"
TWO_H200 = Description("H200", 2, "580.159.04", "nvlink", cpu_affinity=("0-31",), bus_ids=("00:06.0", "00:07.0"))
SWITCHED = Description(driver="595.58.03", links="pcie-switch", cpu_affinity=("0-63,128-191", "64-127,192-238"))
DIRECT = Description(driver="595.58.03", nics=1, cpu_affinity=("0-63,128-191", "64-127,192-238"))
EIGHT_B200 = Description("B200", links="nvlink", nics=8, cpu_affinity=("0-55,112-167", "56-111,168-223"))


def real(name: str) -> str:
    """A captured output: of this project in its own tree, others beside it where they are kept."""
    for folder in (OWN, REAL):
        if (folder / name).exists():
            return (folder / name).read_text()
    pytest.skip(f"{name}: a capture that is not part of the project")


def nameless(text: str) -> str:
    return re.sub(r"GPU-[0-9a-f-]{36}", "GPU-", text)


def test_topology_of_two_h200_is_the_real_one_to_the_byte() -> None:
    assert nvidia_smi.topology(TWO_H200) == real("h200x2.topo-m.txt")


def test_nvlink_status_of_two_h200_is_the_real_one() -> None:
    assert nameless(nvidia_smi.nvlink_status(TWO_H200)) == nameless(real("h200x2.nvlink-s.txt"))


def test_query_of_two_h200_is_the_real_one() -> None:
    text = real("h200x2.query.csv")
    names = [re.sub(r" \[.*", "", cell) for cell in text.splitlines()[0].split(", ")]
    assert nvidia_smi.query(TWO_H200.gpus(), names, set()) == (text, 0)


def test_topology_behind_switches_is_the_real_one() -> None:
    assert nvidia_smi.topology(SWITCHED) == real("rtxpro6000x8-switch.topo-m.txt")


def test_topology_with_a_nic_is_the_real_one() -> None:
    text = nvidia_smi.topology(DIRECT).replace("mlx5_0", "rocep49s0")
    assert text.lstrip("\t") == real("rtxpro6000x8-direct.topo-m.txt")  # the capture lost its first tab


def test_query_without_header_and_units_is_the_real_one() -> None:
    fields = "index,name,driver_version,pci.bus_id,pcie.link.gen.max,pcie.link.width.max,power.limit"
    output, code = nvidia_smi.answer([f"--query-gpu={fields}", "--format=csv,noheader,nounits"], DIRECT)
    assert (output, code) == (real("rtxpro6000x8-direct.query.csv"), 0)


def test_topology_of_nvlink_with_nics_is_the_real_one() -> None:
    text = re.sub(r"\x1b\[\d+m", "", nvidia_smi.topology(EIGHT_B200)).split("\nNIC Legend")[0]
    lines = [line for line in text.splitlines() if not line.startswith("NIC")]  # left out of the capture
    assert lines == real("b200x8.topo-m.txt").splitlines()


def text_paths(report: str) -> list[str]:
    """Every `label : value` line of one GPU as a path of labels."""
    paths: list[str] = []
    stack: list[str] = []
    for line in report.splitlines():
        if not line.startswith("    "):
            continue
        depth = (len(line) - len(line.lstrip())) // 4
        label = line.split(" : ")[0].rstrip() if " : " in line else line.strip()
        stack[depth - 1 :] = [label.strip().removesuffix(":").strip()]
        paths.append("/".join(stack))
    return paths


def test_every_line_of_a_report_is_one_of_the_real_program() -> None:
    """-q says less than the real one, but nothing else, and its colons stand where they should."""
    text = real("rtxpro6000x8-switch.smi-q.txt")
    output, _ = nvidia_smi.answer(["-q"], SWITCHED)
    assert set(text_paths(output)) <= set(text_paths(text))
    assert len(set(text_paths(output))) > 80
    assert {line.index(" : ") for line in output.splitlines() if " : " in line} == {
        line.index(" : ") for line in text.splitlines() if " : " in line
    }


def xml_paths(report: str) -> set[str]:
    def walk(element: ElementTree.Element, above: str) -> set[str]:
        here = f"{above}/{element.tag}"
        return {here}.union(*[walk(child, here) for child in element])

    return walk(ElementTree.fromstring(report), "")


def test_every_element_of_a_report_in_xml_is_one_of_the_real_program() -> None:
    text = real("h200x2.smi-q.xml")
    output, _ = nvidia_smi.answer(["-q", "-x"], TWO_H200)
    assert xml_paths(output) <= xml_paths(text)
    assert len(xml_paths(output)) > 80


@pytest.mark.parametrize("model", MODELS)
def test_the_parsers_read_every_model_as_the_table_of_models_has_it(model: str) -> None:
    """Memory, capability, power and links of the stand-in are those that node.hardware expects of that GPU."""
    machine = Description(model, links="nvlink" if MODELS[model].links else "pcie-direct")
    found = read(machine)
    key = hardware.model_key(MODELS[model].name)
    assert key is not None
    assert hardware.disagreements(found, hardware.expected(key, 8), "580.65.06") == []
    assert found.interconnect == hardware.GPU_MODELS[key].interconnect
    assert found.driver == machine.driver


def read(machine: Description) -> hardware.Hardware:
    """The described machine through every output that the project asks for."""
    query = f"--query-gpu={','.join(hardware.QUERY_FIELDS)}"
    return hardware.from_probe(
        {
            "query": nvidia_smi.answer([query, "--format=csv"], machine)[0],
            "topology": nvidia_smi.answer(["topo", "-m"], machine)[0],
            "nvlink": nvidia_smi.answer(["nvlink", "-s"], machine)[0],
            "smi_xml": nvidia_smi.answer(["-q", "-x"], machine)[0],
            "smi_q": nvidia_smi.answer(["-q"], machine)[0],
            "lspci": "\n".join(lspci.lines(machine, numbers=True)) + "\n",
        }
    )


def test_a_gpu_off_the_fabric_makes_the_interconnect_broken() -> None:
    found = read(Description("B300 SXM6 AC", links="nvlink", off_fabric=(3,)))
    assert (found.interconnect, found.off_fabric) == ("broken", (3,))
    problems = hardware.disagreements(found, hardware.expected("b300", 8))
    assert any("GPU 3" in str(problem) for problem in problems)


def test_seven_of_eight_are_counted_as_seven() -> None:
    found = read(Description("B300 SXM6 AC", links="nvlink", missing=(5,)))
    assert found.count == 7
    assert any("GPU count" in str(problem) for problem in hardware.disagreements(found, hardware.expected("b300", 8)))


def test_a_gpu_that_the_driver_does_not_show_is_still_on_the_bus() -> None:
    found = read(Description(silent=(2,)))
    assert (found.count, len(found.on_bus)) == (7, 8)


def test_the_newer_banner_names_two_versions() -> None:
    assert "CUDA UMD Version: 13.3" in nvidia_smi.answer([], Description(driver="610.10"))[0]
    older = nvidia_smi.answer([], Description())[0]
    assert "Driver Version: 580.95.05" in older and "CUDA Version: 13.0" in older
    assert len({len(line) for line in older.splitlines() if line.startswith(("|", "+"))}) == 1


def test_what_the_real_program_refuses_is_refused() -> None:
    output, code = nvidia_smi.answer(["--query-gpu=index,colour", "--format=csv"], Description())
    assert (output.splitlines()[0], code) == ('Field "colour" is not a valid field to query.', 2)
    assert nvidia_smi.answer(["--paint"], Description()) == (nvidia_smi.USAGE, 1)
    assert nvidia_smi.answer([], Description(count=1, missing=(0,))) == ("No devices were found\n", 6)


@pytest.mark.parametrize(
    "text",
    ['{"model": "RTX 9090"}', '{"count": 9}', '{"links": "nvlink"}', '{"colour": 1}', "[]", "{", '{"driver": "1.2"}'],
)
def test_an_impossible_description_is_refused(text: str) -> None:
    with pytest.raises(DescriptionError):
        parse(text)


def test_the_stand_in_for_nvcc_12_8_refuses_what_12_8_refuses() -> None:
    def nvcc(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", str(STAND_INS / "nvcc-12.8"), *arguments], capture_output=True, text=True)

    refused = nvcc("-gencode=arch=compute_120f,code=sm_120f", "-c", "x.cu")
    assert refused.returncode == 1 and "Unsupported gpu architecture 'compute_120f'" in refused.stderr
    known = nvcc("-gencode=arch=compute_120a,code=sm_120a", "-c", "x.cu")
    assert known.returncode == 1 and "compiles nothing" in known.stderr
    assert "release 12.8" in nvcc("--version").stdout
