"""Fetch, check, repair and tell of model weights on this node. `weights_agent.py --help` has the commands.

Runs on the node by the system's python3 (3.10 or newer, standard library only); its parts lie beside it in weights/.
"""

from __future__ import annotations

import sys

from weights.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
