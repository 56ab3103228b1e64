"""Two packages that every lab machine has: its GPUs as lspci shows them, and a driver's programs and library.

gpu-hardware-stand-in   /usr/local/bin/lspci: there with and without a driver, as PCI devices are
nvidia-driver-stand-in  /usr/bin/nvidia-smi and libcuda.so.1; purge it, and the machine is one without a driver
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.lab import debian_package
from tests.lab.settings import STAND_INS, Lab
from tests.lab.shell import key_of, made, remove_outdated, run

VERSION = "580.95.05-1"
LIBRARY = "usr/lib/gpu-stand-in"
PROGRAM = """#!/usr/bin/python3 -I
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, "/usr/lib/gpu-stand-in")
from gpu_stand_in.{module} import main

sys.exit(main(sys.argv[1:]))
"""


def key() -> str:
    sources = sorted([*(STAND_INS / "gpu_stand_in").glob("*.py"), STAND_INS / "libcuda_stand_in.c"])
    return key_of(Path(__file__).read_bytes(), *[file.read_bytes() for file in sources])


def build(lab: Lab) -> list[Path]:
    """The two .deb files, in the order of their dependency."""
    folder = made(lab.parts / "stand-ins" / key(), _make, lab.parts / ".stand-ins.lock")
    remove_outdated(folder, folder.parent.iterdir())
    return sorted(folder.glob("*.deb"))


def _program(file: Path, module: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(PROGRAM.format(module=module))
    file.chmod(0o755)


def _make(out: Path) -> None:
    tree = out / "hardware"
    (tree / LIBRARY / "gpu_stand_in").mkdir(parents=True)
    for source in (STAND_INS / "gpu_stand_in").glob("*.py"):
        shutil.copy(source, tree / LIBRARY / "gpu_stand_in" / source.name)
    _program(tree / "usr/local/bin/lspci", "lspci")
    about = "stand-in for a machine's GPUs: prints the machine described in /etc/nvidia-smi-stand-in.json"
    debian_package.build(tree, out, "gpu-hardware-stand-in", VERSION, about, depends=["python3"])

    tree = out / "driver"
    _program(tree / "usr/bin/nvidia-smi", "nvidia_smi")
    libraries = tree / "usr/lib/x86_64-linux-gnu"
    libraries.mkdir(parents=True)
    run(
        "gcc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", STAND_INS / "libcuda_stand_in.c",
        "-o", libraries / "libcuda.so.1",
    )  # fmt: skip
    about = (
        "stand-in for NVIDIA's driver: nvidia-smi that prints a described machine, libcuda.so.1 that answers no device"
    )
    debian_package.build(
        tree,
        out,
        "nvidia-driver-stand-in",
        VERSION,
        about,
        depends=["gpu-hardware-stand-in"],
        scripts={"postinst": "#!/bin/sh\nset -e\nldconfig\n", "postrm": "#!/bin/sh\nset -e\nldconfig\n"},
    )
