"""What edge reads of a host, in one command."""

from __future__ import annotations

from kit.probe import Probe


class EdgeFacts(Probe):
    """See edge_on_host.py."""

    program = "edge_on_host.py"
    timeout = 120
