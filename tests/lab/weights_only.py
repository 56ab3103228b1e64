"""Deploy only what weights need: for tests of the weights role on a lab machine."""

from kit import run
from roles.node_tools import deploy as node_tools
from roles.preflight import deploy as preflight
from roles.weights import deploy as weights

run.begin()
plan = preflight.check()
if plan:
    node_tools.install(plan)
    weights.start(plan)
    weights.join(plan)
