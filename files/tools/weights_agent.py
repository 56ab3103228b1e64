"""Fetch, check, repair and tell of model weights on this node. `weights_agent.py --help` has the commands.

Runs on the node by the system's python3 (3.10 or newer, standard library only); its parts lie beside it in weights/.
"""

from __future__ import annotations

import sys

from weights.settled import settled

if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "fetch" and settled(sys.argv[2]):
        sys.exit(0)
    from weights.commands import main

    sys.exit(main(sys.argv[1:]))
