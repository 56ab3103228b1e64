"""A throw-away pyinfra project for tests of kit: real deploy files, run by pyinfra's own command."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DEPLOY = "from kit import run\nfrom pyinfra import host\nrun.begin()\n"


@dataclass
class Run:
    """How a run of pyinfra ended. `text` is stdout and stderr together."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


@dataclass
class Project:
    """A folder with an inventory and deploy files."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def start(self, *arguments: str, inventory: str = "@local", deploy: str = "deploy.py") -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYINFRA_PROGRESS": "off",
            "NO_COLOR": "1",
            **self.environment,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "pyinfra", inventory, deploy, *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, inventory: str = "@local", deploy: str = "deploy.py") -> Run:
        with self.start(*arguments, inventory=inventory, deploy=deploy) as process:
            try:
                out, err = process.communicate(timeout=60)
            finally:
                process.kill()
        return Run(process.returncode, out, err)
