"""python3 -m tests.lab: what bin/lab runs."""

import sys

from tests.lab.cli import main

sys.exit(main(sys.argv[1:]))
