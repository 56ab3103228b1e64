"""Batched facts: all that a role wants to know of a host in one command.

pyinfra has no cache of facts and runs one command for each, so a role of built-in facts costs dozens of round trips.
A Probe runs a whole Python source file on the host and gets one JSON object back.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pyinfra.api.command import StringCommand
from pyinfra.api.facts import FactBase

from kit.command import host
from kit.program import probe_command
from kit.refusal import Refusal, is_refused


class Sent:
    """The arguments of a probe, printed short: pyinfra shows a fact's arguments at -v."""

    def __init__(self, arguments: Mapping[str, Any]):
        self.arguments = dict(arguments)

    def __str__(self) -> str:
        return ",".join(sorted(self.arguments)) or "none"


class Malformed:
    """An answer that is not a probe's; `Probe.read` turns it into this host's Refusal."""

    def __init__(self, problem: str):
        self.problem = problem


class Probe(FactBase[Any]):
    """A fact read by a Python program on the host. A subclass names the program:

        class ToolkitFacts(Probe):
            program = "probe.py"      # beside the subclass's own file; has `def probe(**arguments)` -> JSON-able
            timeout = 60              # seconds

    Read it with `ToolkitFacts.read(paths=[...])`, in a role or in an operation. Never give a secret as an argument:
    arguments stand in the process list.
    """

    program: ClassVar[str] = "probe.py"
    timeout: ClassVar[int] = 120

    def command(self, sent: Sent) -> StringCommand:
        return probe_command(self.source(), sent.arguments)

    @classmethod
    def source(cls) -> Path:
        """The file of the program, beside the module that defines the subclass."""
        return Path(str(sys.modules[cls.__module__].__file__)).parent / cls.program

    def process(self, output: list[str]) -> Any:
        lines = [line for line in output if line.strip()]
        shown = lines[-1][:200] if lines else "nothing"
        try:
            answer = json.loads(lines[-1])
        except (IndexError, ValueError):
            answer = None
        if not isinstance(answer, dict) or len(answer) != 1:
            return Malformed(f"printed {shown!r}, wanted one JSON object. Fix: see the output with -vvv")
        if "problem" in answer:
            return Malformed(str(answer["problem"]))
        if "traceback" in answer:
            lines = answer["traceback"].strip().splitlines()
            where = next((line.strip() for line in reversed(lines) if line.startswith("  File")), "")
            return Malformed(f"failed on this host: {lines[-1]} ({where}). Fix: see the output with -vvv")
        if "found" not in answer:
            return Malformed(f"printed {shown!r}, wanted one JSON object. Fix: see the output with -vvv")
        return answer["found"]

    @classmethod
    def read(cls, **arguments: Any) -> Any:
        """What the program's `probe(**arguments)` returns on the current host.

        Raises Refusal where python3 is missing or too old, the program fails, or its answer is not JSON.
        """
        current = host()
        found = current.get_fact(cls, sent=Sent(arguments), _timeout=cls.timeout)
        if isinstance(found, Malformed):
            raise Refusal(f"{cls.__module__}.{cls.__name__}: {found.problem}")
        if is_refused(current):
            raise Refusal([])  # pyinfra has printed why: no connection, out of time, no sudo
        if found is None:
            raise Refusal(f"{cls.__module__}.{cls.__name__}: printed nothing, wanted one JSON object. Fix: see -vvv")
        return found
