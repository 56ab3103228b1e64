"""The release in use is the planned one, whole, and nobody but root can change it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kit.program import probe_command
from node import layout
from node.plan import Plan

FIX = "Fix: run deploy.py again"


@pytest.fixture(scope="module")
def found(host: Any, plan: Plan) -> dict[str, Any]:
    """What the service's user finds, with the service's own environment, in one round trip."""
    arguments = {
        "link": layout.CURRENT,
        "environment": plan.paths.environment,
        "python": plan.paths.python,
        "user": layout.SERVICE_USER,
        "variables": dict(plan.service.environment),
        "receipt": plan.paths.receipt,
    }
    command = probe_command(Path(__file__).parent / "release_on_host.py", arguments).get_raw_value()
    said = host.run(command)
    assert said.rc == 0, f"the host gives no answer: {said.stderr.strip()[-300:]}"
    answer = json.loads(said.stdout.splitlines()[-1])
    assert "found" in answer, f"the host cannot be looked at: {answer}"
    return dict(answer["found"])


@pytest.fixture(scope="module")
def release(found: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The same, once there is a release."""
    assert found["there"], f"{plan.paths.environment}: found no release, wanted {plan.release.name}. {FIX}"
    return found


def test_current_release_is_the_planned_one(found: dict[str, Any], plan: Plan) -> None:
    """People and programs go by this link; one that was repointed by hand shows them software that does not serve."""
    assert found["current"] == plan.paths.environment, (
        f"{layout.CURRENT}: found it pointing to {found['current'] or 'nothing'}, wanted {plan.paths.environment} "
        f"({plan.release.name}). {FIX}"
    )


def test_installed_distributions_are_those_of_the_lock(release: dict[str, Any], plan: Plan) -> None:
    """One package of another version makes it a release that nobody has tried."""
    here, wanted = release["versions"], plan.distributions
    wrong = [
        f"{name} {here.get(name, 'missing')}, wanted {wanted.get(name, 'nothing')}"
        for name in sorted({*here, *wanted})
        if here.get(name) != wanted.get(name)
    ]
    assert not wrong, f"{plan.paths.environment}: found {'; '.join(wrong)}. Fix: remove that folder and run deploy.py"
    for name, version in plan.release.pins.items():
        assert here[name] == version, f"{name}: found {here[name]}, wanted {version} of {plan.release.name}"


def test_receipt_is_of_this_release(release: dict[str, Any], plan: Plan) -> None:
    """The receipt is written last of all: without it, or with another's, the building did not end well."""
    receipt = release["receipt"]
    assert receipt is not None, f"{plan.paths.receipt}: found none, wanted that of a completed building. {FIX}"
    assert receipt["digest"] == plan.paths.digest
    assert receipt["lock_sha256"] == hashlib.sha256(plan.lock).hexdigest(), (
        f"{plan.paths.receipt}: of another lock. {FIX}"
    )


def test_service_user_cannot_change_the_release(release: dict[str, Any], plan: Plan) -> None:
    """The engine runs code from the model's repository; what it could change here would stay."""
    assert release["writable"] is None, (
        f"{release['writable']}: found it writable by {layout.SERVICE_USER}, wanted the release closed to it. "
        f"Fix: chown -R root:root {plan.paths.environment} && chmod -R go-w {plan.paths.environment}"
    )


def test_the_compiler_found_is_the_toolkits_own(release: dict[str, Any], plan: Plan) -> None:
    """The wheels bring an nvcc without lib64: found first, it fails every just-in-time compilation at its last step."""
    assert release["nvcc_path"] == plan.toolkit.nvcc_path, (
        f"nvcc: found {release['nvcc_path'] or 'none'} by the service's PATH, wanted {plan.toolkit.nvcc_path}. {FIX}"
    )
    assert f"release {plan.toolkit.nvcc}," in release["nvcc"], (
        f"{plan.toolkit.nvcc_path}: found {release['nvcc'].strip() or 'nothing that runs'} by {layout.SERVICE_USER}, "
        f"wanted release {plan.toolkit.nvcc}. {FIX}"
    )
    assert plan.service.environment["CUDA_HOME"] == plan.toolkit.prefix


def test_torch_and_the_toolkit_are_of_one_cuda(release: dict[str, Any], plan: Plan) -> None:
    """Kernels that are compiled here are loaded into torch's CUDA runtime; another major version is another ABI."""
    major = release["torch_cuda"].partition(".")[0]
    assert major == plan.toolkit.version.partition(".")[0], (
        f"torch: found CUDA {release['torch_cuda'] or 'not importable'}, wanted {plan.toolkit.version}'s. "
        f"Fix: choose a release whose toolkit is that of its torch (node/releases.py)"
    )


def test_ninja_is_found_by_the_service(release: dict[str, Any], plan: Plan) -> None:
    """FlashInfer and TVM-FFI run `ninja` by its bare name, at the first request that needs a kernel."""
    assert release["ninja"] == f"{plan.paths.bin}/ninja" and release["ninja_version"], (
        f"ninja: found {release['ninja'] or 'none'}, version {release['ninja_version'] or 'unknown'}, wanted "
        f"{plan.paths.bin}/ninja on the service's PATH. {FIX}"
    )
