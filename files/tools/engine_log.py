"""What the engine logs, without the API key; and which of the files that patches touch each process has loaded.

SGLang 0.5.12 to 0.5.23 log all of their arguments at start, the API key among them (entrypoints/engine.py,
`logger.info(f"{server_args=}")`), and SGLANG_LOGGING_CONFIG_PATH is the one way to change what it logs. The
configuration that is laid down names the Formatter below; it keeps the engine's own form, rank in front, and puts
[api key] for the key.

Every process of the engine reads that configuration, its schedulers before they load the attention kernels. That is
used to let each of them say, in <runtime directory>/modules/<pid>.json, which patched modules it runs: a patch in the
tree proves nothing about a process that may have read the file before, or another one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.machinery
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

HIDDEN = "[api key]"


class Formatter(logging.Formatter):
    """`[time rank] message`, as SGLang's configure_logger has it. modules: those whose loading is written down."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        super().__init__(f"[%(asctime)s{rank()}] %(message)s", "%Y-%m-%d %H:%M:%S")
        self.key = api_key()
        if modules:
            watch(modules)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text.replace(self.key, HIDDEN) if self.key else text


def rank(title: str | None = None) -> str:
    """ " PP2 TP0" in the scheduler that says so in its process title, "sglang::scheduler_PP2_TP0"; "" elsewhere."""
    if title is None:
        title = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    found = re.fullmatch(r"sglang::scheduler((?:_(?:ATTN_CP|MOE_DP|[A-Z]+)\d+)+)", title)
    return re.sub(r"_((?:ATTN_CP|MOE_DP|[A-Z]+)\d+)", r" \1", found[1]) if found else ""


def api_key() -> str:
    """The key that systemd handed to this service; "" outside of one."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    if not folder:
        return ""
    try:
        return Path(folder, "api-key").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# --- what this process has loaded ------------------------------------------------------------------------------------


def watch(modules: Sequence[str]) -> None:
    """Write down which of these modules this process has loaded, now and whenever it loads one.

    Never raises, and does nothing outside of a unit with a runtime directory: no engine may stop because of this.
    """
    folder = os.environ.get("RUNTIME_DIRECTORY")
    if not folder or any(isinstance(finder, Watch) for finder in sys.meta_path):
        return
    finder = Watch(modules, Path(folder, "modules", f"{os.getpid()}.json"))
    for name in modules:
        if name in sys.modules:
            finder.loaded[name] = evidence(sys.modules[name])
    finder.write()
    sys.meta_path.insert(0, finder)


class Watch(importlib.abc.MetaPathFinder):
    """Finds the modules as Python itself does, and looks at each once it has run."""

    def __init__(self, modules: Sequence[str], path: Path) -> None:
        self.path = path
        self.loaded: dict[str, dict[str, Any] | None] = dict.fromkeys(modules)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.loaded:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = Loader(spec.loader.name, spec.loader.path, self)
        return spec

    def write(self) -> None:
        """By rename, so that a reader finds all or nothing."""
        beside = self.path.with_suffix(".new")
        try:
            self.path.parent.mkdir(mode=0o755, exist_ok=True)
            beside.write_text(json.dumps({"pid": os.getpid(), "modules": self.loaded}), encoding="utf-8")
            beside.replace(self.path)
        except OSError as error:
            logging.getLogger("kimi-nodes").warning("%s: not written (%s)", self.path, error)


class Loader(importlib.machinery.SourceFileLoader):
    """Python's own loader of a source file, which then says what it has loaded."""

    def __init__(self, name: str, path: str, watch: Watch) -> None:
        super().__init__(name, path)
        self.watch = watch

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        found = self.watch.loaded[module.__name__] = evidence(module)
        self.watch.write()
        logging.getLogger("kimi-nodes").info("loaded %s, sha256 %s", found["file"], found["sha256"])


def evidence(module: ModuleType) -> dict[str, Any]:
    """{"file": path, "sha256": of its content now, "runs": whether the module's functions are that content's}.

    "runs" is found by compiling the file and comparing it with the code objects that this process holds.
    """
    file = str(getattr(module, "__file__", None))
    try:
        source = Path(file).read_bytes()
        compiled = compile(source, file, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        return {"file": file, "sha256": None, "runs": False}
    known = {(code.co_name, code.co_firstlineno): code for code in nested(compiled)}
    codes = [code for code in functions(module) if code.co_filename == file]
    runs = bool(codes) and all(known.get((code.co_name, code.co_firstlineno)) == code for code in codes)
    return {"file": file, "sha256": hashlib.sha256(source).hexdigest(), "runs": runs}


def nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from nested(constant)


def functions(module: ModuleType) -> Iterator[CodeType]:
    """The code of every function and method that a module defines."""
    holders = [module, *(each for each in vars(module).values() if inspect.isclass(each))]
    for holder in holders:
        if holder is not module and holder.__module__ != module.__name__:
            continue
        for value in vars(holder).values():
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            elif isinstance(value, property):
                value = value.fget
            elif isinstance(value, functools.cached_property):
                value = value.func
            value = inspect.unwrap(value) if callable(value) else value
            if inspect.isfunction(value):
                yield value.__code__
