"""Inventory data and what was observed of a host, in; a Plan or Problems, out. The Plan is the only thing that flows.

    plan = make("gpu-1", data, read_file, observed)

Roles bring a host to the Plan, tests/host prove the host against it, node.render shows it with no host at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from node import edge as edge_module
from node import hardware as hardware_module
from node import inventory, kernels, memory, systems, tools
from node import sharing as sharing_module
from node.edge import Edge
from node.hardware import Hardware
from node.layout import ENGINE_LOGGING, TOOLS, ReleasePaths, ServicePaths, WeightsPaths
from node.lock import distributions
from node.manifest import Manifest, loads
from node.models import DRAFTERS, MODELS, Drafter, Model
from node.patches import PATCHES, Patch, bears_load
from node.problems import Malformed, Problem
from node.profiles import BACKENDS, INTERCONNECT_ENVIRONMENT, PROFILES, Profile
from node.questions import Question, within
from node.releases import RELEASES, Release, digest
from node.sharing import Neighbour, Sharing
from node.systems import System
from node.toolkits import REPOSITORY_KEYS, TOOLKITS, Toolkit
from node.tools import Tools

ReadFile = Callable[[str], bytes]
"""Reads a file of the controller, relative to the project; raises OSError."""


@dataclass(frozen=True)
class Observed:
    """What a host told of itself."""

    system: System
    hardware: Hardware


@dataclass(frozen=True)
class Repository:
    """NVIDIA's apt repository for the host's system: the folder's address, its key's file name and fingerprint."""

    address: str
    key_file: str
    fingerprint: str


@dataclass(frozen=True)
class Weights:
    """One repository's weights. role: "model" or "drafter". hub_token: the repository is gated or a token is given."""

    role: str
    manifest: Manifest
    paths: WeightsPaths
    hub: str
    hub_token_file: str | None
    gated: bool


@dataclass(frozen=True)
class Service:
    """The server as systemd runs it.

    unit: its name; conflicts: the units of every other profile. arguments: the whole argument vector but the key file,
    which the unit adds from its credentials. environment: all that the process is given. architectures: FlashInfer's
    names of the GPU architectures to warm, e.g. ("12.0f",). modules: what is compiled for them before it starts.
    questions: what readiness asks. start_timeout: seconds.
    gpu_memory: MiB that each GPU of the profile must have free before a start, by its index; empty without GPUs.
    gpu_memory_timeout: seconds to wait for that. fetch_media: "none" or "public", what it may fetch for its clients.
    """

    unit: str
    conflicts: tuple[str, ...]
    name: str
    host: str
    port: int
    nccl_port: int
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    architectures: tuple[str, ...]
    modules: tuple[kernels.Call, ...]
    questions: tuple[Question, ...]
    start_timeout: int
    gpu_memory: Mapping[int, int]
    gpu_memory_timeout: int
    fetch_media: str
    api_key_file: str | None


@dataclass(frozen=True)
class Cubins:
    """Kernels that NVIDIA ships compiled, and FlashInfer fetches at first use unless they lie there before.

    repository: where they come from, an address that ends in a slash; "" for FlashInfer's own, which is NVIDIA's.
    directory: where they lie on the host (FLASHINFER_CUBIN_DIR).
    """

    repository: str
    directory: str


@dataclass(frozen=True)
class Plan:
    """All that is decided about one host."""

    host: str
    system: System
    hardware: Hardware
    tools: Tools
    release: Release
    lock: bytes
    toolkit: Toolkit
    toolkits_beside: tuple[Toolkit, ...]
    repository: Repository
    paths: ReleasePaths
    patches: tuple[Patch, ...]
    profile: Profile
    model: Model
    drafter: Drafter | None
    weights: tuple[Weights, ...]
    sharing: Sharing | None
    fit: memory.Fit | None
    service: Service
    cubins: Cubins | None
    edge: Edge | None

    @property
    def site_packages(self) -> str:
        """Where the release's distributions lie."""
        return f"{self.paths.environment}/lib/python{self.system.python}/site-packages"

    @property
    def distributions(self) -> dict[str, str]:
        """Distribution -> version that the release consists of on this host."""
        return distributions(self.lock, self.system.python)

    @property
    def warnings(self) -> list[Problem]:
        """What is short of good on the host and no reason to refuse it."""
        return hardware_module.driver_advice(self.hardware, self.release.driver_recommended)

    @property
    def service_paths(self) -> ServicePaths:
        return ServicePaths(self.profile.name)


def declared_hardware(data: Mapping[str, Any]) -> Hardware | None:
    """The machine that the inventory says it is, or None when it does not say so rightly."""
    gpu, count = data.get("gpu"), data.get("gpu_count")
    if gpu in hardware_module.GPU_MODELS and isinstance(count, int) and not isinstance(count, bool) and count > 0:
        return hardware_module.expected(str(gpu), count)
    return None


def make(
    host: str,
    data: Mapping[str, Any],
    read_file: ReadFile,
    observed: Observed | None,
    system: System | None = None,
    neighbours: Sequence[Neighbour] = (),
) -> Plan | list[Problem]:
    """Decide everything about a host, or say all that is wrong.

    host: its name, for the Plan. data: its inventory data. read_file: for lock and manifests. observed: what the host
    said of itself, or None to plan for the machine that the inventory declares, with `system` (default: Debian 12).
    neighbours: every host of its inventory, in order, this one among them; without them it shares weights with nobody.
    """
    values, problems = inventory.read(data)
    declared = declared_hardware(data)
    if problems or declared is None:
        return problems
    release, profile, model = RELEASES[values["release"]], PROFILES[values["profile"]], MODELS[values["model"]]
    toolkit = release.toolkit
    host_system = observed.system if observed else system or systems.SYSTEMS[0].as_system()
    problems += systems.problems(host_system)
    if observed:
        problems += hardware_module.disagreements(observed.hardware, declared, release.driver_floor)
    problems += _software_problems(release, toolkit, tuple(TOOLKITS[v] for v in values["toolkits_beside"]), host_system)
    problems += _layout_problems(values, profile, model, declared)
    edge, more = edge_module.make(values, host_system)
    problems += more
    drafter, more = _drafter(values, profile, model)
    problems += more
    weights, more = _weights(values, model, drafter, read_file)
    problems += more
    sharing, more = sharing_module.make(host, values, neighbours)
    problems += more
    problems += _port_problems(values, sharing)
    lock, more = _lock(release.name, release.lock, read_file)
    problems += more
    tools_lock, more = _lock("tools", tools.LOCK, read_file)
    problems += more
    machine = observed.hardware if observed else declared
    if problems:
        return problems

    fit = None
    if model.architecture:
        memory_mib = [gpu.memory_mib or declared.gpus[0].memory_mib or 0 for gpu in machine.gpus]
        fit = memory.fit(
            model.architecture,
            profile,
            memory_mib,
            values["kv_cache_dtype"],
            drafter,
            values["memory_fraction"],
            values["max_running_requests"],
        )
        problems = memory.problems(fit, profile, values["context_length"], values["memory_fraction"])
        if problems:
            return problems

    patches = tuple(PATCHES[name] for name in release.patches)
    patched = [
        (patch.id, patch.digests[version].after)
        for patch in patches
        if bears_load(patch, version := release.pins[patch.package], toolkit.nvcc)[0]
    ]
    paths = ReleasePaths(digest(release, lock, patched, toolkit.version, host_system.python))
    return Plan(
        host=host,
        system=host_system,
        hardware=machine,
        tools=Tools(tools_lock, host_system.python),
        release=release,
        lock=lock,
        toolkit=toolkit,
        toolkits_beside=tuple(TOOLKITS[v] for v in values["toolkits_beside"] if v != toolkit.version),
        repository=_repository(values, host_system),
        paths=paths,
        patches=patches,
        profile=profile,
        model=model,
        drafter=drafter,
        weights=weights,
        sharing=sharing,
        fit=fit,
        service=_service(values, release, toolkit, profile, model, drafter, weights, paths, declared, fit),
        cubins=_cubins(values, release, model, paths),
        edge=edge,
    )


def _software_problems(
    release: Release, toolkit: Toolkit, beside: tuple[Toolkit, ...], system: System
) -> list[Problem]:
    problems = []
    if system.python not in release.pythons:
        problems.append(
            Problem(
                f"Python of release {release.name}",
                f"Python {system.python} on {system.distribution} {system.version}",
                "Python " + ", ".join(release.pythons),
                "choose a release that has wheels for it, or a newer system",
            )
        )
    for kit in (toolkit, *beside):
        if kit.max_glibc and Version(system.glibc) > Version(kit.max_glibc):
            problems.append(
                Problem(
                    f"CUDA toolkit {kit.version}",
                    f"glibc {system.glibc}, whose <math.h> contradicts this toolkit's headers",
                    f"glibc {kit.max_glibc} or older",
                    "take it out of toolkits_beside" if kit is not toolkit else "use an older system for this release",
                )
            )
    return problems


def _layout_problems(values: dict[str, Any], profile: Profile, model: Model, declared: Hardware) -> list[Problem]:
    problems = []
    count = len(declared.gpus)
    if profile.device != model.device:
        problems.append(
            Problem(
                f"profile {profile.name}",
                f"a profile for {profile.device} with model {model.key}",
                f"a profile for {model.device}",
                "choose profile "
                + " or ".join(sorted(name for name, other in PROFILES.items() if other.device == model.device)),
            )
        )
    if profile.gpus > count:
        smaller = [name for name, other in PROFILES.items() if other.device == model.device and other.gpus <= count]
        problems.append(
            Problem(
                f"profile {profile.name}",
                f"{count} GPUs",
                f"{profile.gpus} GPUs (tensor {profile.tensor_parallel} x pipeline {profile.pipeline_parallel})",
                "mend gpu_count" + ("".join(f", or choose profile {name}" for name in smaller[:1])),
            )
        )
    speculative = values["speculative"] or profile.speculative
    if speculative != "none" and profile.pipeline_parallel > 1:
        problems.append(
            Problem(
                f"profile {profile.name}",
                f"speculative {speculative} with {profile.pipeline_parallel} pipeline stages",
                "no drafting in a pipeline: every SGLang release up to 0.5.23 asserts pp_size == 1 for it",
                "remove speculative, or choose profile ep8-dflash",
            )
        )
    if speculative == "ddtree":
        problems.append(
            Problem(
                "inventory key speculative",
                "ddtree",
                "dflash or none: no SGLang release has DDTree (its pull request 29907 is open)",
                "set speculative to dflash",
            )
        )
    compute = declared.gpus[0].compute_capability
    if model.device == "cuda" and compute not in BACKENDS:
        problems.append(
            Problem(
                "attention backend", f"compute capability {compute}", ", ".join(BACKENDS), "add it to node/profiles.py"
            )
        )
    if values["context_length"] and values["context_length"] > model.context_tokens:
        problems.append(
            Problem(
                "inventory key context_length",
                f"{values['context_length']}, and SGLang does not start with more than the model was made for",
                f"at most {model.context_tokens} tokens",
                "lower or remove context_length",
            )
        )
    return problems


def _port_problems(values: dict[str, Any], sharing: Sharing | None) -> list[Problem]:
    """Two of ours at one port: the second to start would find it taken."""
    used = [("port", "", values["port"]), ("nccl_port", "", values["nccl_port"])]
    if sharing:
        used += [("weights_port", "", sharing.port), ("weights_port", "the one after ", sharing.port + 1)]
    if values["edge_name"]:
        used.append(("edge_port", "", values["edge_port"]))
    problems = []
    for number, (key, after, port) in enumerate(used):
        for other, other_after, taken in used[:number]:
            if port == taken:
                found = (
                    f"{port - 1}, and {port} after it is {other}" if after else f"{port}, which is {other_after}{other}"
                )
                problems.append(Problem(f"inventory key {key}", f"{found} too", "a port of its own", f"change {key}"))
    return problems


def _drafter(values: dict[str, Any], profile: Profile, model: Model) -> tuple[Drafter | None, list[Problem]]:
    speculative = values["speculative"] or profile.speculative
    named = values["drafter"]
    if profile.pipeline_parallel > 1 and speculative != "none":
        return None, []  # that is the problem
    if speculative != "dflash":
        if named:
            return None, [
                Problem(
                    "inventory key drafter",
                    f"{named} with profile {profile.name}, which does not draft",
                    "a drafter only where there is drafting",
                    "choose profile ep8-dflash, or remove drafter",
                )
            ]
        return None, []
    key = named or next(iter(model.drafters), None)
    if key is None or key not in model.drafters:
        return None, [
            Problem(
                "inventory key drafter",
                f"{key or 'nothing'} for model {model.key}",
                "a drafter made for it: " + (", ".join(model.drafters) or "there is none"),
                "change drafter, or choose a profile without drafting",
            )
        ]
    return DRAFTERS[key], []


def _weights(
    values: dict[str, Any], model: Model, drafter: Drafter | None, read_file: ReadFile
) -> tuple[tuple[Weights, ...], list[Problem]]:
    wanted: list[tuple[str, Model | Drafter, str | None, str | None]] = [
        ("model", model, values["revision"], values["manifest"])
    ]
    if drafter:
        wanted.append(("drafter", drafter, values["drafter_revision"], values["drafter_manifest"]))
    weights, problems = [], []
    for role, entry, given_revision, given_manifest in wanted:
        prefix = "" if role == "model" else "drafter_"
        revision = given_revision or entry.revision
        gated = isinstance(entry, Drafter) and entry.gated
        path = given_manifest or f"files/manifests/{entry.key}.json"
        if revision is None:
            problems.append(
                Problem(
                    f"inventory key {prefix}revision",
                    "nothing, and no public pin of this repository is known",
                    f"the commit of {entry.repository} to serve, 40 hex digits",
                    f"bin/pin {entry.key} shows the newest one and writes its manifest",
                )
            )
            continue
        if gated and not values["hub_token_file"]:
            problems.append(
                Problem(
                    "inventory key hub_token_file",
                    f"nothing, and {entry.repository} is gated",
                    "a file with a hub token that its owners let in",
                    "ask for access on the hub, then set hub_token_file",
                )
            )
        try:
            manifest = loads(read_file(path))
        except OSError:
            problems.append(
                Problem(
                    f"manifest of {entry.key}",
                    f"no file {path}",
                    f"the manifest of {entry.repository} at {revision}",
                    f"bin/pin {entry.key} --revision {revision}",
                )
            )
            continue
        except Malformed as error:
            problems.append(
                Problem(
                    f"manifest of {entry.key}",
                    f"{path}, in which {error}",
                    "a manifest as bin/pin writes it",
                    f"bin/pin {entry.key} --revision {revision}",
                )
            )
            continue
        if (manifest.repository, manifest.revision) != (entry.repository, revision):
            problems.append(
                Problem(
                    f"manifest {path}",
                    f"{manifest.repository} at {manifest.revision}",
                    f"{entry.repository} at {revision}",
                    f"bin/pin {entry.key} --revision {revision}",
                )
            )
            continue
        paths = WeightsPaths(values["weights_directory"], manifest.repository, manifest.revision)
        weights.append(Weights(role, manifest, paths, values["hub"], values["hub_token_file"], gated))
    return tuple(weights), problems


def _lock(name: str, path: str, read_file: ReadFile) -> tuple[bytes, list[Problem]]:
    try:
        return read_file(path), []
    except OSError as error:
        return b"", [Problem(f"lock of {name}", str(error), path, f"bin/lock {name}")]


def _repository(values: dict[str, Any], system: System) -> Repository:
    key = REPOSITORY_KEYS[system.repository]
    return Repository(
        address=f"{values['cuda_repository'].rstrip('/')}/{system.repository}/x86_64",
        key_file=values["cuda_repository_key"] or key.file,
        fingerprint=values["cuda_repository_fingerprint"] or key.fingerprint,
    )


def _service(
    values: dict[str, Any],
    release: Release,
    toolkit: Toolkit,
    profile: Profile,
    model: Model,
    drafter: Drafter | None,
    weights: tuple[Weights, ...],
    paths: ReleasePaths,
    declared: Hardware,
    fit: memory.Fit | None,
) -> Service:
    gpu = hardware_module.GPU_MODELS[values["gpu"]]
    snapshot = {part.role: part.paths.snapshot for part in weights}
    name = values["served_model_name"] or model.key
    options: dict[str, Any] = {
        "model_path": snapshot["model"],
        "served_model_name": name,
        "host": "127.0.0.1",
        "port": values["port"],
        "nccl_port": values["nccl_port"],
        "trust_remote_code": model.trust_remote_code,
        "tool_call_parser": model.tool_call_parser,
        "reasoning_parser": model.reasoning_parser,
        "enable_metrics": True,
        "enable_cache_report": True,
        "tensor_parallel": profile.tensor_parallel,
        "pipeline_parallel": profile.pipeline_parallel,
        "expert_parallel": profile.expert_parallel,
        "context_length": values["context_length"],
        "max_running_requests": values["max_running_requests"],
    }
    if profile.device == "cuda":
        backends = BACKENDS[gpu.compute_capability]
        options |= {
            "attention_backend": backends.attention,
            "kv_cache_dtype": values["kv_cache_dtype"],
            "memory_fraction": fit.memory_fraction if fit else values["memory_fraction"],
            "disable_cuda_graph": not profile.cuda_graphs,
            "cuda_graph_max_bs": (fit.graph_batch or None) if fit else None,
        }
        if drafter:
            options |= {
                "speculative_algorithm": drafter.algorithm.upper(),
                "speculative_draft_model_path": snapshot["drafter"],
                "speculative_num_draft_tokens": drafter.block_size,
                "speculative_draft_attention_backend": backends.draft_attention,
            }
    options |= profile.options
    return Service(
        unit=ServicePaths(profile.name).unit,
        conflicts=tuple(ServicePaths(other).unit for other in sorted(PROFILES) if other != profile.name),
        name=name,
        host="127.0.0.1",
        port=values["port"],
        nccl_port=values["nccl_port"],
        arguments=(paths.python, "-m", "sglang.launch_server", *release.arguments(options)),
        environment=_environment(release, toolkit, paths, profile, declared, gpu.flashinfer_architecture),
        architectures=(gpu.flashinfer_architecture,),
        modules=kernels.modules(release, gpu.compute_capability, model, values["kv_cache_dtype"]),
        questions=within(model.questions, values["context_length"] or model.context_tokens),
        start_timeout=values["start_timeout"],
        gpu_memory=memory.wanted_free(fit) if fit else {},
        gpu_memory_timeout=memory.wait_seconds(values["start_timeout"]),
        fetch_media=values["fetch_media"],
        api_key_file=values["api_key_file"],
    )


def _cubins(values: dict[str, Any], release: Release, model: Model, paths: ReleasePaths) -> Cubins | None:
    compute_capability = hardware_module.GPU_MODELS[values["gpu"]].compute_capability
    if not kernels.wants_cubins(release, compute_capability, model):
        return None
    return Cubins(values["cubins_repository"] or "", paths.cubins)


def _environment(
    release: Release, toolkit: Toolkit, paths: ReleasePaths, profile: Profile, declared: Hardware, architecture: str
) -> dict[str, str]:
    """Everything compiled goes below the release's cache; every compiler found is the release's toolkit's."""
    interconnect = declared.interconnect if profile.device == "cuda" else "none"
    return {
        "CUDA_HOME": toolkit.prefix,
        "PATH": f"{paths.bin}:{toolkit.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": paths.cache,
        "XDG_CACHE_HOME": f"{paths.cache}/xdg",
        "FLASHINFER_CUDA_ARCH_LIST": architecture,
        **{name: f"{paths.cache}/{folder}" for name, folder in release.cache_environment.items()},
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
        # For what the server itself still compiles. Its processes reach a module at the same time and wait for each
        # other's lock, but not two modules; ninja's own number is that of the cores and two, whatever memory is left.
        # FlashInfer, TVM-FFI and torch read it. The warm-up takes a number of its own, by what memory is free.
        "MAX_JOBS": "4",
        # What is not in FLASHINFER_CUBIN_DIR is an error that says so, not a download in front of a user.
        "FLASHINFER_NO_DOWNLOAD": "1",
        # One node: gloo and NCCL would else listen on the first network card's address.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTHONPATH": TOOLS,  # engine_log, which SGLang's logging configuration names
        "SGLANG_LOGGING_CONFIG_PATH": ENGINE_LOGGING,
        **INTERCONNECT_ENVIRONMENT[interconnect],
        **profile.environment,
    }
