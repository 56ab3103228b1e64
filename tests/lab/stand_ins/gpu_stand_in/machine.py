"""The described machine: a few lines of JSON and what follows from them.

    {"model": "B300 SXM6 AC", "count": 8, "driver": "580.95.05", "links": "nvlink", "missing": [5], "off_fabric": [3]}

Every key has a default; see Description. Positions in `missing`, `silent` and `off_fabric` are seats, counted from 0.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

FILE = Path("/etc/nvidia-smi-stand-in.json")


@dataclass(frozen=True)
class Model:
    """What NVIDIA prints about one kind of GPU. Memory in MiB, power in W, link speed in GB/s each way."""

    name: str
    architecture: str
    compute_capability: str
    memory: int
    reserved: int
    bar1: int
    power_limit: int
    power_minimum: int
    device_id: str
    subsystem_id: str
    chip: str
    links: int
    link_speed: str


# Memory, power and links: nvidia-smi of such machines (the H200 measured by this project, the others from public logs).
MODELS = {
    "RTX PRO 6000 Blackwell Server Edition": Model(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition", "Blackwell", "12.0", 97887, 636, 131072, 600, 300,
        "2bb5", "204e", "GB202GL [RTX PRO 6000 Blackwell Server Edition]", 0, "",
    ),
    "B300 SXM6 AC": Model(
        "NVIDIA B300 SXM6 AC", "Blackwell", "10.3", 275040, 1112, 524288, 1100, 200,
        "3182", "20e6", "GB110 [B300 SXM6 AC]", 18, "53.125",
    ),
    "B200": Model(
        "NVIDIA B200", "Blackwell", "10.0", 183359, 717, 262144, 1000, 200,
        "2901", "1999", "GB100 [B200]", 18, "53.125",
    ),
    "H200": Model(
        "NVIDIA H200", "Hopper", "9.0", 143771, 616, 262144, 700, 200,
        "2335", "18bf", "GH100 [H200 SXM 141GB]", 18, "26.562",
    ),
}  # fmt: skip

CUDA_OF_DRIVER = {"570": "12.8", "575": "12.9", "580": "13.0", "590": "13.1", "595": "13.2", "610": "13.3"}
BUSES = {
    "pcie-direct": ("01:00.0", "11:00.0", "61:00.0", "71:00.0", "81:00.0", "91:00.0", "E1:00.0", "F1:00.0"),
    "pcie-switch": ("06:00.0", "07:00.0", "75:00.0", "76:00.0", "84:00.0", "85:00.0", "F4:00.0", "F5:00.0"),
    "nvlink": ("18:00.0", "19:00.0", "5D:00.0", "5E:00.0", "9A:00.0", "9B:00.0", "DB:00.0", "DC:00.0"),
}
"""How the seats are wired -> the PCI addresses of its eight seats. A switch carries two neighbouring seats."""


class DescriptionError(ValueError):
    """The description does not describe a machine that these stand-ins know."""


@dataclass(frozen=True)
class Description:
    """The keys of the JSON file.

    model: a key of MODELS.       count: seats, 1 to 8.        driver: version.
    links: pcie-direct, pcie-switch or nvlink (a switch below, NVLink above).
    missing: seats whose GPU does not show at all.       silent: seats that lspci shows and the driver does not.
    off_fabric: seats whose NVLinks are down.
    nics: InfiniBand or RoCE adapters shown in the topology.       cpu_affinity: one entry a NUMA node.
    bus_ids: PCI addresses by seat, such as "06:00.0", in place of the usual ones.
    processes: [{"seat": 0, "pid": 4711, "memory": MiB, "name": path}, ...], each a process that holds memory of a GPU.
    held: {"0": MiB}, memory in use that no process is named for.
    """

    model: str = "RTX PRO 6000 Blackwell Server Edition"
    count: int = 8
    driver: str = "580.95.05"
    links: str = "pcie-direct"
    missing: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    off_fabric: tuple[int, ...] = ()
    nics: int = 0
    cpu_affinity: tuple[str, ...] = ("0-63,128-191", "64-127,192-255")
    bus_ids: tuple[str, ...] = ()
    processes: tuple[Mapping[str, Any], ...] = ()
    held: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for process in self.processes:
            if set(process) != {"seat", "pid", "memory", "name"}:
                raise DescriptionError(f"process {process!r}; wanted seat, pid, memory and name")
        if self.model not in MODELS:
            raise DescriptionError(f"model {self.model!r}; known: {', '.join(MODELS)}")
        if self.links not in BUSES:
            raise DescriptionError(f"links {self.links!r}; known: {', '.join(BUSES)}")
        if self.links == "nvlink" and not MODELS[self.model].links:
            raise DescriptionError(f"{self.model} has no NVLink")
        if not 1 <= self.count <= 8:
            raise DescriptionError(f"count {self.count}; 1 to 8")
        if self.driver.split(".")[0] not in CUDA_OF_DRIVER:
            raise DescriptionError(f"driver {self.driver!r}; branches known: {', '.join(CUDA_OF_DRIVER)}")

    @property
    def kind(self) -> Model:
        return MODELS[self.model]

    @property
    def cuda(self) -> str:
        return CUDA_OF_DRIVER[self.driver.split(".")[0]]

    def on_bus(self) -> list[Gpu]:
        """The GPUs that are PCI devices, in bus order."""
        seats = [seat for seat in range(self.count) if seat not in self.missing]
        return [Gpu(self, index, seat) for index, seat in enumerate(seats)]

    def gpus(self) -> list[Gpu]:
        """The GPUs that the driver shows, in bus order, numbered from 0 as the driver does."""
        seats = [gpu.seat for gpu in self.on_bus() if gpu.seat not in self.silent]
        return [Gpu(self, index, seat) for index, seat in enumerate(seats)]

    def node_of(self, seat: float) -> int:
        return int(seat * len(self.cpu_affinity) // self.count)

    def wire(self, one: float, other: float) -> str:
        """The PCIe relation of two seats, in nvidia-smi's words. A NIC sits between seats: 0.5 is beside 0 and 1."""
        if self.node_of(one) != self.node_of(other):
            return "SYS"
        return "PIX" if self.links != "pcie-direct" and int(one) // 2 == int(other) // 2 else "NODE"

    def nic_seats(self) -> list[float]:
        return [number * self.count / self.nics for number in range(self.nics)]


@dataclass(frozen=True)
class Gpu:
    machine: Description
    index: int
    seat: int

    @property
    def bus_id(self) -> str:
        """As nvidia-smi prints it: 00000000:01:00.0."""
        return "00000000:" + (self.machine.bus_ids or BUSES[self.machine.links])[self.seat].upper()

    @property
    def uuid(self) -> str:
        return f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'stand-in {self.bus_id}')}"

    @property
    def serial(self) -> str:
        return f"{1650000000000 + self.seat}"

    @property
    def node(self) -> int:
        return self.machine.node_of(self.seat)

    @property
    def processes(self) -> list[Mapping[str, Any]]:
        return [process for process in self.machine.processes if process["seat"] == self.seat]

    @property
    def used(self) -> int:
        """MiB in use."""
        of_processes = sum(int(process["memory"]) for process in self.processes)
        return of_processes + int(self.machine.held.get(str(self.seat), 0))

    @property
    def free(self) -> int:
        """MiB. Reserved, used and free are one more than the total: each is rounded up (so an H200 at rest prints)."""
        kind = self.machine.kind
        return kind.memory - kind.reserved + 1 - self.used

    @property
    def linked(self) -> bool:
        return self.machine.links == "nvlink" and self.seat not in self.machine.off_fabric

    @property
    def fabric(self) -> tuple[str, str]:
        """(state, status). A GPU whose links are down stays In Progress (public logs of such a machine)."""
        if self.machine.links != "nvlink":
            return "N/A", "N/A"
        return ("Completed", "Success") if self.linked else ("In Progress", "N/A")

    def link_to(self, other: Gpu) -> str:
        """A cell of the topology matrix."""
        if other is self or other.seat == self.seat:
            return " X "
        if self.linked and other.linked:
            return f"NV{self.machine.kind.links}"
        return self.machine.wire(self.seat, other.seat)


KEYS = frozenset(entry.name for entry in fields(Description))


def parse(text: str) -> Description:
    """JSON text -> Description. Raises DescriptionError for anything it does not know."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise DescriptionError(f"no JSON: {error}") from None
    if not isinstance(values, dict):
        raise DescriptionError("not a JSON object")
    if unknown := sorted(set(values) - KEYS):
        raise DescriptionError(f"unknown keys {', '.join(unknown)}; known: {', '.join(sorted(KEYS))}")
    settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return Description(**settings)


def read(file: Path = FILE) -> Description:
    return parse(file.read_text()) if file.exists() else Description()
