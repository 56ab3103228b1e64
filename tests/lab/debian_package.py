"""Making a .deb from a folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab.shell import run


def build(
    tree: Path,
    out: Path,
    name: str,
    version: str,
    description: str,
    *,
    architecture: str = "amd64",
    depends: Sequence[str] = (),
    scripts: Mapping[str, str] | None = None,
) -> Path:
    """Pack `tree` (consumed) into out/<name>_<version>_<architecture>.deb. scripts: maintainer script -> its text."""
    control = tree / "DEBIAN"
    control.mkdir(parents=True)
    size = sum(file.stat().st_size for file in tree.rglob("*") if file.is_file() and not file.is_symlink()) // 1024
    needs = f"Depends: {', '.join(depends)}\n" if depends else ""
    (control / "control").write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: {architecture}\n"
        f"Maintainer: lab stand-in <nobody@localhost>\nInstalled-Size: {size}\n"
        f"Section: devel\nPriority: optional\n{needs}Description: {description}\n"
    )
    for script, text in (scripts or {}).items():
        (control / script).write_text(text)
        (control / script).chmod(0o755)
    package = out / f"{name}_{version}_{architecture}.deb"
    run("dpkg-deb", "--root-owner-group", "-Zzstd", "-z1", "-b", tree, package)
    shutil.rmtree(tree)
    return package
