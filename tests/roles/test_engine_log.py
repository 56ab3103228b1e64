"""What a process of the engine says of the patched modules it has loaded: run for real, each case a process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "files" / "tools"

BACKEND = """
import functools

def plain(x):
    def inner(y):
        return y + 1
    return inner(x)

@functools.cache
def cached(x):
    return x

class Backend:
    def __init__(self, pool):
        self.width = pool.get(0)

    @property
    def size(self):
        return self.width

    @classmethod
    def make(cls):
        return cls({})
"""
EDITED = BACKEND.replace("pool.get(0)", "pool.get(pool.start)")
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"f": {"()": "engine_log.Formatter", "modules": ["package.backend", "package.other"]}},
    "handlers": {"h": {"class": "logging.StreamHandler", "formatter": "f"}},
    "root": {"level": "INFO", "handlers": ["h"]},
}


class Engine:
    """A process that sets up its logging as the engine does. before, after: Python, run around that."""

    def __init__(self, folder: Path) -> None:
        self.site, self.runtime = folder / "site", folder / "runtime"
        (self.site / "package").mkdir(parents=True)
        self.runtime.mkdir()
        (self.site / "package" / "__init__.py").touch()
        self.file = self.site / "package" / "backend.py"
        self.file.write_text(BACKEND)
        self.said = ""

    def run(self, before: str = "", after: str = "", **environment: str) -> dict[str, Any] | None:
        """What it has written; None where it has written nothing."""
        program = (
            f"import json, logging.config, os\nfrom pathlib import Path\nfile = Path({str(self.file)!r})\n"
            f"{textwrap.dedent(before)}\nlogging.config.dictConfig({LOGGING!r})\n{textwrap.dedent(after)}\n"
            f"print(os.getpid())\n"
        )
        given = {"RUNTIME_DIRECTORY": str(self.runtime), "PATH": os.environ["PATH"], **environment}
        given["PYTHONPATH"] = f"{self.site}:{TOOLS}"
        done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.said = done.stderr
        path = self.runtime / "modules" / f"{done.stdout.split()[-1]}.json"
        if not path.exists():
            return None
        modules: dict[str, Any] = json.loads(path.read_text())["modules"]
        return modules


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def seen(file: Path, source: str, runs: bool) -> dict[str, Any]:
    return {"file": str(file), "sha256": hashlib.sha256(source.encode()).hexdigest(), "runs": runs}


def test_a_module_loaded_later_is_told_with_its_file_and_its_digest(engine: Engine) -> None:
    said = engine.run(after="import package.backend")
    assert said == {"package.backend": seen(engine.file, BACKEND, True), "package.other": None}
    assert f"loaded {engine.file}, sha256 " in engine.said


def test_a_module_loaded_before_is_told_too(engine: Engine) -> None:
    assert engine.run(before="import package.backend") == {
        "package.backend": seen(engine.file, BACKEND, True),
        "package.other": None,
    }


def test_code_from_the_cache_of_compiled_files_is_the_files(engine: Engine) -> None:
    """The second process compiles nothing: what it runs comes from __pycache__."""
    engine.run(after="import package.backend")
    assert list(engine.file.parent.glob("__pycache__/backend.*.pyc"))
    said = engine.run(after="import package.backend")
    assert said and said["package.backend"] == seen(engine.file, BACKEND, True)


def test_nothing_loaded_is_said_as_such(engine: Engine) -> None:
    assert engine.run() == {"package.backend": None, "package.other": None}


def test_a_process_that_holds_another_content_than_the_file_s_is_found_out(engine: Engine) -> None:
    """Patched after it was loaded: the file is right and the process is not."""
    said = engine.run(before=f"import package.backend\nfile.write_text({EDITED!r})")
    assert said and said["package.backend"] == seen(engine.file, EDITED, False)


def test_a_stale_compiled_file_does_not_pass_for_the_source(engine: Engine) -> None:
    """Python trusts a compiled file by the source's size and time alone."""
    stale = BACKEND.replace("y + 1", "y + 2")
    engine.run(after="import package.backend")
    times = engine.file.stat()
    engine.file.write_text(stale)
    os.utime(engine.file, ns=(times.st_atime_ns, times.st_mtime_ns))
    said = engine.run(after="import package.backend\nassert package.backend.plain(1) == 2, 'not stale'")
    assert said and said["package.backend"] == seen(engine.file, stale, False)


def test_a_module_is_loaded_as_without_it(engine: Engine) -> None:
    engine.run(
        after="""
        import package.backend as backend
        assert backend.plain(1) == 2 and backend.Backend.make().size is None and backend.cached(3) == 3
        assert backend.__spec__.origin == backend.__file__ == str(file) and backend.__cached__
        """
    )


def test_the_engine_goes_on_where_nothing_can_be_written(engine: Engine) -> None:
    (engine.runtime / "modules").write_text("in the way")
    assert engine.run(after="import package.backend\nassert package.backend.plain(1) == 2") is None
    assert "not written" in engine.said


def test_outside_of_a_unit_nothing_is_written(engine: Engine) -> None:
    assert engine.run(after="import package.backend", RUNTIME_DIRECTORY="") is None
