"""Runs on the host: call the installed proof program, once a toolkit."""

from __future__ import annotations

import json
import sys
from typing import Any

from kit import on_host


def probe(program: str, toolkits: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Version -> what the program printed: see files/tools/toolkit_proof.py."""
    return {toolkit["version"]: _prove(program, toolkit) for toolkit in toolkits}


def _prove(program: str, toolkit: dict[str, Any]) -> dict[str, Any]:
    said = on_host.run([sys.executable, "-I", program, json.dumps(toolkit)], timeout=280)
    try:
        answer: dict[str, Any] = json.loads(said["out"])
    except ValueError:
        words = " ".join((said["err"] + said["out"]).split())[-400:]
        fix = "deploy again; node_tools lays it down"
        return {"proved": False, "problem": f"{program}: found {words}, wanted a proof. Fix: {fix}"}
    return answer
