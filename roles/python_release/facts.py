"""What python_release reads of a host: one command for the building, one for the switching."""

from __future__ import annotations

from kit.probe import Probe


class ReleaseFacts(Probe):
    """See probe.py."""

    program = "probe.py"
    timeout = 60


class CurrentFacts(Probe):
    """See current_probe.py."""

    program = "current_probe.py"
    timeout = 60
