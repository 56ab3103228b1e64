"""Cut .deb packages named and laid out like NVIDIA's from NVIDIA's CUDA wheels.

Names, versions, dependency order, alternatives and ld.so.conf files follow NVIDIA's packages as public package lists
and apt logs show them; the exact Depends lines are inferred from install order. Contents are the wheels' own. What no
wheel has is made here and says so: the libcuda link stub, the development links of libraries, nvcc 12.8
(stand_ins/nvcc-12.8). Left out: cublas (its wheel is larger than all the others together, and nothing of the sampling
kernels includes it), cufft, cusolver, cusparse, nsight.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab import debian_package
from tests.lab.settings import STAND_INS, Lab
from tests.lab.shell import LabError, key_of, made, run

TARGET = "targets/x86_64-linux"
INCLUDE, LIBRARY = f"{TARGET}/include", f"{TARGET}/lib"


@dataclass(frozen=True)
class Toolkit:
    """One CUDA release. wheels: component -> (wheel name, version); `meta` is the version of the metapackages."""

    version: str
    meta: str
    wheels: dict[str, tuple[str, str]]

    @property
    def suffix(self) -> str:
        return self.version.replace(".", "-")

    @property
    def major(self) -> str:
        return self.version.split(".")[0]

    @property
    def prefix(self) -> str:
        return f"usr/local/cuda-{self.version}"

    @property
    def priority(self) -> str:
        """In update-alternatives, as NVIDIA's packages set it: 128, 130."""
        return self.version.replace(".", "")

    def deb_version(self, component: str) -> str:
        return f"{self.meta if component == 'meta' else self.wheels[component][1]}-1"


@dataclass(frozen=True)
class Package:
    """name, the component whose version it has, depends.

    files: (component whose wheel it is, pattern, folder in the tree). The pattern is matched at the start of a path in
    the wheel; what follows the match is the path below the folder.
    """

    name: str
    component: str
    depends: tuple[str, ...] = ()
    files: tuple[tuple[str, str, str], ...] = ()
    architecture: str = "amd64"


@dataclass(frozen=True)
class Cut:
    toolkit: Toolkit
    package: Package
    wheels: Path = field(repr=False)


# CUDA 12.8 Update 1 and 13.0 Update 2. In 12.8 one wheel holds what three packages do (and has no nvcc).
TOOLKITS = (
    Toolkit("12.8", "12.8.1", {
        "nvcc": ("nvidia-cuda-nvcc-cu12", "12.8.93"), "crt": ("nvidia-cuda-nvcc-cu12", "12.8.93"),
        "nvvm": ("nvidia-cuda-nvcc-cu12", "12.8.93"), "runtime": ("nvidia-cuda-runtime-cu12", "12.8.90"),
        "cccl": ("nvidia-cuda-cccl-cu12", "12.8.90"), "profiler": ("nvidia-cuda-profiler-api-cu12", "12.8.90"),
        "curand": ("nvidia-curand-cu12", "10.3.9.90"),
    }),
    Toolkit("13.0", "13.0.2", {
        "nvcc": ("nvidia-cuda-nvcc", "13.0.88"), "crt": ("nvidia-cuda-crt", "13.0.88"),
        "nvvm": ("nvidia-nvvm", "13.0.88"), "runtime": ("nvidia-cuda-runtime", "13.0.96"),
        "cccl": ("nvidia-cuda-cccl", "13.0.85"), "profiler": ("nvidia-cuda-profiler-api", "13.0.85"),
        "culibos": ("nvidia-cuda-culibos", "13.0.85"), "curand": ("nvidia-curand", "10.4.0.35"),
        "nvrtc": ("nvidia-cuda-nvrtc", "13.0.88"),
    }),
)  # fmt: skip


def packages(kit: Toolkit) -> list[Package]:
    """Every package of a toolkit, in the order NVIDIA's install."""
    s, has_nvrtc = kit.suffix, "nvrtc" in kit.wheels
    nvvm = f"cuda-nvvm-{s}" if kit.major == "12" else f"libnvvm-{s}"  # renamed in 13.0
    major_config = f"cuda-toolkit-{kit.major}-config-common"
    libraries = [f"cuda-cudart-{s}", f"libcurand-{s}"] + [f"cuda-nvrtc-{s}"] * has_nvrtc
    development = [f"cuda-cccl-{s}", f"cuda-cudart-dev-{s}", f"cuda-driver-dev-{s}", f"cuda-profiler-api-{s}"]
    development += [f"cuda-nvrtc-dev-{s}"] * has_nvrtc + [f"libcurand-dev-{s}"]
    shared_object = r"lib/(?=[^/]*\.so\.[.\d]+$)(?![^/]*\.alt\.)"  # nvrtc brings a second build of itself
    found = [
        Package("cuda-toolkit-config-common", "runtime", architecture="all"),
        Package(major_config, "runtime", ("cuda-toolkit-config-common",), architecture="all"),
        Package(f"cuda-toolkit-{s}-config-common", "runtime", (major_config,), architecture="all"),
        Package(
            f"cuda-cudart-{s}", "runtime", (f"cuda-toolkit-{s}-config-common",), (("runtime", shared_object, LIBRARY),)
        ),
        Package(f"cuda-driver-dev-{s}", "runtime"),
        Package(
            f"cuda-cccl-{s}", "cccl", (), (("cccl", "include/", INCLUDE), ("cccl", "lib/cmake/", f"{LIBRARY}/cmake"))
        ),
        Package(
            f"cuda-cudart-dev-{s}", "runtime", (f"cuda-cudart-{s}", f"cuda-driver-dev-{s}", f"cuda-cccl-{s}"),
            (("runtime", "include/(?!crt/)", INCLUDE), ("runtime", r"lib/(?=.*\.a$)", LIBRARY)),
        ),
        Package(
            f"cuda-crt-{s}", "crt", (), (("crt", "include/crt/", f"{INCLUDE}/crt"), ("nvcc", "bin/crt/", "bin/crt"))
        ),
        Package(
            nvvm, "nvvm", (),
            (
                ("nvvm", "nvvm/", "nvvm"), ("nvvm", "lib/(?=libnvvm)", "nvvm/lib64"),
                ("nvvm", r"include/(?=nvvm\.h$)", "nvvm/include"),
            ),
        ),
        Package(
            f"cuda-nvcc-{s}", "nvcc", ("build-essential", f"cuda-crt-{s}", nvvm, f"cuda-cudart-dev-{s}"),
            (("nvcc", "bin/(?=[^/]*$)", "bin"), ("nvcc", r"include/(?=fatbinary_section\.h$)", INCLUDE)),
        ),
        Package(f"cuda-profiler-api-{s}", "profiler", (), (("profiler", "include/", INCLUDE),)),
        Package(
            f"libcurand-{s}", "curand", (f"cuda-toolkit-{s}-config-common",), (("curand", shared_object, LIBRARY),)
        ),
        Package(f"libcurand-dev-{s}", "curand", (f"libcurand-{s}",), (("curand", "include/", INCLUDE),)),
        Package(f"cuda-compiler-{s}", "meta", (f"cuda-nvcc-{s}", f"cuda-crt-{s}", nvvm)),
        Package(f"cuda-libraries-{s}", "meta", tuple(libraries)),
        Package(f"cuda-libraries-dev-{s}", "meta", tuple(development)),
        Package(f"cuda-toolkit-{s}", "meta", (f"cuda-compiler-{s}", f"cuda-libraries-{s}", f"cuda-libraries-dev-{s}")),
    ]  # fmt: skip
    if has_nvrtc:
        found += [
            Package(
                f"cuda-nvrtc-{s}", "nvrtc", (f"cuda-toolkit-{s}-config-common",), (("nvrtc", shared_object, LIBRARY),)
            ),
            Package(f"cuda-nvrtc-dev-{s}", "nvrtc", (f"cuda-nvrtc-{s}",), (("nvrtc", "include/", INCLUDE),)),
        ]
    if "culibos" in kit.wheels:
        found.append(Package(f"cuda-culibos-dev-{s}", "culibos", (), (("culibos", r"lib/(?=.*\.a$)", LIBRARY),)))
    if kit.major != "12":
        found.append(Package(f"cuda-toolkit-{kit.major}", "meta", (f"cuda-toolkit-{s}",)))
    return found


def key() -> str:
    return key_of(
        Path(__file__).read_bytes(), Path(debian_package.__file__).read_bytes(), (STAND_INS / "nvcc-12.8").read_bytes()
    )


def build(lab: Lab) -> Path:
    """The folder with all packages; some 360 MB of wheels are fetched for it and kept."""
    return made(lab.parts / "nvidia-packages" / key(), lambda out: _make(lab, out), lab.parts / ".nvidia.lock")


def fetch_wheels(lab: Lab) -> Path:
    """NVIDIA's wheels from the package index that this machine's pip uses."""
    folder = lab.parts / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {wheel for kit in TOOLKITS for wheel in kit.wheels.values()}
    missing = [f"{name}=={version}" for name, version in sorted(wanted) if not _find_wheel(folder, name, version)]
    if missing:
        print(f"fetching {len(missing)} of NVIDIA's wheels", flush=True)
        run(
            "/usr/bin/python3",
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "-d",
            folder,
            *missing,
        )
    return folder


def _find_wheel(folder: Path, name: str, version: str) -> Path | None:
    return next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None)


def _make(lab: Lab, out: Path) -> None:
    wheels = fetch_wheels(lab)
    cuts = [Cut(kit, package, wheels) for kit in TOOLKITS for package in packages(kit)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda cut: _build(cut, out), cuts))


def _build(cut: Cut, out: Path) -> None:
    kit, package = cut.toolkit, cut.package
    tree = out / f"tree-{package.name}"
    _unpack(cut, tree / kit.prefix)
    _add_what_wheels_lack(kit, package.name, tree)
    debian_package.build(
        tree,
        out,
        package.name,
        kit.deb_version(package.component),
        f"stand-in for NVIDIA's {package.name}, cut from its Python wheels",
        architecture=package.architecture,
        depends=package.depends,
        scripts=_scripts(kit, package.name),
    )


def _unpack(cut: Cut, tree: Path) -> None:
    for component, pattern, destination in cut.package.files:
        name, version = cut.toolkit.wheels[component]
        wheel = _find_wheel(cut.wheels, name, version)
        if wheel is None:
            raise LabError(f"{cut.wheels}: no wheel {name} {version}", fix="bin/lab build fetches it")
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                inside = re.sub(r"^nvidia/[^/]+/", "", info.filename)  # cu13/..., cuda_nvcc/..., curand/...
                start = re.match(pattern, inside)
                if not start or info.is_dir() or inside.endswith("__init__.py"):
                    continue
                target = tree / destination / inside[start.end() :]
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
                program = target.parent.name == "bin" and target.suffix != ".profile"
                target.chmod(0o755 if program else 0o644)
                if link := re.fullmatch(r"(.*\.so)\.\d+[.\d]*", target.name):  # wheels carry no development links
                    target.with_name(link[1]).symlink_to(target.name)


def _add_what_wheels_lack(kit: Toolkit, name: str, root: Path) -> None:
    tree = root / kit.prefix
    if name == f"cuda-nvcc-{kit.suffix}" and not (tree / "bin/nvcc").exists():
        (tree / "bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(STAND_INS / "nvcc-12.8", tree / "bin/nvcc")
        (tree / "bin/nvcc").chmod(0o755)
    if name.startswith("cuda-driver-dev"):  # what -lcuda finds at link time
        stubs = tree / LIBRARY / "stubs"
        stubs.mkdir(parents=True)
        run("gcc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", stubs / "libcuda.so")
    if name == f"cuda-cudart-{kit.suffix}":  # the tree's two usual links
        (tree / "include").symlink_to(INCLUDE)
        (tree / "lib64").symlink_to(LIBRARY)
    search = {
        "cuda-toolkit-config-common": ("000_cuda.conf", "/usr/local/cuda"),
        f"cuda-toolkit-{kit.major}-config-common": (f"988_cuda-{kit.major}.conf", f"/usr/local/cuda-{kit.major}"),
    }.get(name)
    if search:
        folder = root / "etc/ld.so.conf.d"
        folder.mkdir(parents=True)
        (folder / search[0]).write_text(f"{search[1]}/{LIBRARY}\n")


def _scripts(kit: Toolkit, name: str) -> dict[str, str]:
    if name != f"cuda-toolkit-{kit.suffix}-config-common":
        return {}
    links = (("/usr/local/cuda", "cuda"), (f"/usr/local/cuda-{kit.major}", f"cuda-{kit.major}"))
    install = [f"update-alternatives --install {link} {group} /{kit.prefix} {kit.priority}\n" for link, group in links]
    remove = [f"update-alternatives --remove {group} /{kit.prefix}\n" for _, group in links]
    return {
        "postinst": f"#!/bin/sh\nset -e\necho 'Setting alternatives'\nmkdir -p /{kit.prefix}\n"
        f"{''.join(install)}ldconfig\n",
        "prerm": f'#!/bin/sh\nset -e\n[ "$1" = remove ] || exit 0\n{"".join(remove)}',
    }
