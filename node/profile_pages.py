"""What docs/profiles says of a profile's arguments and memory, made of the plan: python -m node.profile_pages PROFILE

The pages hold this text between two marks, and a test compares them, so that neither can change alone.
"""

from __future__ import annotations

import sys
from typing import Any

from node import memory, models
from node.hardware import GPU_MODELS, expected
from node.manifest import File, Manifest
from node.models import DRAFTERS, MODELS
from node.plan import Plan, make
from node.profiles import PROFILES, Profile
from node.releases import DEFAULT_RELEASE

BEGIN, END = "<!-- made by python -m node.profile_pages -->", "<!-- end of what is made -->"
KINDS = {"8 x RTX PRO 6000": "rtx-pro-6000-blackwell-server", "8 x B300": "b300"}
_MODEL = MODELS["kimi-k2.6"]
_PIN = "0" * 40  # where the owner must give one


def planned(profile: str, gpu: str) -> Plan:
    """The Plan of a node with eight of these GPUs and all other keys as they are by default."""

    def read(path: str) -> bytes:
        entries: list[models.Model | models.Drafter] = [*MODELS.values(), *DRAFTERS.values()]
        for entry in entries:
            if path == f"files/manifests/{entry.key}.json":
                file = File("config.json", 1, _PIN + "0" * 24)
                return Manifest(entry.repository, entry.revision or _PIN, (file,)).dumps().encode()
        return b""

    data: dict[str, Any] = {"gpu": gpu, "gpu_count": 8, "weights_directory": "/srv/weights", "profile": profile}
    if PROFILES[profile].speculative == "dflash":
        data["drafter_revision"] = _PIN
    made = make("node", data, read, None)
    if not isinstance(made, Plan):
        raise ValueError("; ".join(map(str, made)))
    return made


def options(plan: Plan) -> dict[str, str]:
    """Option -> its value, "" for a bare flag; the weights by what they are, as their path says nothing more."""
    paths = {part.paths.snapshot: f"*{part.role}*" for part in plan.weights}
    words = plan.service.arguments[3:]
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            found[word] = ""
        else:
            found[list(found)[-1]] = paths.get(word, word)
    return found


def arguments_table(profile: str) -> list[str]:
    """The server's arguments on both kinds of node, a row an option."""
    made = {kind: options(planned(profile, gpu)) for kind, gpu in KINDS.items()}
    lines = [f"| option | {' | '.join(made)} |", "| --- | --- | --- |"]
    names = list(dict.fromkeys(name for found in made.values() for name in found))
    for name in names:
        values = [found.get(name) for found in made.values()]
        shown = ["" if value is None else value or "yes" for value in values]
        lines.append(f"| `{name}` | {shown[0]} | {shown[1]} |")
    return lines


def environment_line(profile: str) -> str:
    """What is set for NCCL and gloo, on both kinds of node."""
    made = {
        kind: {k: v for k, v in planned(profile, gpu).service.environment.items() if k.startswith(("NCCL_", "GLOO_"))}
        for kind, gpu in KINDS.items()
    }
    shown = {kind: ", ".join(f"`{k}={v}`" for k, v in found.items()) for kind, found in made.items()}
    if len(set(shown.values())) == 1:
        return f"Environment for NCCL and gloo on both: {next(iter(shown.values()))}."
    return "Environment for NCCL and gloo: " + "; ".join(f"{kind} {text}" for kind, text in shown.items()) + "."


def _span(values: list[float], form: str) -> str:
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def memory_table(profile: Profile) -> list[str]:
    """GiB a GPU, and tokens, of the profile with and without CUDA graphs, on both kinds of node."""
    architecture = _MODEL.architecture
    assert architecture is not None
    drafter = DRAFTERS[_MODEL.drafters[0]] if profile.speculative == "dflash" else None
    lines = [
        "| node | profile | memory | fraction | weights | left free | KV cache | tokens, bfloat16 | tokens, fp8 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, gpu in KINDS.items():
        mib = [each.memory_mib or GPU_MODELS[gpu].memory_mib for each in expected(gpu, 8).gpus]
        for name in (profile.name, f"{profile.name}-eager"):
            half = memory.fit(architecture, PROFILES[name], mib, drafter=drafter)
            eighth = memory.fit(architecture, PROFILES[name], mib, "fp8_e4m3", drafter)
            columns = [
                f"{half.gpus[0].memory / memory.GIB:.1f}",
                f"{half.memory_fraction:.2f}",
                _span([each.weights / memory.GIB for each in half.gpus], ".1f"),
                _span([each.reserve / memory.GIB for each in half.gpus], ".1f"),
                _span([each.kv_cache / memory.GIB for each in half.gpus], ".1f"),
                f"{half.tokens:,}",
                f"{eighth.tokens:,}",
            ]
            lines.append(f"| {kind} | `{name}` | " + " | ".join(columns) + " |")
    return lines


def made(name: str) -> str:
    """What stands between the marks on a profile's page."""
    profile = PROFILES[name]
    return "\n".join(
        [
            BEGIN,
            f"Arguments with {DEFAULT_RELEASE} and every other key as it is by default; `{name}-eager` adds "
            "`--disable-cuda-graph`, has no `--cuda-graph-max-bs` and another `--mem-fraction-static`:",
            "",
            *arguments_table(name),
            "",
            environment_line(name),
            "",
            "Memory of each GPU in GiB, as `node/memory.py` plans it (computed, not measured); the GPU with the fewest "
            "tokens decides:",
            "",
            *memory_table(profile),
            END,
        ]
    )


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(made(argument))
