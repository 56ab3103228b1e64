"""Inventory data and a host, in; a Plan or every Problem, out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from node import hardware, inventory
from node.layout import ServicePaths
from node.manifest import File, Manifest
from node.models import DRAFTERS, MODELS
from node.plan import Observed, Plan, make
from node.profiles import PROFILES
from node.releases import DEFAULT_RELEASE, RELEASES
from node.render import PROJECT, shown, text
from node.sharing import Neighbour
from node.systems import SYSTEMS

GOOD: dict[str, Any] = {"gpu": "rtx-pro-6000-blackwell-server", "gpu_count": 8, "weights_directory": "/srv/weights"}
DFLASH = {"profile": "ep8-dflash", "drafter_revision": "d" * 40}
DEBIAN12 = SYSTEMS[0].as_system()


def manifest(repository: str, revision: str) -> bytes:
    return Manifest(repository, revision, (File("config.json", 10, "a" * 64),)).dumps().encode()


def reader(**changed: bytes) -> Callable[[str], bytes]:
    files = {f"files/manifests/{m.key}.json": manifest(m.repository, m.revision or "e" * 40) for m in MODELS.values()}
    files |= {
        f"files/manifests/{d.key}.json": manifest(d.repository, d.revision or "d" * 40) for d in DRAFTERS.values()
    }
    files |= changed

    def read(path: str) -> bytes:
        if path in files:
            return files[path]
        if "manifests" in path:
            raise FileNotFoundError(path)
        return (PROJECT / path).read_bytes()

    return read


def planned(data: dict[str, Any], **kw: Any) -> Plan:
    made = make("gpu-1", GOOD | data, reader(), kw.get("observed"), kw.get("system", DEBIAN12))
    assert isinstance(made, Plan), [str(problem) for problem in made]
    return made


def refused(data: dict[str, Any], read: Callable[[str], bytes] | None = None, **kw: Any) -> list[str]:
    made = make("gpu-1", data, read or reader(), kw.get("observed"), kw.get("system", DEBIAN12))
    assert not isinstance(made, Plan)
    return [str(problem) for problem in made]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("profile", [name for name, profile in PROFILES.items() if profile.device == "cuda"])
@pytest.mark.parametrize("gpu", ["rtx-pro-6000-blackwell-server", "b300"])
def test_every_profile_renders_for_every_release_and_node(release: str, profile: str, gpu: str) -> None:
    """Every flag that a plan uses is one that the release's own argument parser has."""
    plan = planned({"gpu": gpu, "profile": profile, "release": release, "drafter_revision": "d" * 40})
    options = set((PROJECT / RELEASES[release].options_file).read_text().split())
    flags = {argument for argument in plan.service.arguments if argument.startswith("--")}
    assert flags <= options, flags - options
    assert plan.service.unit == plan.service_paths.unit
    assert set(plan.service.conflicts) == {ServicePaths(other).unit for other in PROFILES if other != profile}


def argument(plan: Plan, flag: str) -> str | None:
    vector = plan.service.arguments
    return vector[vector.index(flag) + 1] if flag in vector else None


@pytest.mark.parametrize(
    ("profile", "tensor", "pipeline", "expert"),
    [("tp8", "8", "1", "1"), ("pp8", "1", "8", "1"), ("ep8", "8", "1", "8"), ("ep4", "8", "1", "4")],
)
def test_layouts(profile: str, tensor: str, pipeline: str, expert: str) -> None:
    plan = planned({"profile": profile})
    assert [argument(plan, flag) for flag in ("--tp-size", "--pp-size", "--ep-size")] == [tensor, pipeline, expert]


def test_eager_differs_by_graphs_and_memory_only() -> None:
    graphs, eager = planned({"profile": "ep8"}), planned({"profile": "ep8-eager"})
    assert "--disable-cuda-graph" in eager.service.arguments and "--disable-cuda-graph" not in graphs.service.arguments
    rest = [a for a in eager.service.arguments if a != "--disable-cuda-graph"]
    assert graphs.fit and argument(graphs, "--cuda-graph-max-bs") == str(graphs.fit.graph_batch)
    ours = list(graphs.service.arguments)
    del ours[(limit := ours.index("--cuda-graph-max-bs")) : limit + 2]
    differing = [(a, b) for a, b in zip(ours, rest, strict=True) if a != b]
    assert differing == [("0.85", argument(eager, "--mem-fraction-static"))]


def test_the_drafter_comes_with_its_profile_only() -> None:
    plan = planned(DFLASH)
    assert [part.role for part in plan.weights] == ["model", "drafter"]
    assert argument(plan, "--speculative-algorithm") == "DFLASH"
    assert argument(plan, "--speculative-draft-model-path") == plan.weights[1].paths.snapshot
    assert [part.role for part in planned({}).weights] == ["model"]


def test_back_ends_follow_the_gpu() -> None:
    assert argument(planned({}), "--attention-backend") == "triton"
    assert argument(planned({"gpu": "b300"}), "--attention-backend") == "trtllm_mla"


def test_compilers_are_the_toolkits_whatever_the_alternative() -> None:
    """Nothing of ours reads /usr/local/cuda, nor the compiler that the wheels bring."""
    plan = planned({})
    environment = plan.service.environment
    assert environment["CUDA_HOME"] == "/usr/local/cuda-13.0"
    assert environment["PATH"].split(":")[:2] == [plan.paths.bin, "/usr/local/cuda-13.0/bin"]
    everything = json.dumps(shown(plan)).replace("/usr/local/cuda-13.0", "")
    assert "/usr/local/cuda" not in everything and "nvidia/cu13" not in everything


def test_the_digest_covers_what_a_release_is_made_of() -> None:
    one = planned({}).paths.digest
    assert planned({"profile": "pp8", "port": 30001}).paths.digest == one
    assert planned({"release": "sglang-0.5.12.post1"}).paths.digest != one
    assert planned({}, system=SYSTEMS[1].as_system()).paths.digest != one
    lock = RELEASES[DEFAULT_RELEASE].lock
    other = (PROJECT / lock).read_bytes() + b"# another lock\n"
    made = make("gpu-1", GOOD, reader(**{lock: other}), None, DEBIAN12)
    assert isinstance(made, Plan) and made.paths.digest != one


def test_a_host_that_is_what_was_declared_gives_the_same_plan() -> None:
    observed = Observed(DEBIAN12, dataclasses.replace(hardware.expected(GOOD["gpu"], 8), driver="580.95.05"))
    assert planned({}, observed=observed).service == planned({}).service


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"tensor_paralel": 8}, "tensor_paralel"),
    "misspelt key": ({"profil": "tp8"}, "rename it to profile"),
    "unknown profile": ({"profile": "tp9"}, "'tp9'"),
    "unknown release": ({"release": "sglang-9"}, "'sglang-9'"),
    "unknown gpu": ({"gpu": "rtx-4090"}, "'rtx-4090'"),
    "DFlash with a pipeline": ({"profile": "pp8", "speculative": "dflash", "drafter_revision": "d" * 40}, "pipeline"),
    "DDTree": ({"speculative": "ddtree"}, "no SGLang release has DDTree"),
    "3 GPUs for tp8": ({"gpu_count": 3}, "found 3 GPUs, wanted 8 GPUs"),
    "missing weights directory": ({"weights_directory": None}, "weights_directory: found nothing"),
    "relative path": ({"weights_directory": "weights"}, "an absolute path"),
    "path that climbs": ({"weights_directory": "/srv/../etc"}, "an absolute path"),
    "count as text": ({"gpu_count": "8"}, "'8' (str)"),
    "count as truth": ({"gpu_count": True}, "True (bool)"),
    "port as text": ({"port": "30000"}, "'30000' (str)"),
    "ports that collide": ({"port": 30000, "nccl_port": 30000}, "which is port too"),
    "branch name": ({"revision": "main"}, "a branch name can move"),
    "drafter without drafting": ({"drafter": "kimi-k2.6-dflash"}, "does not draft"),
    "drafter without revision": ({"profile": "ep8-dflash"}, "drafter_revision"),
    "gated drafter without token": (
        {"profile": "ep8-dflash", "drafter": "kimi-k2.6-dflash"},
        "hub_token_file: found nothing",
    ),
    "toolkit nobody has": ({"toolkits_beside": ["11.8"]}, "toolkits_beside"),
    "profile of another device": ({"profile": "cpu"}, "a profile for cpu with model kimi-k2.6"),
    "context that does not fit": ({"context_length": 250_000}, "room for at least 250000 tokens"),
    "context longer than the model's": ({"gpu": "b300", "context_length": 300_000}, "at most 262144 tokens"),
    "fraction too small": ({"memory_fraction": 0.5}, "Fix: raise memory_fraction above 0.5 or remove it"),
    "fraction in percent": ({"memory_fraction": 85}, "a number from 0.3 to 0.97"),
    "profile in capitals": ({"profile": "TP8"}, "perhaps to tp8"),
    "part of a name": ({"kv_cache_dtype": "fp8"}, "perhaps to fp8_e4m3"),
    "release without its name": ({"release": "0.5.17"}, "perhaps to sglang-0.5.17"),
    "nothing where there is a choice": ({"gpu": None}, "wanted text in quotes: one of b200, b300"),
    "truth where there is a choice": ({"weights_sharing": True}, "wanted text in quotes: one of off, on"),
    "toolkits as a number": ({"toolkits_beside": 12.8}, 'wanted a list in brackets: a list out of "12.8", "13.0"'),
    "toolkits as numbers": ({"toolkits_beside": [12.8]}, 'a list out of "12.8", "13.0"'),
    "misspelt key of pyinfra": ({"ssh_prot": 22}, "rename it to ssh_port"),
    "a variable of the file": ({"_base": "/srv"}, "pyinfra leaves alone what begins with two underscores"),
    "weights below /tmp": ({"weights_directory": "/tmp/weights"}, "not below /tmp"),
    "revision in capitals": ({"revision": "B" * 40}, "40 hex digits, in small letters"),
    "underscore in a host name": ({"edge_name": "kimi_1.example.com"}, "small letters, digits, '-' and '.'"),
    "4 GPUs": ({"gpu_count": 4}, "Fix: mend gpu_count"),
    "DFlash with a pipeline, nothing pinned": ({"profile": "pp8", "speculative": "dflash"}, "remove speculative"),
    "edge where the server is": (
        {"edge_name": "a.example", "edge_port": 30000},
        "edge_port: found 30000, which is port",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_inventory_gives_its_one_clear_error(case: str) -> None:
    data, named = BAD[case]
    problems = refused(GOOD | data)
    assert len(problems) == 1, problems
    assert named in problems[0] and ": found " in problems[0] and ", wanted " in problems[0] and "Fix: " in problems[0]


def test_all_problems_are_said_at_once() -> None:
    problems = refused({"gpu": "h9000", "gpu_count": "8", "wieghts_directory": "/srv"})
    assert len(problems) == 4, problems


def test_missing_and_wrong_manifests_are_told_with_the_command_that_writes_them() -> None:
    def none(path: str) -> bytes:
        if "manifests" in path:
            raise FileNotFoundError(path)
        return (PROJECT / path).read_bytes()

    (problem,) = refused(GOOD, none)
    assert "Fix: bin/pin kimi-k2.6 --revision b5aabbfb20227ed42becbf5541dbffd213942c58" in problem
    other = manifest("moonshotai/Kimi-K2.6", "0" * 40)
    (problem,) = refused(GOOD, reader(**{"files/manifests/kimi-k2.6.json": other}))
    assert "0" * 40 in problem and "bin/pin kimi-k2.6" in problem
    (problem,) = refused(GOOD, reader(**{"files/manifests/kimi-k2.6.json": b"{"}))
    assert "not JSON" in problem and "bin/pin kimi-k2.6" in problem


def test_a_manifest_that_is_none_is_told_with_its_path() -> None:
    (problem,) = refused(GOOD | {"manifest": "README.md"})
    assert "found README.md, in which manifest: not JSON" in problem and "Fix: bin/pin kimi-k2.6" in problem


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"port": 30200}, "weights_port: found 30200, which is port too"),
        ({"nccl_port": 30201}, "weights_port: found 30200, and 30201 after it is nccl_port too"),
        ({"edge_name": "a.example", "edge_port": 30201}, "edge_port: found 30201, which is the one after weights_port"),
    ],
)
def test_ports_of_weights_between_nodes_are_taken_where_there_are_peers(data: dict[str, Any], told: str) -> None:
    neighbours = [Neighbour(name, f"10.0.0.{number}", GOOD | data) for number, name in enumerate(("gpu-1", "gpu-2"), 1)]
    made = make("gpu-1", GOOD | data, reader(), None, DEBIAN12, neighbours)
    assert isinstance(made, list)
    (problem,) = map(str, made)
    assert told in problem and "Fix: change " in problem
    assert isinstance(make("gpu-1", GOOD | data, reader(), None, DEBIAN12), Plan), "a node by itself shares nothing"


def test_software_that_does_not_fit_the_system_is_refused() -> None:
    ubuntu2204, debian13 = SYSTEMS[2].as_system(), SYSTEMS[1].as_system()
    (problem,) = refused(GOOD | {"release": "sglang-0.5.23"}, system=ubuntu2204)
    assert "Python 3.10" in problem
    (problem,) = refused(GOOD | {"toolkits_beside": ["12.8"]}, system=debian13)
    assert "CUDA toolkit 12.8" in problem and "glibc 2.41" in problem


def test_a_host_that_is_not_what_was_declared_is_refused() -> None:
    seven = dataclasses.replace(hardware.expected(GOOD["gpu"], 7), driver="580.95.05")
    assert any("7" in problem for problem in refused(GOOD, observed=Observed(DEBIAN12, seven)))
    old = dataclasses.replace(hardware.expected(GOOD["gpu"], 8), driver="570.10.10")
    assert any("570.10.10" in problem for problem in refused(GOOD, observed=Observed(DEBIAN12, old)))


def test_every_key_is_documented_with_type_and_use() -> None:
    page = (PROJECT / "docs/inventory.md").read_text()
    assert inventory.table() in page, "Fix: python -m node.inventory, and put its table into docs/inventory.md"


def test_render_shows_everything_that_would_run() -> None:
    plan = planned({})
    page = text(plan)
    for wanted in (
        plan.service.unit,
        "CUDA_HOME=/usr/local/cuda-13.0",
        "--tp-size 8",
        "tokens",
        plan.paths.environment,
    ):
        assert wanted in page
    assert json.loads(json.dumps(shown(plan)))["arguments"] == list(plan.service.arguments)
