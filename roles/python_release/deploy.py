"""Build the release, and later make it current."""

from __future__ import annotations

from typing import Any

from kit import templates
from kit.role import role
from node import layout
from node.layout import ReleasePaths
from node.plan import Plan
from roles.python_release.operations import build, make_current


@role("Python release")
def install(plan: Plan) -> None:
    """The release's environment, whole, by a unit of the host. It is not in use yet."""
    build(
        request=request(plan),
        request_file=plan.paths.build_request,
        unit_file=layout.RELEASE_BUILD_UNIT,
        unit_text=unit_text(),
        unit=plan.paths.build_unit,
        release_digest=plan.paths.digest,
    )


@role("Current release")
def activate(plan: Plan) -> None:
    """`current` points to the built and patched release; older ones than the kept go."""
    any_release = ReleasePaths("{digest}")
    make_current(
        digest=plan.paths.digest,
        link=layout.CURRENT,
        releases=layout.RELEASES,
        receipts=[plan.paths.receipt, plan.paths.patches_receipt],
        keep=layout.KEPT_RELEASES,
        belongings=[
            any_release.receipt,
            any_release.patches_receipt,
            any_release.build_request,
            any_release.build_status,
            any_release.cache,
        ],
    )


def request(plan: Plan) -> dict[str, Any]:
    """What files/tools/release_builder.py is asked for."""
    return {
        "bytes": layout.RELEASE_BYTES,
        "cache": layout.PACKAGE_CACHE,
        "digest": plan.paths.digest,
        "distributions": plan.distributions,
        "environment": plan.paths.environment,
        "lock": plan.lock.decode(),
        "python": f"/usr/bin/python{plan.system.python}",
        "receipts": [plan.paths.receipt, plan.paths.patches_receipt],
        "release": plan.release.name,
        "site_packages": plan.site_packages,
        "status": plan.paths.build_status,
        "uv": f"{layout.TOOLS_ENVIRONMENT}/bin/uv",
    }


def unit_text() -> str:
    """The unit that builds any release: its instance is the digest."""
    values = {
        "python": "/usr/bin/python3",
        "program": f"{layout.TOOLS}/release_builder.py",
        "request": ReleasePaths("%i").build_request,
        "machine_environment": layout.MACHINE_ENVIRONMENT,
    }
    return templates.render("kimi-release@.service.j2", values)
