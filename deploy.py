"""Converge the hosts of an inventory: pyinfra inventory/pro6000.py deploy.py"""

from kit import run
from roles.cuda_toolkit import deploy as cuda_toolkit
from roles.edge import deploy as edge
from roles.inference_service import deploy as inference_service
from roles.node_tools import deploy as node_tools
from roles.preflight import deploy as preflight
from roles.python_release import deploy as python_release
from roles.source_patches import deploy as source_patches
from roles.weights import deploy as weights

run.begin()
plan = preflight.check()
if plan:
    node_tools.install(plan)
    weights.start(plan)  # runs on the host while the rest goes on
    cuda_toolkit.install(plan)
    python_release.install(plan)
    source_patches.install(plan)
    python_release.activate(plan)
    inference_service.configure(plan)
    inference_service.warm(plan)
    weights.join(plan)
    inference_service.activate(plan)
    edge.activate(plan)
