"""What preflight reads of a host, in one command."""

from __future__ import annotations

from kit.probe import Probe


class HostFacts(Probe):
    """See probe.py."""

    program = "probe.py"
    timeout = 300  # nvidia-smi takes tens of seconds on a machine of eight GPUs without persistence mode
