"""What diagnosis reads of a host, in one command."""

from __future__ import annotations

from kit.probe import Probe


class Symptoms(Probe):
    """See probe.py."""

    program = "probe.py"
    timeout = 180  # nvidia-smi alone may take a minute
