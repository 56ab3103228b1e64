"""What cuda_toolkit reads of a host. A run that changes nothing reads ToolkitFacts only, once."""

from __future__ import annotations

from kit.probe import Probe


class ToolkitFacts(Probe):
    """See probe.py."""

    program = "probe.py"
    timeout = 120  # checksums of 200 MB of compilers where they are new, on a slow disk


class RepositoryKey(Probe):
    """See key_on_host.py."""

    program = "key_on_host.py"
    timeout = 120


class Proof(Probe):
    """See proof_on_host.py."""

    program = "proof_on_host.py"
    timeout = 600
