"""nvidia-smi for the described machine: --query-gpu, --query-compute-apps, topo -m, nvlink -s, -L, -q, -q -x and the
plain table.

Forms follow outputs of the real program (580 and 595 branches), their oddities included: the ANSI codes and the leading
tab in the topology's header also into a pipe, " X " cells, the space after "GPU Memory Power Readings", XML that calls
the same thing by another name. Values are a GPU's at idle, but for memory. -q carries the parts that a node is judged
by, not all; processes are only in --query-compute-apps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union
from xml.sax.saxutils import escape

from .machine import FILE, Description, DescriptionError, Gpu, read

Section = Sequence[tuple[str, str, "Entry"]]
Entry = Union[str, Section]  # noqa: UP007 - one of its parts is named before it is there
"""A value, or rows of (label in the text form, tag in the XML form, entry). An empty label or tag: not in that form."""

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
DEPRECATED = "Requested functionality has been deprecated"
USAGE = "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n"

FIELDS: dict[str, tuple[str, Callable[[Gpu], str]]] = {
    "count": ("", lambda gpu: str(len(gpu.machine.gpus()))),
    "index": ("", lambda gpu: str(gpu.index)),
    "name": ("", lambda gpu: gpu.machine.kind.name),
    "uuid": ("", lambda gpu: gpu.uuid),
    "serial": ("", lambda gpu: gpu.serial),
    "compute_cap": ("", lambda gpu: gpu.machine.kind.compute_capability),
    "driver_version": ("", lambda gpu: gpu.machine.driver),
    "vbios_version": ("", lambda gpu: "98.02.67.00.0A"),
    "pstate": ("", lambda gpu: "P8"),
    "persistence_mode": ("", lambda gpu: "Enabled"),
    "compute_mode": ("", lambda gpu: "Default"),
    "ecc.mode.current": ("", lambda gpu: "Enabled"),
    "ecc.mode.pending": ("", lambda gpu: "Enabled"),
    "ecc.errors.uncorrected.volatile.total": ("", lambda gpu: "0"),
    "ecc.errors.corrected.volatile.total": ("", lambda gpu: "0"),
    "mig.mode.current": ("", lambda gpu: "Disabled"),
    "mig.mode.pending": ("", lambda gpu: "Disabled"),
    "fabric.state": ("", lambda gpu: gpu.fabric[0]),
    "fabric.status": ("", lambda gpu: gpu.fabric[1]),
    "pci.bus_id": ("", lambda gpu: gpu.bus_id),
    "pci.domain": ("", lambda gpu: "0x0000"),
    "pci.bus": ("", lambda gpu: "0x" + gpu.bus_id[9:11]),
    "pci.device": ("", lambda gpu: "0x" + gpu.bus_id[12:14]),
    "pci.device_id": ("", lambda gpu: f"0x{gpu.machine.kind.device_id.upper()}10DE"),
    "pci.sub_device_id": ("", lambda gpu: f"0x{gpu.machine.kind.subsystem_id.upper()}10DE"),
    "pcie.link.gen.current": ("", lambda gpu: "1"),
    "pcie.link.gen.max": ("", lambda gpu: "5"),
    "pcie.link.gen.gpumax": ("", lambda gpu: "5"),
    "pcie.link.gen.hostmax": ("", lambda gpu: "5"),
    "pcie.link.width.current": ("", lambda gpu: "16"),
    "pcie.link.width.max": ("", lambda gpu: "16"),
    "memory.total": ("MiB", lambda gpu: str(gpu.machine.kind.memory)),
    "memory.reserved": ("MiB", lambda gpu: str(gpu.machine.kind.reserved)),
    "memory.used": ("MiB", lambda gpu: str(gpu.used)),
    "memory.free": ("MiB", lambda gpu: str(gpu.free)),
    "power.draw": ("W", lambda gpu: "39.17"),
    "power.draw.average": ("W", lambda gpu: "39.17"),
    "power.draw.instant": ("W", lambda gpu: "39.17"),
    "power.limit": ("W", lambda gpu: f"{gpu.machine.kind.power_limit}.00"),
    "enforced.power.limit": ("W", lambda gpu: f"{gpu.machine.kind.power_limit}.00"),
    "power.default_limit": ("W", lambda gpu: f"{gpu.machine.kind.power_limit}.00"),
    "power.min_limit": ("W", lambda gpu: f"{gpu.machine.kind.power_minimum}.00"),
    "power.max_limit": ("W", lambda gpu: f"{gpu.machine.kind.power_limit}.00"),
    "utilization.gpu": ("%", lambda gpu: "0"),
    "utilization.memory": ("%", lambda gpu: "0"),
    "temperature.gpu": ("", lambda gpu: "26"),
    "temperature.memory": ("", lambda gpu: "N/A"),
    "clocks.current.graphics": ("MHz", lambda gpu: "180"),
    "clocks.current.sm": ("MHz", lambda gpu: "180"),
    "clocks.current.memory": ("MHz", lambda gpu: "405"),
    "clocks.max.sm": ("MHz", lambda gpu: "2430"),
    "clocks.max.memory": ("MHz", lambda gpu: "12481"),
}
"""Field of --query-gpu -> (unit, value)."""
PROCESS_FIELDS: dict[str, tuple[str, str, Callable[[Gpu, Mapping[str, Any]], str]]] = {
    "gpu_uuid": ("gpu_uuid", "", lambda gpu, process: gpu.uuid),
    "pid": ("pid", "", lambda gpu, process: str(process["pid"])),
    "process_name": ("process_name", "", lambda gpu, process: str(process["name"])),
    "used_memory": ("used_gpu_memory", "MiB", lambda gpu, process: str(process["memory"])),
}
"""Field of --query-compute-apps -> (name in the header, unit, value)."""
ALIASES = {
    "gpu_name": "name", "gpu_uuid": "uuid", "gpu_serial": "serial", "gpu_bus_id": "pci.bus_id",
    "clocks.gr": "clocks.current.graphics", "clocks.sm": "clocks.current.sm", "clocks.mem": "clocks.current.memory",
    "clocks.max.mem": "clocks.max.memory",
}  # fmt: skip


def query(gpus: list[Gpu], names: list[str], style: set[str]) -> tuple[str, int]:
    """--query-gpu=names --format=csv[,noheader][,nounits] -> (output, exit code)."""
    for name in names:
        if name not in FIELDS and name not in ALIASES:
            return f'Field "{name}" is not a valid field to query.\n\n', 2
    columns = [(name, *FIELDS[ALIASES.get(name, name)]) for name in names]
    rows = []
    if "noheader" not in style:
        rows.append(", ".join(f"{name} [{unit}]" if unit else name for name, unit, _ in columns))
    for gpu in gpus:
        cells = []
        for _, unit, value in columns:
            text = value(gpu)
            cells.append(
                f"[{text}]" if text == "N/A" else f"{text} {unit}" if unit and "nounits" not in style else text
            )
        rows.append(", ".join(cells))
    return "\n".join(rows) + "\n", 0


def query_processes(gpus: list[Gpu], names: list[str], style: set[str]) -> tuple[str, int]:
    """--query-compute-apps=names --format=csv[,noheader][,nounits] -> (output, exit code)."""
    for name in names:
        if name not in PROCESS_FIELDS:
            return f'Field "{name}" is not a valid field to query.\n\n', 2
    columns = [PROCESS_FIELDS[name] for name in names]
    with_units = "nounits" not in style
    rows = []
    if "noheader" not in style:
        rows.append(", ".join(f"{header} [{unit}]" if unit else header for header, unit, _ in columns))
    for gpu in gpus:
        for process in gpu.processes:
            cells = [(value(gpu, process), unit) for _, unit, value in columns]
            rows.append(", ".join(f"{text} {unit}" if unit and with_units else text for text, unit in cells))
    return "".join(row + "\n" for row in rows), 0


def topology(machine: Description) -> str:
    """topo -m. NICs add columns and rows, and a legend."""
    gpus, nics = machine.gpus(), machine.nic_seats()
    header = [f"GPU{gpu.index}" for gpu in gpus] + [f"NIC{number}" for number in range(len(nics))]
    header += ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    lines = ["\t\x1b[4m" + "\t".join(header) + "\x1b[0m"]
    for gpu in gpus:
        cells = [gpu.link_to(other) for other in gpus] + [machine.wire(gpu.seat, seat) for seat in nics]
        lines.append("\t".join([f"GPU{gpu.index}", *cells, machine.cpu_affinity[gpu.node], str(gpu.node), "", "N/A"]))
    for number, seat in enumerate(nics):
        cells = [machine.wire(seat, gpu.seat) for gpu in gpus]
        cells += [" X " if other == seat else machine.wire(seat, other) for other in nics]
        lines.append("\t".join([f"NIC{number}", *cells, "", "", "", ""]))
    text = "\n".join(lines) + "\n" + LEGEND
    if nics:
        text += "\nNIC Legend:\n\n" + "".join(f"  NIC{number}: mlx5_{number}\n" for number in range(len(nics)))
    return text


def identity(gpu: Gpu) -> str:
    return f"GPU {gpu.index}: {gpu.machine.kind.name} (UUID: {gpu.uuid})"


def nvlink_status(machine: Description) -> str:
    """nvlink -s: speed by link, or <inactive>. GPUs without NVLink show their line alone."""
    lines = []
    for gpu in machine.gpus():
        lines.append(identity(gpu))
        if machine.links == "nvlink":
            speed = f"{machine.kind.link_speed} GB/s" if gpu.linked else "<inactive>"
            lines += [f"\t Link {number}: {speed}" for number in range(machine.kind.links)]
    return "\n".join(lines) + "\n"


def _pairs(labels: str, tags: str, values: Sequence[str] | str) -> Section:
    """Rows from comma-separated labels and tags; one value for all, or one each."""
    names, keys = labels.split(","), tags.split(",")
    return [
        (name, key, values if isinstance(values, str) else values[i])
        for i, (name, key) in enumerate(zip(names, keys, strict=True))
    ]


def details(gpu: Gpu) -> Section:
    """What -q says about one GPU, in its order."""
    kind, limit = gpu.machine.kind, f"{gpu.machine.kind.power_limit}.00 W"
    state, status = gpu.fabric
    bus, device = gpu.bus_id[9:11], gpu.bus_id[12:14]
    health = _pairs(
        "Summary,Bandwidth,Route Recovery in progress,Route Unhealthy,Access Timeout Recovery",
        "summary,bandwidth,route_recovery_in_progress,route_unhealthy,access_timeout_recovery",
        "N/A",
    )
    pci: Section = [
        ("Bus", "", f"0x{bus}"), ("Device", "", f"0x{device}"), ("Domain", "", "0x0000"),
        ("", "pci_bus", bus), ("", "pci_device", device), ("", "pci_domain", "0000"),
        ("Base Classcode", "", "0x3"), ("Sub Classcode", "", "0x2"),
        ("", "pci_base_class", "3"), ("", "pci_sub_class", "2"),
        ("Device Id", "", f"0x{kind.device_id.upper()}10DE"), ("", "pci_device_id", f"{kind.device_id.upper()}10DE"),
        ("Bus Id", "pci_bus_id", gpu.bus_id),
        ("Sub System Id", "", f"0x{kind.subsystem_id.upper()}10DE"),
        ("", "pci_sub_system_id", f"{kind.subsystem_id.upper()}10DE"),
        ("GPU Link Info", "pci_gpu_link_info", [
            ("PCIe Generation", "pcie_gen", _pairs(
                "Max,Current,Device Current,Device Max,Host Max",
                "max_link_gen,current_link_gen,device_current_link_gen,max_device_link_gen,max_host_link_gen",
                ["5", "1", "1", "5", "5"],
            )),
            ("Link Width", "link_widths", _pairs("Max,Current", "max_link_width,current_link_width", "16x")),
        ]),
        ("Replays Since Reset", "replay_counter", "0"),
        ("Replay Number Rollovers", "replay_rollover_counter", "0"),
    ]  # fmt: skip
    power = _pairs(
        "Average Power Draw,Instantaneous Power Draw,Current Power Limit,Requested Power Limit,Default Power Limit,"
        "Min Power Limit,Max Power Limit",
        "average_power_draw,instant_power_draw,current_power_limit,requested_power_limit,default_power_limit,"
        "min_power_limit,max_power_limit",
        ["39.17 W", "39.17 W", limit, limit, limit, f"{kind.power_minimum}.00 W", limit],
    )
    return [
        ("Product Name", "product_name", kind.name),
        ("Product Brand", "product_brand", "NVIDIA"),
        ("Product Architecture", "product_architecture", kind.architecture),
        ("Display Mode", "display_mode", DEPRECATED),
        ("Display Attached", "display_attached", "Yes"),
        ("Display Active", "display_active", "Disabled"),
        ("Persistence Mode", "persistence_mode", "Enabled"),
        ("Addressing Mode", "addressing_mode", "None"),
        ("MIG Mode", "mig_mode", _pairs("Current,Pending", "current_mig,pending_mig", "Disabled")),
        ("Accounting Mode", "accounting_mode", "Disabled"),
        ("Serial Number", "serial", gpu.serial),
        ("GPU UUID", "uuid", gpu.uuid),
        ("Minor Number", "minor_number", str(gpu.index)),
        ("VBIOS Version", "vbios_version", "98.02.67.00.0A"),
        ("MultiGPU Board", "multigpu_board", "No"),
        ("Board ID", "board_id", f"0x{bus.lower()}00"),
        ("GPU Part Number", "gpu_part_number", f"{kind.device_id.upper()}-895-A1"),
        ("GPU Virtualization Mode", "gpu_virtualization_mode", [
            ("Virtualization Mode", "virtualization_mode", "None"), ("Host VGPU Mode", "host_vgpu_mode", "N/A"),
        ]),
        ("GPU Recovery Action", "gpu_recovery_action", "None"),
        ("GSP Firmware Version", "gsp_firmware_version", gpu.machine.driver),
        ("PCI", "pci", pci),
        ("Fan Speed", "fan_speed", "N/A"),
        ("Performance State", "performance_state", "P8"),
        ("FB Memory Usage", "fb_memory_usage", _pairs(
            "Total,Reserved,Used,Free", "total,reserved,used,free",
            [f"{kind.memory} MiB", f"{kind.reserved} MiB", f"{gpu.used} MiB", f"{gpu.free} MiB"],
        )),
        ("BAR1 Memory Usage", "bar1_memory_usage", _pairs(
            "Total,Used,Free", "total,used,free", [f"{kind.bar1} MiB", "0 MiB", f"{kind.bar1} MiB"],
        )),
        ("Compute Mode", "compute_mode", "Default"),
        ("Utilization", "utilization", _pairs("GPU,Memory", "gpu_util,memory_util", "0 %")),
        ("ECC Mode", "ecc_mode", _pairs("Current,Pending", "current_ecc,pending_ecc", "Enabled")),
        ("ECC Errors", "ecc_errors", [
            ("Volatile", "volatile", _pairs(
                "SRAM Correctable,DRAM Correctable,DRAM Uncorrectable",
                "sram_correctable,dram_correctable,dram_uncorrectable", "0",
            )),
        ]),
        ("Remapped Rows", "remapped_rows", [
            ("Correctable Error", "remapped_row_corr", "0"), ("Uncorrectable Error", "remapped_row_unc", "0"),
            ("Pending", "remapped_row_pending", "No"), ("Remapping Failure Occurred", "remapped_row_failure", "No"),
        ]),
        ("Temperature", "temperature", [("GPU Current Temp", "gpu_temp", "26 C")]),
        ("GPU Power Readings", "gpu_power_readings", power),
        ("GPU Memory Power Readings ", "gpu_memory_power_readings", _pairs(
            "Average Power Draw,Instantaneous Power Draw", "average_power_draw,instant_power_draw", "N/A",
        )),
        ("Clocks", "clocks", _pairs(
            "Graphics,SM,Memory,Video", "graphics_clock,sm_clock,mem_clock,video_clock",
            ["180 MHz", "180 MHz", "405 MHz", "600 MHz"],
        )),
        ("Fabric", "fabric", [
            ("State", "state", state), ("Status", "status", status),
            ("CliqueId", "cliqueId", "N/A" if state == "N/A" else "0"),
            ("ClusterUUID", "clusterUuid", "N/A" if state == "N/A" else "00000000-0000-0000-0000-000000000000"),
            ("Health", "health", health),
        ]),
        ("Processes", "", "None"),
        ("", "processes", []),
        ("Capabilities", "capabilities", [("EGM", "egm", "disabled")]),
    ]  # fmt: skip


def _text(rows: Section, depth: int) -> list[str]:
    lines = []
    for label, _, entry in rows:
        if not label:
            continue
        head = " " * 4 * depth + label
        if isinstance(entry, str):
            lines.append(f"{head:<55}: {entry}")
        else:
            lines += [head, *_text(entry, depth + 1)]
    return lines


def _xml(rows: Section, depth: int) -> list[str]:
    lines, indent = [], "\t" * depth
    for _, tag, entry in rows:
        if not tag:
            continue
        if isinstance(entry, str):
            lines.append(f"{indent}<{tag}>{escape(entry)}</{tag}>")
        else:
            lines += [f"{indent}<{tag}>", *_xml(entry, depth + 1), f"{indent}</{tag}>"]
    return lines


def report(gpus: list[Gpu], machine: Description) -> str:
    """-q."""
    lines = ["", "==============NVSMI LOG==============", ""]
    head = {
        "Timestamp": time.strftime("%a %b %e %H:%M:%S %Y"),
        "Driver Version": machine.driver,
        "CUDA Version": machine.cuda,
    }
    lines += [f"{name:<55}: {value}" for name, value in head.items()]
    lines += ["", f"{'Attached GPUs':<55}: {len(machine.gpus())}"]
    for gpu in gpus:
        lines += [f"GPU {gpu.bus_id}", *_text(details(gpu), 1), ""]
    return "\n".join(lines) + "\n"


def report_xml(gpus: list[Gpu], machine: Description) -> str:
    """-q -x."""
    lines = ['<?xml version="1.0" ?>', '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">', "<nvidia_smi_log>"]
    head = {
        "timestamp": time.strftime("%a %b %e %H:%M:%S %Y"),
        "driver_version": machine.driver,
        "cuda_version": machine.cuda,
        "attached_gpus": str(len(machine.gpus())),
    }
    lines += [f"\t<{name}>{value}</{name}>" for name, value in head.items()]
    for gpu in gpus:
        lines += [f'\t<gpu id="{gpu.bus_id}">', *_xml(details(gpu), 2), "\t</gpu>"]
    return "\n".join([*lines, "</nvidia_smi_log>"]) + "\n"


def banner(gpus: list[Gpu], machine: Description) -> str:
    """The plain table. From branch 610 on its first line names the kernel driver and CUDA's user part."""
    newer = int(machine.driver.split(".")[0]) >= 610
    versions = (
        f"NVIDIA-SMI {machine.driver:<18} KMD Version: {machine.driver:<13} CUDA UMD Version: {machine.cuda}"
        if newer
        else f"NVIDIA-SMI {machine.driver:<22} Driver Version: {machine.driver:<14} CUDA Version: {machine.cuda}"
    )
    rule = "+" + "-" * 41 + "+" + "-" * 24 + "+" + "-" * 22 + "+"
    lines = [
        time.strftime("%a %b %e %H:%M:%S %Y") + "       ",
        "+" + "-" * 89 + "+",
        f"| {versions:<87} |",
        rule,
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
        "|                                         |                        |               MIG M. |",
        "|" + "=" * 41 + "+" + "=" * 24 + "+" + "=" * 22 + "|",
    ]
    for gpu in gpus:
        kind = machine.kind
        shown = kind.name if len(kind.name) <= 26 else kind.name[:23] + "..."
        usage = f"{gpu.used}MiB / {kind.memory:>6}MiB"
        lines += [
            f"| {gpu.index:>3}  {shown:<30} On  |   {gpu.bus_id} Off |                    0 |",
            f"| N/A   26C    P8             39W / {kind.power_limit:>4}W | {usage:>22} |      0%      Default |",
            "|                                         |                        |             Disabled |",
            rule,
        ]
    lines += [
        "",
        "+" + "-" * 89 + "+",
        f"| {'Processes:':<87} |",
        f"| {' GPU   GI   CI              PID   Type   Process name                        GPU Memory':<87} |",
        f"| {'       ID   ID                                                               Usage':<87} |",
        "|" + "=" * 89 + "|",
        f"| {' No running processes found':<87} |",
        "+" + "-" * 89 + "+",
    ]
    return "\n".join(lines) + "\n"


def _value(arguments: list[str], *names: str) -> str | None:
    """Take `--name=value` or `--name value` out of the arguments."""
    for position, argument in enumerate(arguments):
        for name in names:
            if argument == name and position + 1 < len(arguments):
                value = arguments[position + 1]
                del arguments[position : position + 2]
                return value
            if name.startswith("--") and argument.startswith(name + "="):
                del arguments[position]
                return argument[len(name) + 1 :]
    return None


def answer(arguments: list[str], machine: Description) -> tuple[str, int]:
    """The whole program without its file and its streams: arguments -> (output, exit code)."""
    rest = list(arguments)
    gpus = machine.gpus()
    if not gpus:
        return "No devices were found\n", 6
    wanted = _value(rest, "-i", "--id")
    if wanted is not None:
        named = set(wanted.split(","))
        gpus = [gpu for gpu in gpus if named & {str(gpu.index), gpu.uuid, gpu.bus_id}]
        if not gpus:
            return f"Unable to determine the device handle for GPU {wanted}: Not Found\n", 6
    for option, asked in (("--query-gpu", query), ("--query-compute-apps", query_processes)):
        fields = _value(rest, option)
        if fields is None:
            continue
        style = (_value(rest, "--format") or "").split(",")
        if style[0] != "csv" or not set(style[1:]) <= {"noheader", "nounits"} or rest:
            return USAGE, 1
        return asked(gpus, [name.strip() for name in fields.split(",")], set(style[1:]))
    if rest in (["topo", "-m"], ["topo", "--matrix"]):
        return topology(machine), 0
    if rest in (["nvlink", "-s"], ["nvlink", "--status"]):
        return nvlink_status(machine), 0
    if rest in (["-L"], ["--list-gpus"]):
        return "".join(identity(gpu) + "\n" for gpu in gpus), 0
    if rest in (["-q"], ["--query"]):
        return report(gpus, machine), 0
    if sorted(rest) in (["-q", "-x"], ["--query", "--xml-format"], ["--xml-format", "-q"], ["--query", "-x"]):
        return report_xml(gpus, machine), 0
    if not rest:
        return banner(gpus, machine), 0
    return USAGE, 1


def main(arguments: list[str]) -> int:
    try:
        machine = read()
    except DescriptionError as error:
        print(f"nvidia-smi stand-in: {FILE}: {error}", file=sys.stderr)
        return 1
    output, code = answer(arguments, machine)
    sys.stdout.write(output)
    return code
