"""First against tenth request of a deployed node: python benchmarks/first_request.py inventory/pro6000.py --limit gpu-1

It restarts the node's server three times, so take the node out of service before. Each request is a new prompt of 700
words and a sampled answer of 32 tokens, one after another; the tenth is the median of the later half of twelve.

    cold    the cache set aside; neither warm-up nor readiness question: a server started by hand
    warmed  the cache as deployed, no readiness question: what the warm-up alone does
    ours    the unit as deployed

Seconds are of this node and this moment: compare the ratios. Beside them stands what was compiled between "healthy" and
the last request, in front of users: read from the cache, where every just-in-time compiler of a release writes. At the
end the cache is as it was and the server runs as deployed, also after a failure. After Ctrl-C the node goes on to that.

On the lab's nodes, which serve on the CPU, nothing is compiled for a request at all (sampling is torch's there): what
the ratios show is what a first request costs an engine besides. benchmarks/first_call.py measures modules on a GPU.
"""

from __future__ import annotations

import argparse
import base64
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from kit import ssh_config  # noqa: E402
from kit.inventory import InventoryError, limited, load  # noqa: E402
from node import layout  # noqa: E402

WAYS = ("cold", "warmed", "ours")
BAR = 1.2
"""What the project holds itself to: the first request of `ours` takes at most so much of its tenth."""

ON_NODE = Path(__file__).with_name("first_request_on_node.py")
START_SECONDS = 3600


def command(told: dict[str, Any]) -> str:
    """What runs the node's part there: the program itself travels in it."""
    program = base64.b64encode(ON_NODE.read_bytes()).decode()
    start = f"import base64; exec(compile(base64.b64decode('{program}'), '{ON_NODE.name}', 'exec'))"
    return f"/usr/bin/python3 -I -c {shlex.quote(start)} {shlex.quote(json.dumps(told))}"


def table(found: dict[str, Any]) -> str:
    rows = [
        "| way | start, s | first, s | tenth, s | first / tenth | compiled meanwhile |",
        "|---|---|---|---|---|---|",
    ]
    for way, result in found["ways"].items():
        files = result["compiled_in_front_of_users"]
        rows.append(
            f"| {way} | {result['start']:.0f} | {result['first']:.3f} | {result['tenth']:.3f} | {result['ratio']:.2f} "
            f"| {len(files)} files{': ' + ', '.join(sorted({Path(f).parent.name for f in files})) if files else ''} |"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inventory")
    parser.add_argument("--limit", action="append", default=[], help="the host; may be left out where there is one")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--words", type=int, default=700, help="of each prompt; a tiny model takes fewer")
    parser.add_argument("--ways", default=",".join(WAYS))
    given = parser.parse_args()
    try:
        entries = limited(load(given.inventory, []), given.limit)
    except InventoryError as error:
        raise SystemExit(str(error)) from None
    if len(entries) != 1:
        raise SystemExit(f"--limit: found {len(entries)} hosts, wanted one. Fix: --limit NAME")
    (entry,) = entries.values()
    told = {
        "requests": given.requests,
        "words": given.words,
        "ways": given.ways.split(","),
        "prefix": layout.CONFIGURATION,
        "seconds": START_SECONDS,
    }
    with ssh_config.written(entries) as config:
        done = subprocess.run(ssh_config.argv(config, entry, command(told)), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.returncode
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))
    print(table(found))
    ours = found["ways"].get("ours")
    return 1 if ours and (ours["ratio"] > BAR or ours["compiled_in_front_of_users"]) else 0


if __name__ == "__main__":
    sys.exit(main())
