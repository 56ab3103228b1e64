"""What source_patches reads of a host, in one command."""

from __future__ import annotations

from kit.probe import Probe


class PatchFacts(Probe):
    """See probe.py."""

    program = "probe.py"
    timeout = 60
