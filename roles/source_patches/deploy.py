"""Patch the release before it becomes current."""

from __future__ import annotations

from kit.role import role
from node.plan import Plan
from roles.source_patches.operations import patch_release


@role("Source patches")
def install(plan: Plan) -> None:
    """Every patch that is considered for the release is applied, or recorded as not needed with the evidence."""
    patch_release(
        patches=plan.patches,
        digest=plan.paths.digest,
        python=plan.paths.python,
        site_packages=plan.site_packages,
        nvcc=plan.toolkit.nvcc_path,
        built=plan.paths.receipt,
        receipt=plan.paths.patches_receipt,
    )
