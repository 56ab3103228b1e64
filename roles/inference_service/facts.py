"""What inference_service reads of a host, in one command."""

from __future__ import annotations

from kit.probe import Probe


class ServiceFacts(Probe):
    """See probe.py."""

    program = "probe.py"
    timeout = 120
