"""Machines in the words of nvidia-smi and lspci, written for the tests: what they print, given what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from node.hardware import GPU_MODELS, QUERY_FIELDS

Links = Callable[[int, int], str]


def all_nvlink(first: int, second: int) -> str:
    return "NV18"


def two_sockets(first: int, second: int) -> str:
    """Eight GPUs on PCIe, four a socket."""
    return "NODE" if first // 4 == second // 4 else "SYS"


def without(*absent: int) -> Links:
    """NVLink between all but these GPUs."""
    return lambda first, second: "NODE" if first in absent or second in absent else "NV18"


def topology(count: int, links: Links, cards: Iterable[str] = ()) -> str:
    """`nvidia-smi topo -m` for GPUs in two halves, one NUMA node each, and network cards that are all SYS away."""
    cards = tuple(cards)
    names = [*(f"GPU{index}" for index in range(count)), *cards]
    header = "\t\x1b[4m" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"
    rows = [header]
    for index in range(count):
        half = 2 * index // count
        cells = [" X " if other == index else links(index, other) for other in range(count)]
        affinity = "32-63,96-127" if half else "0-31,64-95"
        rows.append("\t".join([f"GPU{index}", *cells, *("SYS" for _ in cards), affinity, str(half), "", "N/A"]))
    for card in cards:
        cells = [" X " if other == card else "SYS" for other in names]
        rows.append("\t".join([card, *cells, "", "", "", ""]))
    legend = ["", "Legend:", "", "  X    = Self", "  SYS  = over the link between the sockets", ""]
    return "\n".join([*rows, *legend])


def query(
    key: str, count: int, driver: str = "580.95.05", changes: Mapping[int, Mapping[str, str]] | None = None
) -> str:
    """`nvidia-smi --query-gpu=QUERY_FIELDS --format=csv`; changes: other values, by GPU index and field."""
    model = GPU_MODELS[key]
    units = {"memory.total": " [MiB]", "power.limit": " [W]"}
    rows = [", ".join(field + units.get(field, "") for field in QUERY_FIELDS)]
    for index in range(count):
        values = {
            "index": str(index),
            "name": model.names[0],
            "compute_cap": model.compute_capability,
            "driver_version": driver,
            "memory.total": f"{model.memory_mib} MiB",
            "pci.bus_id": f"00000000:{0x1A + 0x10 * index:02X}:00.0",
            "pcie.link.gen.max": "5",
            "pcie.link.width.max": "16",
            "power.limit": f"{model.power_limit_w:.2f} W",
            "persistence_mode": "Enabled",
            "ecc.mode.current": "Enabled",
            "mig.mode.current": "Disabled",
            "pci.device_id": f"0x{model.pci_ids[0][5:].upper()}10DE",
            "fabric.state": "Completed" if model.fabric_manager else "N/A",
            "fabric.status": "Success" if model.fabric_manager else "N/A",
            **(changes or {}).get(index, {}),
        }
        rows.append(", ".join(values[field] for field in QUERY_FIELDS))
    return "\n".join(rows) + "\n"


# lspci -nn of a host with eight B300, two of its network cards, its management console and a GPU's audio function.
LSPCI_B300 = (
    "02:00.0 VGA compatible controller [0300]: ASPEED Technology, Inc. ASPEED Graphics Family [1a03:2000] (rev 52)\n"
    + "".join(
        f"{bus:02x}:00.0 3D controller [0302]: NVIDIA Corporation GB110 [B300 SXM6 AC] [10de:3182] (rev a1)\n"
        for bus in range(0x1A, 0x9A, 0x10)
    )
    + "1b:00.0 Infiniband controller [0207]: Mellanox Technologies MT4131 [ConnectX-8] [15b3:1023]\n"
    + "2b:00.0 Ethernet controller [0200]: Mellanox Technologies MT43244 [BlueField-3] [15b3:a2dc] (rev 01)\n"
    + "8a:00.1 Audio device [0403]: NVIDIA Corporation Device [10de:22e8] (rev a1)\n"
    + "c0:00.0 Bridge [0680]: NVIDIA Corporation GH100 [H100 NVSwitch] [10de:22a3] (rev a1)\n"
)

NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n\n"
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n"
NOT_INSTALLED = "bash: line 1: nvidia-smi: command not found\n"
NO_DEVICES = "No devices were found\n"
OLD_DRIVER = 'Field "fabric.state" is not a valid field to query.\n\n'
LOST = (
    "Unable to determine the device handle for GPU0000:5A:00.0: GPU is lost.  Reboot the system to recover this GPU\n"
)

BANNER_610 = (
    "+-----------------------------------------------------------------------------------------+\n"
    "| NVIDIA-SMI 610.43.02              KMD Version: 610.43.02     CUDA UMD Version: 13.3     |\n"
    "+-----------------------------------------+------------------------+----------------------+\n"
)

SMI_Q_610 = """
==============NVSMI LOG==============

Timestamp                                              : Sun Nov 29 12:00:00 2026
KMD Version                                            : 610.43.02
CUDA UMD Version                                       : 13.3

Attached GPUs                                          : 1
GPU 00000000:1A:00.0
    Product Name                                       : NVIDIA B300 SXM6 AC
    Persistence Mode                                   : Disabled
    MIG Mode
        Current                                        : Enabled
        Pending                                        : Disabled
    PCI
        Device Id                                      : 0x318210DE
        Bus Id                                         : 00000000:1A:00.0
        GPU Link Info
            PCIe Generation
                Max                                    : 6
                Current                                : 1
            Link Width
                Max                                    : 16x
                Current                                : 16x
    FB Memory Usage
        Total                                          : 275040 MiB
        Used                                           : 0 MiB
    ECC Mode
        Current                                        : Disabled
        Pending                                        : Disabled
    GPU Power Readings
        Current Power Limit                            : 1100.00 W
    Fabric
        State                                          : In Progress
        Status                                         : N/A
    Processes                                          : None
"""
