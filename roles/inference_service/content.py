"""What is laid down for the service, made of the Plan. Pure, but for reading the templates."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from kit import files, templates
from node import kernels, layout, systemd
from node.patches import Patch
from node.plan import Plan
from node.profiles import PROFILES
from node.questions import COPY, Question

STARTS = 3  # within the time of as many of the longest starts; then systemd gives up
RESTART_AND_STOP_SECONDS = 150  # RestartSec= and TimeoutStopSec= of the unit
DECIDE_WHAT_IS_COMPILED = ("CUDA_HOME", "FLASHINFER_WORKSPACE_BASE", "FLASHINFER_CUDA_ARCH_LIST")
PROBE_MARGIN_SECONDS = 10  # the probe gives up first: it says more than systemd does


NOT_PUBLIC = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/3", "::/3", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "4000::/2", "8000::/1",
)  # fmt: skip
"""Networks that are not the public internet's, by IANA's registries of special addresses. Of IPv6 only 2000::/3 is,
less what tunnels to IPv4 addresses (2002::/16, and 2001::/32 within 2001::/23) or is for documents."""

FIREWALL_SEEN = {
    "listed": f"{{ sha256sum {layout.FIREWALL} && /usr/sbin/nft --stateless list table {layout.FIREWALL_TABLE}; }}",
    "loaded": layout.FIREWALL_LOADED,
}
"""A command that tells the firewall's file and rules, and what it said when they were loaded."""


def render(name: str, plan: Plan) -> str:
    """A template, for a Plan. Raises jinja2.UndefinedError for a name in it that means nothing."""
    values = {
        "plan": plan,
        "paths": plan.service_paths,
        "snapshots": [part.paths.snapshot for part in plan.weights],
        "user": layout.SERVICE_USER,
        "tools": layout.TOOLS,
        "api_key": layout.API_KEY,
        "api_key_configuration": layout.API_KEY_CONFIGURATION,
        "firewall": layout.FIREWALL,
        "firewall_unit": layout.FIREWALL_UNIT,
        "firewall_table": layout.FIREWALL_TABLE,
        "firewall_loaded": layout.FIREWALL_LOADED,
        "remember": systemd.command_line(["/bin/sh", "-c", f"{FIREWALL_SEEN['listed']} > {layout.FIREWALL_LOADED}"]),
        "not_public": NOT_PUBLIC,
        "cubins_unit": layout.CUBINS_UNIT,
        "cubins_agent": layout.CUBINS_AGENT,
        "cubins_configuration": layout.CUBINS_CONFIGURATION,
        "cubins_runtime": layout.CUBINS_RUNTIME.rpartition("/")[2],
        "fetches": layout.WEIGHTS_USER,
        "machine_environment": layout.MACHINE_ENVIRONMENT,
        "start_limit_seconds": STARTS * longest_start(plan),
    }
    return templates.render(name, values, filters=[systemd.command_line])


def wanted(plan: Plan) -> list[files.Item]:
    """Files and folders of the service, its key apart."""
    paths = plan.service_paths
    return [
        *cache_folders(plan),
        files.File(layout.ENGINE_LOGGING, _json(engine_logging(plan))),
        files.File(paths.environment, systemd.environment_file(plan.service.environment)),
        files.File(paths.readiness, _json(readiness(plan))),
        *([files.File(paths.gpu_memory, _json(gpu_memory(plan)))] if plan.service.gpu_memory else []),
        files.File(paths.warmup, _json(warmup(plan))),
        files.File(layout.FIREWALL, render("firewall.nft.j2", plan)),
        files.File(f"{layout.UNITS}/{layout.FIREWALL_UNIT}", render("firewall.service.j2", plan)),
        *cubins_files(plan),
        files.File(paths.warmup_unit_file, render("warmup.service.j2", plan)),
        files.File(paths.unit_file, render("sglang.service.j2", plan)),
    ]


def cache_folders(plan: Plan) -> list[files.Item]:
    """The release's cache, the server's own. Kernels that NVIDIA ships compiled lie in it too, but are another user's:
    that of weights, which reaches the network. The server reads them, and may put its own files beside them (a link to
    headers, which FlashInfer makes): no more, which is what the sticky bit is for."""
    server = layout.SERVICE_USER
    if plan.cubins is None:
        return [files.Directory(plan.paths.cache, mode="700", user=server, group=server)]
    return [
        files.Directory(plan.paths.cache, mode="710", user=server, group=layout.WEIGHTS_USER),
        files.Directory(plan.cubins.directory, mode="1775", user=layout.WEIGHTS_USER, group=server),
    ]


def cubins_files(plan: Plan) -> list[files.Item]:
    """The unit that fetches them, where it is needed."""
    unit_file = f"{layout.UNITS}/{layout.CUBINS_UNIT}"
    if plan.cubins is None:
        return [files.Absent(unit_file), files.Absent(layout.CUBINS_CONFIGURATION)]
    return [
        files.File(layout.CUBINS_CONFIGURATION, _json(cubins(plan))),
        files.File(unit_file, render("kimi-cubins.service.j2", plan)),
    ]


def cubins(plan: Plan) -> dict[str, Any]:
    """What files/tools/cubins.py fetches."""
    assert plan.cubins is not None
    return {
        "release": plan.paths.digest,
        "flashinfer": plan.release.flashinfer,
        "groups": list(kernels.CUBIN_GROUPS),
        "repository": plan.cubins.repository,
        "directory": plan.cubins.directory,
        "receipt": plan.paths.cubins_receipt,
        "problem": f"{plan.cubins.directory}/problem.txt",
        "lock": f"{plan.cubins.directory}/.lock",
        "bytes": kernels.CUBIN_BYTES,
    }


def readiness(plan: Plan) -> dict[str, Any]:
    """What files/tools/ready_probe.py asks."""
    service = plan.service
    return {
        "address": f"http://{service.host}:{service.port}",
        "key": layout.API_KEY,
        "user": layout.SERVICE_USER,
        "copy": COPY,
        "questions": [asked(question, service.name) for question in service.questions],
        "seconds": service.start_timeout - PROBE_MARGIN_SECONDS,
    }


def asked(question: Question, model: str) -> dict[str, Any]:
    """A question as ready_probe.py takes it. model: its served name."""
    right = (
        {"call": {"name": question.function.name, "arguments": question.arguments}}
        if question.function
        else {"expected": question.expected}
    )
    return {"name": question.name, "body": question.body(model), "times": question.times, **right}


def gpu_memory(plan: Plan) -> dict[str, Any]:
    """What files/tools/gpu_memory_free.py waits for."""
    service = plan.service
    gpus = {str(index): mib for index, mib in service.gpu_memory.items()}
    return {"gpus": gpus, "user": layout.SERVICE_USER, "seconds": service.gpu_memory_timeout}


def longest_start(plan: Plan) -> int:
    """Seconds from one start of the unit to the next, at most: stop, GPU memory, load and answer, and the pause."""
    service = plan.service
    return service.start_timeout + RESTART_AND_STOP_SECONDS + (service.gpu_memory_timeout if service.gpu_memory else 0)


def warmup(plan: Plan) -> dict[str, Any]:
    """What files/tools/jit_warmup.py compiles. Raises ValueError for a node of several architectures."""
    (architecture,) = plan.service.architectures
    fetched = None
    if plan.cubins is not None:
        fetched = {name: cubins(plan)[name] for name in ("receipt", "problem", "lock")}
        fetched |= {"status": f"{layout.CUBINS_RUNTIME}/status.json", "unit": layout.CUBINS_UNIT}
    return {
        "release": plan.paths.digest,
        "architecture": architecture,
        "environment": {name: plan.service.environment[name] for name in DECIDE_WHAT_IS_COMPILED},
        "modules": [dataclasses.asdict(call) | {"arguments": list(call.arguments)} for call in plan.service.modules],
        "cubins": fetched,
        "library": plan.paths.cache,
        "receipt": plan.paths.warmup_receipt,
        "nvcc": plan.toolkit.nvcc,
    }


def engine_logging(plan: Plan) -> dict[str, Any]:
    """SGLang's logging (logging.config.dictConfig): as it is by default, through files/tools/engine_log.py, which also
    writes down which of the modules that patches may touch are loaded."""
    quiet = {name: {"level": "WARNING"} for name in ("httpx", "httpcore")}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"without key": {"()": "engine_log.Formatter", "modules": sorted(patched_modules(plan))}},
        "handlers": {"journal": {"class": "logging.StreamHandler", "formatter": "without key"}},
        "root": {"level": "INFO", "handlers": ["journal"]},
        "loggers": {**quiet, "flashinfer.jit": {"level": "ERROR"}},
    }


def other_services(plan: Plan) -> list[layout.ServicePaths]:
    """The services of every other profile, of which at most one has been deployed before."""
    return [layout.ServicePaths(name) for name in sorted(PROFILES) if name != plan.profile.name]


def patched_modules(plan: Plan) -> dict[str, Patch]:
    """Module as Python names it -> the patch whose file it is."""
    return {patch.module: patch for patch in plan.patches if patch.module}


def patched_files(plan: Plan) -> list[str]:
    """Files of the release that patches change: a running server has read them at its start."""
    return [f"{plan.site_packages}/{patch.file}" for patch in plan.patches]


def key_files(key: str) -> list[files.File]:
    """The API key, for clients and for the server."""
    return [
        files.File(layout.API_KEY, key + "\n", mode="600", secret=True),
        # JSON is YAML; the key is the server's option of that name (sglang/srt/server_args_config_parser.py).
        files.File(layout.API_KEY_CONFIGURATION, json.dumps({"api-key": key}) + "\n", mode="600", secret=True),
    ]


def key_problem(key: str) -> str | None:
    """Why a text cannot be an API key, None if it can."""
    if not 16 <= len(key) <= 512:
        return f"{len(key)} characters, wanted 16 to 512"
    if key.startswith("-"):
        return "a dash in front, which SGLang's argument parser takes for a flag"
    if any(not 33 <= ord(character) <= 126 for character in key):
        return "spaces or characters outside of ASCII, which no HTTP header carries"
    return None


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
