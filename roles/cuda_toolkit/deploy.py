"""Give the node its CUDA toolkits."""

from __future__ import annotations

from kit.role import role
from node.plan import Plan
from roles.cuda_toolkit.operations import stand_side_by_side


@role("CUDA toolkit")
def install(plan: Plan) -> None:
    """NVIDIA's repository by its pinned key; the release's toolkit beside the others; all proved."""
    stand_side_by_side(plan=plan)
