"""What GPU machine is this: from the text that nvidia-smi and lspci print, or from what the owner declares.

The parsers are told apart by the program whose output they read. They return what that program says, with None for
what it leaves open, and raise Malformed (never anything else) for text that has not the program's form.
`from_probe` joins them into one Hardware, `expected` builds the Hardware that an inventory declares, and
`disagreements` compares the two.

What makes the formats hard, all of it seen on real hosts: `topo -m` puts ANSI underline codes into its header even
when it writes to a pipe; the header's leading tab is lost by whoever strips the text, after which it looks like the
row of GPU 0; a column for each network card stands between the GPUs and "CPU Affinity"; rows have one more cell than
the header names; driver 610 writes "KMD Version" and "CUDA UMD Version" where older ones write "Driver Version" and
"CUDA Version"; the current PCIe generation reads 1 on an idle GPU, so only the maximum tells anything.
"""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from node.problems import Malformed, Problem

Interconnect = Literal["pcie", "nvlink", "broken", "none"]
SeenBy = Literal["nvidia-smi", "lspci", "inventory"]
T = TypeVar("T")


# --- the GPUs known by name --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuModel:
    """One kind of GPU. A new kind is one more entry in GPU_MODELS.

    names: as nvidia-smi prints them. pci_names: as lspci prints them in brackets.
    pci_ids: "vendor:device", four lower-case hexadecimal digits each.
    compute_capability: as nvidia-smi's compute_cap. flashinfer_architecture: as FLASHINFER_CUDA_ARCH_LIST wants it.
    memory_mib: nvidia-smi's memory.total with ECC on; memory_source says who printed it.
    interconnect: what joins the GPUs of a machine with several. nvlinks: links a GPU has, 0 without NVLink.
    power_limit_w: the default limit. fabric_manager: whether NVIDIA's fabric manager has to run.
    """

    key: str
    names: tuple[str, ...]
    pci_names: tuple[str, ...]
    pci_ids: tuple[str, ...]
    compute_capability: str
    flashinfer_architecture: str
    memory_mib: int
    memory_source: str
    interconnect: Literal["pcie", "nvlink"]
    nvlinks: int
    power_limit_w: float
    fabric_manager: bool


GPU_MODELS: Mapping[str, GpuModel] = {
    model.key: model
    for model in (
        GpuModel(
            key="rtx-pro-6000-blackwell-server",
            names=("NVIDIA RTX PRO 6000 Blackwell Server Edition",),
            pci_names=("RTX PRO 6000 Blackwell Server Edition",),
            pci_ids=("10de:2bb5",),
            compute_capability="12.0",
            flashinfer_architecture="12.0f",
            memory_mib=97887,
            memory_source="nvidia-smi -q of an 8-GPU host, driver 595.58.03",
            interconnect="pcie",
            nvlinks=0,
            power_limit_w=600.0,
            fabric_manager=False,
        ),
        GpuModel(
            key="b300",
            names=("NVIDIA B300 SXM6 AC",),
            pci_names=("B300 SXM6 AC",),
            pci_ids=("10de:3182",),
            compute_capability="10.3",
            flashinfer_architecture="10.3a",
            memory_mib=275040,
            memory_source="nvidia-smi of several public 8-GPU hosts, drivers 580.105.08, 580.178.04; not ours",
            interconnect="nvlink",
            nvlinks=18,
            power_limit_w=1100.0,
            fabric_manager=True,
        ),
        GpuModel(
            key="b200",
            names=("NVIDIA B200",),
            pci_names=("B200",),
            pci_ids=("10de:2901",),
            compute_capability="10.0",
            flashinfer_architecture="10.0a",
            memory_mib=183359,
            memory_source="nvidia-smi of several public hosts, drivers 570.172.08 to 595.71.05; not ours",
            interconnect="nvlink",
            nvlinks=18,
            power_limit_w=1000.0,
            fabric_manager=True,
        ),
        GpuModel(
            key="h200",
            names=("NVIDIA H200",),
            pci_names=("H200 SXM 141GB",),
            pci_ids=("10de:2335",),
            compute_capability="9.0",
            flashinfer_architecture="9.0a",
            memory_mib=143771,
            memory_source="nvidia-smi -q -x of a 2-GPU host, driver 580.159.04, measured by this project",
            interconnect="nvlink",
            nvlinks=18,
            power_limit_w=700.0,
            fabric_manager=True,
        ),
    )
}
MODEL_BY_NAME: Mapping[str, str] = {
    name.casefold(): model.key for model in GPU_MODELS.values() for name in (*model.names, *model.pci_names)
}
MODEL_BY_PCI_ID: Mapping[str, str] = {pci_id: model.key for model in GPU_MODELS.values() for pci_id in model.pci_ids}


def model_key(name: str, pci_id: str | None = None) -> str | None:
    """The key in GPU_MODELS of a GPU, by its PCI id if known and by its printed name if not; else None."""
    if pci_id is not None and pci_id in MODEL_BY_PCI_ID:
        return MODEL_BY_PCI_ID[pci_id]
    return MODEL_BY_NAME.get(name.strip().casefold())


# --- what is known of a machine ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """One GPU. None is "not said by what was asked".

    index: nvidia-smi's, which is the order of the PCI addresses. bus_id: as in /sys/bus/pci/devices, "0000:06:00.0".
    compute_capability: "12.0"; from the model's entry where no driver answers. memory_mib: total, in MiB.
    cpu_affinity: a CPU list as taskset reads it, "0-63,128-191". power_limit_w: the limit in force, in watts.
    nvlinks: number of NVLinks that are up. fabric_state, fabric_status: nvidia-smi's words, None on PCIe GPUs.
    """

    index: int
    name: str
    model: str | None = None
    compute_capability: str | None = None
    memory_mib: int | None = None
    bus_id: str | None = None
    numa_node: int | None = None
    cpu_affinity: str | None = None
    power_limit_w: float | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    mig: bool | None = None
    ecc: bool | None = None
    persistence: bool | None = None
    nvlinks: int | None = None
    fabric_state: str | None = None
    fabric_status: str | None = None


@dataclass(frozen=True)
class Hardware:
    """The GPUs of one machine and what joins them.

    interconnect: "nvlink" every pair over NVLink, "pcie" no pair, "broken" some pairs; "none" where no link was
    looked at: fewer than two GPUs, or no driver to ask.
    links: topo -m's word for each pair ("NV18", "NODE", "X" for itself), a row a GPU; empty where it was not asked.
    off_fabric: indices of the GPUs that make the interconnect "broken".
    driver: version, None where nvidia-smi does not work; driver_failure is then its own sentence.
    on_bus: PCI addresses of NVIDIA GPUs that lspci shows; empty where lspci was not asked.
    lost: PCI addresses of GPUs that nvidia-smi names as not answering.
    """

    gpus: tuple[Gpu, ...]
    interconnect: Interconnect
    seen_by: SeenBy
    links: tuple[tuple[str, ...], ...] = ()
    off_fabric: tuple[int, ...] = ()
    driver: str | None = None
    driver_failure: str | None = None
    on_bus: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.gpus)

    @property
    def model(self) -> GpuModel | None:
        """The one model that all GPUs are; None when they are of several, unknown, or there are none."""
        keys = {gpu.model for gpu in self.gpus}
        key = keys.pop() if len(keys) == 1 else None
        return GPU_MODELS[key] if key is not None else None

    @property
    def fabric_states(self) -> tuple[str | None, ...]:
        """The fabric state of each GPU, in the order of gpus."""
        return tuple(gpu.fabric_state for gpu in self.gpus)


@dataclass(frozen=True)
class Report:
    """What one nvidia-smi call says. cuda: the newest CUDA its driver runs. lost: see Hardware."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Topology:
    """`nvidia-smi topo -m`: per GPU, in the order of indices, its links to the others, its CPUs and its NUMA node."""

    indices: tuple[int, ...]
    links: tuple[tuple[str, ...], ...]
    cpu_affinity: tuple[str | None, ...]
    numa_nodes: tuple[int | None, ...]


@dataclass(frozen=True)
class NvLinks:
    """`nvidia-smi nvlink -s` for one GPU: GB/s a direction of each link in the order of their numbers, None if down."""

    index: int
    name: str
    gigabytes_per_second: tuple[float | None, ...]

    @property
    def active(self) -> int:
        return sum(speed is not None for speed in self.gigabytes_per_second)


# --- values ------------------------------------------------------------------------------------------------------

ANSI_CODE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
UNSAID = frozenset({"", "n/a", "[n/a]", "none", "-"})


def _lines(text: str) -> list[str]:
    """Lines without ANSI codes and white space at their ends. Only line feeds divide lines."""
    return [line.rstrip() for line in ANSI_CODE.sub("", text).lstrip("\ufeff").split("\n")]


def _said(value: str | None) -> str | None:
    """None for nvidia-smi's ways of saying nothing: N/A, [N/A], [Not Supported], [Unknown Error], [GPU is lost]."""
    if value is None:
        return None
    value = value.strip()
    if value.casefold() in UNSAID or (value.startswith("[") and value.endswith("]")):
        return None
    if value.casefold().startswith("requested functionality has been deprecated"):
        return None
    return value


def _pattern(what: str, form: str, convert: Callable[[str], T]) -> Callable[[str | None], T | None]:
    """A reader of one kind of value: None if nothing is said, Malformed if what is said does not have the form."""
    compiled = re.compile(form, re.ASCII | re.IGNORECASE)

    def read(value: str | None) -> T | None:
        said = _said(value)
        if said is None:
            return None
        match = compiled.fullmatch(said)
        if match is None:
            raise Malformed(what, said)
        return convert(match.group(1))

    return read


_whole = _pattern("nvidia-smi: not a whole number", r"(\d{1,9})(?: ?(?:MiB|x))?", int)
_watts = _pattern("nvidia-smi: not a power in watts", r"(\d{1,6}(?:\.\d{1,6})?)(?: ?W)?", float)
_capability = _pattern("nvidia-smi: not a compute capability", r"(\d{1,3}\.\d{1,2})", str)
_version = _pattern("nvidia-smi: not a version", r"(\d{1,6}(?:\.\d{1,6}){0,3})", str)
_switch = _pattern(
    "nvidia-smi: neither Enabled nor Disabled", r"(Enabled|Disabled)", lambda word: word.casefold() == "enabled"
)


def _cuda(value: str | None) -> str | None:
    """The CUDA version of a driver; "Not Found" where the host has the kernel's half of a driver only."""
    return None if value is not None and value.strip().casefold() == "not found" else _version(value)


BUS_ID = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"


def bus_id(text: str) -> str:
    """A PCI address as /sys/bus/pci/devices names it, "0000:06:00.0", from nvidia-smi's or lspci's, or Malformed."""
    if re.fullmatch(BUS_ID, text.strip(), re.ASCII) is None:
        raise Malformed("not a PCI address", text)
    *domain, bus, slot = text.strip().lower().split(":")
    return f"{int(domain[0], 16) if domain else 0:04x}:{bus}:{slot}"


def _bus_id(value: str | None) -> str | None:
    said = _said(value)
    return bus_id(said) if said is not None else None


def _device_id(value: str | None) -> str | None:
    """ "10de:2bb5" from nvidia-smi's 0x2BB510DE (device first, then vendor)."""
    said = _said(value)
    if said is None:
        return None
    match = re.fullmatch(r"(?:0x)?([0-9a-f]{4})([0-9a-f]{4})", said.lower(), re.ASCII)
    if match is None:
        raise Malformed("nvidia-smi: not a PCI device id", said)
    return f"{match.group(2)}:{match.group(1)}"


def version_key(version: str) -> tuple[int, ...]:
    """A driver version in a form that compares: "580.65.06" is older than "580.105.08". Malformed if it is none."""
    if re.fullmatch(r"\d{1,6}(\.\d{1,6})*", version, re.ASCII) is None:
        raise Malformed("not a version", version)
    return tuple(int(part) for part in version.split("."))


# --- nvidia-smi --query-gpu --------------------------------------------------------------------------------------

QUERY_FIELDS = (
    "index",
    "name",
    "compute_cap",
    "driver_version",
    "memory.total",
    "pci.bus_id",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "power.limit",
    "persistence_mode",
    "ecc.mode.current",
    "mig.mode.current",
    "pci.device_id",
    "fabric.state",
    "fabric.status",
)
"""Ask `nvidia-smi --query-gpu=<these, joined by commas> --format=csv`: all are known to driver 580.159.04."""

LOST_GPU = re.compile(r"Unable to determine the device handle for gpu *:? *(" + BUS_ID + r")", re.IGNORECASE)
FAILURES: Mapping[str, str] = {
    "couldn't communicate with the nvidia driver": "install the driver (on Blackwell nvidia-open, not cuda-drivers), "
    "then modprobe nvidia, and look at dmesg if that fails",
    "driver/library version mismatch": "reboot, so that the kernel loads the module of the installed driver",
    "failed to initialize nvml": "look at dmesg | grep -i nvrm, then modprobe nvidia",
    "no devices were found": "look at dmesg | grep -i nvrm; Blackwell works with the open kernel modules only: "
    "apt-get install nvidia-open",
    "command not found": "install the driver (on Blackwell nvidia-open, not cuda-drivers)",
    "no such file or directory": "install the driver (on Blackwell nvidia-open, not cuda-drivers)",
    "is not a valid field to query": "upgrade the driver: it is older than any that runs CUDA 13",
    "insufficient permissions": "run as root, and look at the modes of /dev/nvidia*",
}
"""What nvidia-smi (or the shell) says instead of an answer, in lower case, and what to do then."""
NO_DRIVER_FIX = "install the driver (on Blackwell nvidia-open, not cuda-drivers), then run nvidia-smi"


def failure(text: str) -> str | None:
    """The sentence with which nvidia-smi refuses to answer, if the text is one; None for an answer."""
    for line in _lines(text):
        if any(words in line.casefold() for words in FAILURES):
            return line.strip()
    return None


def _failure_fix(sentence: str | None) -> str:
    if sentence is not None:
        for words, fix in FAILURES.items():
            if words in sentence.casefold():
                return fix
    return NO_DRIVER_FIX


def parse_query(text: str, fields: Sequence[str] = QUERY_FIELDS) -> Report:
    """`nvidia-smi --query-gpu=fields --format=csv`, with or without ",noheader" and ",nounits".

    A header, where there is one, decides which column is what; without one the columns are the fields asked for.
    Fields beside QUERY_FIELDS are allowed and not read. Without an index column the rows are counted from 0. Empty
    text is a Report without GPUs.
    """
    what = "nvidia-smi --query-gpu"
    columns = [field.strip() for field in fields]
    gpus: list[Gpu] = []
    drivers: set[str] = set()
    lost: list[str] = []
    for line in _lines(text):
        gone = LOST_GPU.search(line)
        if gone is not None:
            lost.append(bus_id(gone.group(1)))
            continue
        if not line.strip():
            continue
        try:
            cells = next(csv.reader([line], skipinitialspace=True), [])
        except csv.Error as error:
            raise Malformed(f"{what}: {error}", line) from None
        cells = [cell.strip() for cell in cells]
        bare = [re.sub(r" *\[[^\]]*\]$", "", cell) for cell in cells]
        if not gpus and all(re.fullmatch(r"[a-z][a-z0-9_.]*", cell, re.ASCII) for cell in bare):
            columns = bare
            continue
        if len(cells) != len(columns):
            raise Malformed(f"{what}: {len(cells)} columns where {len(columns)} were asked for", line)
        value = dict(zip(columns, cells, strict=True))
        gpus.append(_query_gpu(what, value, len(gpus), line))
        driver = _version(value.get("driver_version"))
        if driver is not None:
            drivers.add(driver)
    _unique(what, gpus, text)
    if len(drivers) > 1:
        raise Malformed(f"{what}: several driver versions on one host", ", ".join(sorted(drivers)))
    return Report(gpus=tuple(gpus), driver=drivers.pop() if drivers else None, lost=tuple(lost))


def _query_gpu(what: str, value: Mapping[str, str], position: int, line: str) -> Gpu:
    index = _whole(value["index"]) if "index" in value else position
    name = _said(value.get("name"))
    if index is None:
        raise Malformed(f"{what}: a GPU without an index", line)
    if name is None and "name" in value:
        raise Malformed(f"{what}: a GPU without a name", line)
    return Gpu(
        index=index,
        name=name or "",
        model=model_key(name or "", _device_id(value.get("pci.device_id"))),
        compute_capability=_capability(value.get("compute_cap")),
        memory_mib=_whole(value.get("memory.total")),
        bus_id=_bus_id(value.get("pci.bus_id")),
        power_limit_w=_watts(value.get("power.limit")),
        pcie_generation_max=_whole(value.get("pcie.link.gen.max")),
        pcie_width_max=_whole(value.get("pcie.link.width.max")),
        mig=_switch(value.get("mig.mode.current")),
        ecc=_switch(value.get("ecc.mode.current")),
        persistence=_switch(value.get("persistence_mode")),
        fabric_state=_said(value.get("fabric.state")),
        fabric_status=_said(value.get("fabric.status")),
    )


def _unique(what: str, gpus: Iterable[Gpu], text: str) -> None:
    """Malformed if two GPUs share an index or a PCI address: then the text is two answers run together."""
    gpus = tuple(gpus)
    addresses = [gpu.bus_id for gpu in gpus if gpu.bus_id is not None]
    if len({gpu.index for gpu in gpus}) != len(gpus) or len(set(addresses)) != len(addresses):
        raise Malformed(f"{what}: one GPU twice", text)


# --- nvidia-smi topo -m ------------------------------------------------------------------------------------------

LINK = re.compile(r"X|NV\d{1,3}|[A-Z][A-Z0-9]{1,7}|N/A", re.ASCII)
CPU_LIST = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*", re.ASCII)


def parse_topology(text: str) -> Topology:
    """`nvidia-smi topo -m`. Columns and rows of network cards are left out; tabs may have become spaces."""
    what = "nvidia-smi topo -m"
    header: list[str] | None = None
    rows: dict[int, tuple[list[str], str | None, int | None]] = {}
    for line in _lines(text):
        stripped = line.strip()
        if header is None:
            if "CPU Affinity" in stripped:
                header = stripped.split("CPU Affinity")[0].split()
            continue
        row = re.match(r"GPU(\d{1,4})(?=\s)", stripped, re.ASCII)
        if row is None:
            if stripped.casefold().startswith("legend"):
                break
            continue
        index = int(row.group(1))
        if index in rows:
            raise Malformed(f"{what}: GPU{index} twice", text)
        rest = stripped[row.end() :]
        cells = re.match(rf"(?:\s+\S+){{{len(header)}}}(?=\s|$)", rest)
        if cells is None:
            raise Malformed(f"{what}: fewer cells than columns", stripped)
        links = cells.group(0).split()
        for link in links:
            if LINK.fullmatch(link) is None:
                raise Malformed(f"{what}: not a kind of link", link)
        rows[index] = (links, *_affinity(what, rest[cells.end() :]))
    if header is None:
        raise Malformed(f"{what}: no header with CPU Affinity", text)
    columns: dict[int, int] = {}
    for position, device in enumerate(header):
        if re.fullmatch(r"GPU\d{1,4}", device, re.ASCII):
            columns[int(device[3:])] = position
    indices = tuple(sorted(columns))
    if not indices or indices != tuple(sorted(rows)):
        raise Malformed(f"{what}: its columns show GPUs {sorted(columns)}, its rows {sorted(rows)}", text)
    matrix = tuple(tuple(rows[row][0][columns[column]] for column in indices) for row in indices)
    if any((matrix[a][b] == "X") != (a == b) for a in range(len(indices)) for b in range(len(indices))):
        raise Malformed(f"{what}: X (a GPU and itself) is not exactly the diagonal", text)
    return Topology(
        indices=indices,
        links=matrix,
        cpu_affinity=tuple(rows[index][1] for index in indices),
        numa_nodes=tuple(rows[index][2] for index in indices),
    )


def _affinity(what: str, rest: str) -> tuple[str | None, int | None]:
    """CPU list and NUMA node from what follows a row's links. Blank cells show only between tabs."""
    cells = [cell.strip() for cell in rest.split("\t")][1:] if "\t" in rest else rest.split()
    cells += [""] * (3 - len(cells))
    if not cells[0] and cells[1] and cells[2].isdecimal():  # one stray tab before the CPU list
        del cells[0]
    cpus, numa = _said(cells[0]), _said(cells[1])
    if cpus is not None and CPU_LIST.fullmatch(cpus) is None:
        raise Malformed(f"{what}: not a list of CPUs", cpus)
    # A GPU that is near several NUMA nodes has a list here: no single node is right then.
    node = int(numa) if numa is not None and re.fullmatch(r"\d{1,4}", numa, re.ASCII) else None
    return cpus, node


# --- nvidia-smi -q, in its two forms -----------------------------------------------------------------------------

# What is read: first the path in the text form, then in the XML form. Paths are tried in order; older drivers wrote
# "Ecc Mode" (case does not matter here) and had "Power Readings" for "GPU Power Readings".
Path = tuple[str, ...]
SMI_Q: Mapping[str, tuple[Path, ...]] = {
    "name": (("product name",),),
    "bus": (("pci", "bus id"),),
    "device": (("pci", "device id"),),
    "generation": (("pci", "gpu link info", "pcie generation", "max"),),
    "width": (("pci", "gpu link info", "link width", "max"),),
    "memory": (("fb memory usage", "total"),),
    "power": (
        ("gpu power readings", "current power limit"),
        ("gpu power readings", "power limit"),
        ("power readings", "power limit"),
    ),
    "mig": (("mig mode", "current"),),
    "ecc": (("ecc mode", "current"),),
    "persistence": (("persistence mode",),),
    "fabric state": (("fabric", "state"),),
    "fabric status": (("fabric", "status"),),
    "driver": (("driver version",), ("kmd version",)),
    "cuda": (("cuda version",), ("cuda umd version",)),
    "attached": (("attached gpus",),),
}
SMI_XML: Mapping[str, tuple[Path, ...]] = {
    "name": (("product_name",),),
    "bus": (("pci", "pci_bus_id"),),
    "device": (("pci", "pci_device_id"),),
    "generation": (("pci", "pci_gpu_link_info", "pcie_gen", "max_link_gen"),),
    "width": (("pci", "pci_gpu_link_info", "link_widths", "max_link_width"),),
    "memory": (("fb_memory_usage", "total"),),
    "power": (
        ("gpu_power_readings", "current_power_limit"),
        ("gpu_power_readings", "power_limit"),
        ("power_readings", "power_limit"),
    ),
    "mig": (("mig_mode", "current_mig"),),
    "ecc": (("ecc_mode", "current_ecc"),),
    "persistence": (("persistence_mode",),),
    "fabric state": (("fabric", "state"),),
    "fabric status": (("fabric", "status"),),
    "driver": (("driver_version",), ("kmd_version",)),
    "cuda": (("cuda_version",), ("cuda_umd_version",)),
    "attached": (("attached_gpus",),),
}


def _first(values: Mapping[Path, str], paths: tuple[Path, ...]) -> str | None:
    return next((values[path] for path in paths if path in values), None)


def parse_smi_q(text: str) -> Report:
    """`nvidia-smi -q`. GPUs are numbered in the order of the text, which is nvidia-smi's own."""
    what = "nvidia-smi -q"
    if "NVSMI LOG" not in text:
        raise Malformed(f"{what}: no NVSMI LOG heading", text)
    blocks: list[tuple[str, dict[Path, str]]] = [("", {})]
    sections: list[tuple[int, str]] = []
    for line in _lines(text):
        line = line.expandtabs(4)
        stripped = line.strip()
        if not stripped or stripped.startswith("=="):
            continue
        opening = re.fullmatch(r"GPU (" + BUS_ID + r")", stripped, re.ASCII)
        if opening is not None:
            blocks.append((opening.group(1), {}))
            sections = []
            continue
        indent = len(line) - len(line.lstrip())
        while sections and sections[-1][0] >= indent:
            sections.pop()
        key, colon, value = stripped.partition(" :")
        path = (*(name for _, name in sections), key.strip().casefold())
        if colon:
            blocks[-1][1].setdefault(path, value.strip())
        else:
            sections.append((indent, key.casefold()))
    return _report(what, SMI_Q, blocks[0][1], blocks[1:], text)


def parse_smi_xml(text: str) -> Report:
    """`nvidia-smi -q -x`. GPUs are numbered in the order of the text, which is nvidia-smi's own."""
    what = "nvidia-smi -q -x"
    try:
        root = ElementTree.fromstring("\n".join(_lines(text)).strip())
    except (ElementTree.ParseError, ValueError) as error:
        raise Malformed(f"{what}: {error}", text) from None
    if root.tag != "nvidia_smi_log":
        raise Malformed(f"{what}: the root element is {root.tag}, not nvidia_smi_log", text)
    blocks = [(gpu.get("id", ""), _leaves(gpu)) for gpu in root.findall("gpu")]
    top: dict[Path, str] = {(child.tag,): (child.text or "").strip() for child in root if child.tag != "gpu"}
    return _report(what, SMI_XML, top, blocks, text)


def _leaves(element: ElementTree.Element) -> dict[Path, str]:
    """The text of each element below this one that has no children, by its path. The first of a name counts."""
    leaves: dict[Path, str] = {}
    waiting: list[tuple[Path, ElementTree.Element]] = [((child.tag,), child) for child in element]
    for path, child in waiting:
        if len(child) == 0:
            leaves.setdefault(path, (child.text or "").strip())
        waiting.extend(((*path, grandchild.tag), grandchild) for grandchild in child)
    return leaves


def _report(
    what: str,
    paths: Mapping[str, tuple[Path, ...]],
    top: Mapping[Path, str],
    blocks: Sequence[tuple[str, Mapping[Path, str]]],
    text: str,
) -> Report:
    gpus: list[Gpu] = []
    for index, (address, values) in enumerate(blocks):
        said = {key: _first(values, alternatives) for key, alternatives in paths.items()}
        name = _said(said["name"])
        if name is None:
            raise Malformed(f"{what}: GPU {address} has no product name", text)
        model = model_key(name, _device_id(said["device"]))
        gpus.append(
            Gpu(
                index=index,
                name=name,
                model=model,
                compute_capability=GPU_MODELS[model].compute_capability if model is not None else None,
                memory_mib=_whole(said["memory"]),
                bus_id=_bus_id(said["bus"]) or _bus_id(address),
                power_limit_w=_watts(said["power"]),
                pcie_generation_max=_whole(said["generation"]),
                pcie_width_max=_whole(said["width"]),
                mig=_switch(said["mig"]),
                ecc=_switch(said["ecc"]),
                persistence=_switch(said["persistence"]),
                fabric_state=_said(said["fabric state"]),
                fabric_status=_said(said["fabric status"]),
            )
        )
    _unique(what, gpus, text)
    attached = _whole(_first(top, paths["attached"]))
    if attached is not None and attached != len(gpus):
        raise Malformed(f"{what}: {attached} attached GPUs, but {len(gpus)} described (cut short?)", text[-200:])
    return Report(
        gpus=tuple(gpus),
        driver=_version(_first(top, paths["driver"])),
        cuda=_cuda(_first(top, paths["cuda"])),
    )


# --- nvidia-smi without arguments, and nvlink -s -----------------------------------------------------------------


def parse_banner(text: str) -> Report:
    """The first line of `nvidia-smi`'s table: driver and CUDA, under their old and their new names. No GPUs."""
    what = "nvidia-smi"
    for line in _lines(text):
        if "NVIDIA-SMI" not in line:
            continue
        driver = re.search(r"(?:Driver|KMD) Version: *([^\s|]+)", line)
        cuda = re.search(r"CUDA (?:UMD )?Version: *(Not Found|[^\s|]+)", line)
        if driver is not None:
            return Report(driver=_version(driver.group(1)), cuda=_cuda(cuda.group(1)) if cuda is not None else None)
    raise Malformed(f"{what}: no line with NVIDIA-SMI and a driver version", text)


def parse_nvlink_status(text: str) -> tuple[NvLinks, ...]:
    """`nvidia-smi nvlink -s`. A GPU without NVLink has no links. Empty text is no GPUs."""
    what = "nvidia-smi nvlink -s"
    found: list[tuple[int, str, dict[int, float | None]]] = []
    for line in _lines(text):
        stripped = line.strip()
        gpu = re.fullmatch(r"GPU (\d{1,4}): (.*?)(?: \(UUID: [^)]*\))?", stripped, re.ASCII)
        link = re.fullmatch(r"Link (\d{1,3}): (?:<inactive>|(\d{1,6}(?:\.\d{1,6})?) GB/s)", stripped, re.ASCII)
        if gpu is not None:
            if any(index == int(gpu.group(1)) for index, _, _ in found):
                raise Malformed(f"{what}: one GPU twice", stripped)
            found.append((int(gpu.group(1)), gpu.group(2).strip(), {}))
        elif link is not None and found:
            found[-1][2][int(link.group(1))] = float(link.group(2)) if link.group(2) is not None else None
        elif stripped.startswith("Link") or (stripped and not found):
            raise Malformed(f"{what}: neither a GPU nor a link", stripped)
    return tuple(
        NvLinks(index, name, tuple(speed for _, speed in sorted(speeds.items()))) for index, name, speeds in found
    )


# --- lspci -------------------------------------------------------------------------------------------------------

LSPCI_LINE = re.compile(r"(?P<address>" + BUS_ID + r")\s+(?P<kind>[^:]*): (?P<device>.*)", re.ASCII)
DISPLAY_CLASSES = ("vga compatible controller", "3d controller", "display controller", "0300", "0302", "0380")


def parse_lspci(text: str) -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that `lspci` shows (with -nn, -n, -D or without), in the order of their addresses.

    Other devices, NVSwitches and the GPUs' audio functions among them, are left out. What only a driver could say is
    None; the compute capability is that of the model's entry. A host without a PCI bus has none.
    """
    devices: list[tuple[str, str]] = []
    understood = False
    for line in _lines(text):
        match = LSPCI_LINE.fullmatch(line)
        if match is None:
            # Its complaint in a container or a virtual machine that has no PCI bus.
            understood = understood or line.startswith(("pcilib: ", "lspci: "))
            continue
        understood = True
        kind = match.group("kind").casefold().strip()
        device = match.group("device")
        numbers = re.search(r"\b10de:([0-9a-f]{4})\b", device, re.ASCII | re.IGNORECASE)
        if kind.startswith(DISPLAY_CLASSES) and (numbers is not None or "nvidia" in device.casefold()):
            devices.append((bus_id(match.group("address")), device))
    if not understood and text.strip():
        raise Malformed("lspci: no line with a PCI address", text)
    if len({address for address, _ in devices}) != len(devices):
        raise Malformed("lspci: one device twice", text)
    devices.sort(key=lambda device: tuple(int(part, 16) for part in re.split(r"[:.]", device[0])))
    return tuple(_lspci_gpu(index, address, device) for index, (address, device) in enumerate(devices))


def _lspci_gpu(index: int, address: str, device: str) -> Gpu:
    device = re.sub(r" \((?:rev [0-9a-f]+|prog-if [^)]*)\).*$", "", device).strip()
    numbers = re.search(r"\b10de:([0-9a-f]{4})\b", device, re.ASCII | re.IGNORECASE) or re.search(
        r"\bDevice ([0-9a-f]{4})\b", device, re.ASCII
    )
    pci_id = f"10de:{numbers.group(1).lower()}" if numbers is not None else None
    bracketed = re.findall(r"\[([^\[\]]+)\]", device)
    model = next(filter(None, (model_key(name, pci_id) for name in (*bracketed, device))), None)
    return Gpu(
        index=index,
        name=GPU_MODELS[model].names[0] if model is not None else device,
        model=model,
        compute_capability=GPU_MODELS[model].compute_capability if model is not None else None,
        bus_id=address,
    )


# --- one machine from all of it ----------------------------------------------------------------------------------


def from_probe(outputs: Mapping[str, str]) -> Hardware:
    """The machine whose programs printed this.

    outputs: "query" (--query-gpu=QUERY_FIELDS --format=csv), "topology" (topo -m), "smi_q" (-q) or "smi_xml" (-q -x),
    "nvlink" (nvlink -s), "lspci" (lspci -nn). Any may be missing or empty, or be nvidia-smi's refusal to answer; when
    nvidia-smi shows no GPU at all, lspci counts. Raises Malformed for text that is neither an answer nor a refusal.
    """
    answers: dict[str, str] = {}
    refusal: str | None = None
    for key in ("query", "smi_xml", "smi_q", "topology", "nvlink"):
        text = outputs.get(key, "")
        # A refusal is a sentence at the start; the same words deep in an answer are no refusal.
        sentence = failure(text[:2000])
        if sentence is not None:
            refusal = refusal or sentence
        elif text.strip():
            answers[key] = text
    reports = [
        parse(answers[key])
        for key, parse in (("query", parse_query), ("smi_xml", parse_smi_xml), ("smi_q", parse_smi_q))
        if key in answers
    ]
    bus = parse_lspci(outputs.get("lspci", ""))
    on_bus = tuple(gpu.bus_id for gpu in bus if gpu.bus_id is not None)
    driver = next((report.driver for report in reports if report.driver is not None), None)
    lost = tuple(dict.fromkeys(address for report in reports for address in report.lost))
    gpus = _merged(reports)
    if not gpus:
        return Hardware(
            gpus=bus,
            interconnect="none",
            seen_by="lspci",
            driver=driver,
            driver_failure=refusal or (f"nvidia-smi gets no answer from {', '.join(lost)}" if lost else None),
            on_bus=on_bus,
            lost=lost,
        )
    links: tuple[tuple[str, ...], ...] = ()
    if "topology" in answers:
        topology = parse_topology(answers["topology"])
        if topology.indices != tuple(gpu.index for gpu in gpus):
            raise Malformed(
                f"nvidia-smi topo -m shows GPUs {list(topology.indices)}, the query {[gpu.index for gpu in gpus]}",
                answers["topology"],
            )
        links = topology.links
        gpus = tuple(
            replace(gpu, cpu_affinity=cpus, numa_node=numa)
            for gpu, cpus, numa in zip(gpus, topology.cpu_affinity, topology.numa_nodes, strict=True)
        )
    interconnect, off = _interconnect(links)
    if "nvlink" in answers and interconnect in ("nvlink", "broken"):  # what it says on PCIe is of no use
        active = {status.index: status.active for status in parse_nvlink_status(answers["nvlink"])}
        gpus = tuple(replace(gpu, nvlinks=active.get(gpu.index)) for gpu in gpus)
    return Hardware(
        gpus=gpus,
        interconnect=interconnect,
        seen_by="nvidia-smi",
        links=links,
        off_fabric=tuple(gpus[position].index for position in off),
        driver=driver,
        driver_failure=refusal if driver is None else None,
        on_bus=on_bus,
        lost=lost,
    )


def _merged(reports: Sequence[Report]) -> tuple[Gpu, ...]:
    """The GPUs of the first report that has any; what it leaves open is taken from the later ones, by PCI address.

    Where an address is not said, the index stands in for it. What a GPU's entry in GPU_MODELS says for certain (its
    compute capability) comes last of all.
    """
    base = next((report.gpus for report in reports if report.gpus), ())
    merged: list[Gpu] = []
    for gpu in base:
        for report in reports:
            for other in report.gpus:
                same = other.bus_id == gpu.bus_id if other.bus_id and gpu.bus_id else other.index == gpu.index
                if same and other is not gpu:
                    unsaid = {key: value for key, value in vars(other).items() if vars(gpu)[key] in (None, "")}
                    gpu = replace(gpu, **unsaid)
        if gpu.compute_capability is None and gpu.model is not None:
            gpu = replace(gpu, compute_capability=GPU_MODELS[gpu.model].compute_capability)
        merged.append(gpu)
    return tuple(sorted(merged, key=lambda gpu: gpu.index))


def _interconnect(links: Sequence[Sequence[str]]) -> tuple[Interconnect, tuple[int, ...]]:
    """What joins the GPUs, and the positions of those off the fabric: the ones with fewer NVLink peers than the best.

    When all have equally few (two halves that do not see each other), all are off it. A pair counts as joined only
    if both of its rows say so.
    """
    count = len(links)
    if count < 2:
        return "none", ()
    peers = [
        sum(links[a][b].startswith("NV") and links[b][a].startswith("NV") for b in range(count) if b != a)
        for a in range(count)
    ]
    if not any(peers):
        return "pcie", ()
    if all(number == count - 1 for number in peers):
        return "nvlink", ()
    off = tuple(position for position, number in enumerate(peers) if number < max(peers))
    return "broken", off or tuple(range(count))


def expected(key: str, count: int) -> Hardware:
    """The machine an inventory declares: `count` GPUs of the model with this key, all as its entry says.

    Raises ValueError for a key that GPU_MODELS does not have and for a count below 1.
    """
    if key not in GPU_MODELS:
        raise ValueError(f"GPU model: found {key!r}, wanted one of {', '.join(sorted(GPU_MODELS))}")
    if count < 1:
        raise ValueError(f"GPU count: found {count}, wanted 1 or more")
    model = GPU_MODELS[key]
    links: tuple[tuple[str, ...], ...] = ()
    if model.interconnect == "nvlink" and count > 1:
        links = tuple(tuple("X" if a == b else f"NV{model.nvlinks}" for b in range(count)) for a in range(count))
    return Hardware(
        gpus=tuple(
            Gpu(
                index=index,
                name=model.names[0],
                model=key,
                compute_capability=model.compute_capability,
                memory_mib=model.memory_mib,
                power_limit_w=model.power_limit_w,
            )
            for index in range(count)
        ),
        interconnect=model.interconnect if count > 1 else "none",
        seen_by="inventory",
        links=links,
    )


# --- found against declared --------------------------------------------------------------------------------------

MEMORY_TOLERANCE = 0.02  # drivers reserve a little more or less; a MIG slice or a vGPU is off by far more
FABRIC_MANAGER_FIX = (
    "install nvidia-fabricmanager and nvlsm at exactly the driver's version, load ib_umad, "
    "systemctl restart nvidia-fabricmanager, then nvidia-smi -q | grep -A2 Fabric"
)
"""Fabric manager exits without a word of failure when nvlsm is missing, and does not start without ib_umad (NVSwitch
of the fifth generation: B200, B300). Its version has to be the driver's to the last digit."""
INVENTORY_FIX = "correct the GPU model or the count in the inventory, or use the machine that it means"


def _numbers(indices: Iterable[int]) -> str:
    """ "3", "0-7", "0-2, 5": for messages."""
    ranges: list[list[int]] = []
    for index in sorted(set(indices)):
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def _subject(indices: Iterable[int]) -> str:
    indices = tuple(indices)
    return f"GPU {_numbers(indices)}" if len(indices) == 1 else f"GPUs {_numbers(indices)}"


def _grouped(values: Iterable[tuple[T, int]]) -> dict[T, list[int]]:
    groups: dict[T, list[int]] = {}
    for value, index in values:
        groups.setdefault(value, []).append(index)
    return groups


def disagreements(found: Hardware, declared: Hardware, driver_floor: str | None = None) -> list[Problem]:
    """All that keeps the machine found from being the machine declared; empty when it is that machine.

    driver_floor: the oldest driver version that will do, such as "580.65.06"; None asks for any driver that works.
    Of each thing that goes wrong on several GPUs there is one Problem, naming them all.
    """
    return [
        *_driver_problems(found, driver_floor),
        *_count_problems(found, declared),
        *_model_problems(found, declared),
        *_mode_problems(found),
        *_memory_problems(found),
        *_fabric_problems(found),
        *_link_problems(found, declared),
    ]


def _driver_problems(found: Hardware, floor: str | None) -> list[Problem]:
    wanted = f"NVIDIA driver {floor} or newer" if floor is not None else "a working NVIDIA driver"
    if found.driver is None and not (found.seen_by == "nvidia-smi" and floor is None):
        said = f"none ({found.driver_failure})" if found.driver_failure is not None else "none"
        return [Problem("driver", said, wanted, _failure_fix(found.driver_failure))]
    if found.driver is not None and floor is not None and version_key(found.driver) < version_key(floor):
        fix = f"upgrade the driver to {floor} or newer (on Blackwell package nvidia-open), then reboot"
        return [Problem("driver", found.driver, wanted, fix)]
    return []


def driver_advice(found: Hardware, recommended: str) -> list[Problem]:
    """A driver that works and is older than the one recommended: a reason to warn of, not to refuse."""
    if found.driver is None or version_key(found.driver) >= version_key(recommended):
        return []
    fix = f"upgrade the driver to {recommended} or newer (on Blackwell package nvidia-open) when a reboot suits"
    return [Problem("driver", found.driver, f"NVIDIA driver {recommended} or newer, which the toolkit came with", fix)]


def _count_problems(found: Hardware, declared: Hardware) -> list[Problem]:
    answering = {gpu.bus_id for gpu in found.gpus}
    silent = list(found.lost)
    if found.seen_by == "nvidia-smi" and found.count < declared.count:
        silent += [address for address in found.on_bus if address not in answering and address not in silent]
    if silent:
        return [
            Problem(
                "GPU count",
                f"{found.count - len(answering & set(silent))} that answer, and no answer from {', '.join(silent)}",
                f"{declared.count}",
                "look for Xid lines in dmesg, then power the machine off and on; a GPU silent after that needs service",
            )
        ]
    if found.count == declared.count:
        return []
    fix = "look for the missing GPU with lspci -d 10de: and in dmesg (Xid), then power the machine off and on; else "
    return [
        Problem(
            "GPU count",
            f"{found.count}",
            f"{declared.count}",
            (fix if found.count < declared.count else "") + INVENTORY_FIX,
        )
    ]


def _model_problems(found: Hardware, declared: Hardware) -> list[Problem]:
    wanted = {gpu.model for gpu in declared.gpus}
    names = " or ".join(sorted({gpu.name for gpu in declared.gpus}))
    wrong = _grouped((gpu.name, gpu.index) for gpu in found.gpus if gpu.model not in wanted)
    return [Problem(_subject(indices), name or "no name", names, INVENTORY_FIX) for name, indices in wrong.items()]


def _mode_problems(found: Hardware) -> list[Problem]:
    split = [gpu.index for gpu in found.gpus if gpu.mig]
    if not split:
        return []
    fix = f"nvidia-smi -i {','.join(str(index) for index in split)} -mig 0, and reboot if it says pending"
    return [Problem(_subject(split), "MIG enabled", "MIG disabled: each rank uses a whole GPU", fix)]


def _memory_problems(found: Hardware) -> list[Problem]:
    short = _grouped(
        ((gpu.memory_mib, GPU_MODELS[gpu.model].memory_mib), gpu.index)
        for gpu in found.gpus
        if gpu.memory_mib is not None
        and gpu.model is not None
        and gpu.memory_mib < GPU_MODELS[gpu.model].memory_mib * (1 - MEMORY_TOLERANCE)
    )
    return [
        Problem(
            _subject(indices),
            f"{memory} MiB of memory",
            f"about {whole} MiB, the whole GPU",
            "give the machine the whole GPU (no MIG slice, no vGPU), and look for remapped rows in nvidia-smi -q",
        )
        for (memory, whole), indices in short.items()
    ]


def _fabric_problems(found: Hardware) -> list[Problem]:
    def trouble(gpu: Gpu) -> str | None:
        if gpu.fabric_state is None:
            return None
        if gpu.fabric_state.casefold() != "completed":
            return f"fabric state {gpu.fabric_state} (CUDA then fails with error 802, system not yet initialized)"
        if gpu.fabric_status is not None and gpu.fabric_status.casefold() != "success":
            return f"fabric state {gpu.fabric_state}, status {gpu.fabric_status}"
        return None

    troubled = _grouped((said, gpu.index) for gpu in found.gpus if (said := trouble(gpu)) is not None)
    return [
        Problem(_subject(indices), said, "fabric state Completed, status Success", FABRIC_MANAGER_FIX)
        for said, indices in troubled.items()
    ]


def _link_problems(found: Hardware, declared: Hardware) -> list[Problem]:
    if found.seen_by != "nvidia-smi" or found.count < 2 or declared.interconnect == "none":
        return []
    wanted = {"nvlink": "NVLink between every two GPUs", "pcie": "PCIe between the GPUs, no NVLink"}
    if not found.links:
        fix = "run nvidia-smi topo -m on the host and look at what it prints"
        return [Problem("interconnect", "no answer from nvidia-smi topo -m", wanted[declared.interconnect], fix)]
    if found.interconnect == "broken":
        off = _subject(found.off_fabric)
        return [
            Problem(
                "interconnect",
                f"{off} without NVLink to some other GPUs",
                wanted[declared.interconnect],
                f"look at {off} in nvidia-smi nvlink -s and for Xid in dmesg; {FABRIC_MANAGER_FIX}",
            )
        ]
    if found.interconnect != declared.interconnect:
        fix = FABRIC_MANAGER_FIX if declared.interconnect == "nvlink" else INVENTORY_FIX
        return [Problem("interconnect", wanted[found.interconnect], wanted[declared.interconnect], fix)]
    return _weak_link_problems(found)


def _weak_link_problems(found: Hardware) -> list[Problem]:
    """GPUs with fewer NVLinks up than their model has: all pairs still talk, at less bandwidth."""
    weak: list[tuple[tuple[int, int], int]] = []
    for gpu, row in zip(found.gpus, found.links, strict=False):
        has = GPU_MODELS[gpu.model].nvlinks if gpu.model is not None else 0
        counts = [int(link[2:]) for link in row if re.fullmatch(r"NV\d{1,3}", link)]
        # A GPU's own trouble shows in all of its pairs, so take its best; its peer's trouble only in one.
        up = min(gpu.nvlinks if gpu.nvlinks is not None else has, max(counts, default=has))
        if up < has:
            weak.append(((up, has), gpu.index))
    return [
        Problem(
            _subject(indices),
            f"{up} NVLinks up",
            f"{has}",
            "look at nvidia-smi nvlink -s and -e, and for Xid in dmesg; then restart nvidia-fabricmanager or the host",
        )
        for (up, has), indices in _grouped(weak).items()
    ]
