"""Send Python source to a host and run it there by one `python3 -c`, with nothing installed first.

The source, the helper modules it imports and its arguments travel compressed as one argument of the command, because
neither a temporary file nor standard input (kept for secrets) is needed then. Linux allows 128 KiB for one argument.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyinfra.api.command import QuoteString, StringCommand

# MAX_ARG_STRLEN is 131072 (execve(2)); the shell that sudo and sshd start gets the whole command as one argument.
LARGEST_ARGUMENT = 120 * 1024

_SHARED = {"kit": "", "kit.on_host": (Path(__file__).parent / "on_host.py").read_text(encoding="utf-8")}

# Must be valid for any Python 3, so that an old one can say that it is too old.
_LOAD = """
import sys,json
if sys.version_info<(3,10):
    what="python3 is %s on this host, wanted 3.10 or newer. Fix: use a supported system"%sys.version.split()[0]
    if {probing}: print(json.dumps({{"problem":what}})); sys.exit(0)
    sys.exit(what)
import base64,types,zlib
sent=json.loads(zlib.decompress(base64.b64decode(sys.argv[1])))
def load(name,source,where):
    made=types.ModuleType(name); made.__path__=[]; sys.modules[name]=made
    exec(compile(source,where,"exec"),made.__dict__)
    up,_,last=name.rpartition(".")
    if up: setattr(sys.modules[up],last,made)
    return made
for name,source in sent["modules"].items(): load(name,source,name)
from kit.on_host import Problem
"""

_PROBE = """
import contextlib,traceback
try:
    with contextlib.redirect_stdout(sys.stderr):
        found=load("probe",sent["source"],sent["where"]).probe(**sent["arguments"])
    answer=json.dumps({"found":found})
except Problem as problem: answer=json.dumps({"problem":str(problem)})
except BaseException: answer=json.dumps({"traceback":traceback.format_exc()})
print(answer)
"""

_ACT = """
try: load("act",sent["source"],sent["where"]).act(**sent["arguments"])
except Problem as problem: sys.exit(str(problem))
"""

# Printed by the shell as the probe's own answer, so that a missing python3 is a clear line and not a failed fact.
_NO_PYTHON = json.dumps(
    {
        "problem": "there is no python3 on this host, wanted 3.10 or newer. "
        "Fix: apt-get install python3 (as root, on that host)"
    }
)


def _payload(source: Path, arguments: Mapping[str, Any]) -> str:
    sent = {
        "modules": _SHARED,
        "source": source.read_text(encoding="utf-8"),
        "where": "/".join(source.parts[-3:]),
        "arguments": dict(arguments),
    }
    payload = base64.b64encode(zlib.compress(json.dumps(sent).encode(), 9)).decode()
    if len(payload) > LARGEST_ARGUMENT:
        raise ValueError(f"{source} with its arguments is {len(payload)} bytes to send, at most {LARGEST_ARGUMENT} fit")
    return payload


def probe_command(source: Path, arguments: Mapping[str, Any]) -> StringCommand:
    """A command that calls `probe(**arguments)` of a source file and prints one line of JSON; its exit code is 0.

    The line is {"found": what probe returned}, {"problem": text} or {"traceback": text}. Raises ValueError where the
    source is too large to send.
    """
    return StringCommand(
        "if command -v python3 >/dev/null 2>&1; then python3 -I -X utf8 -c",
        QuoteString(_LOAD.format(probing=1).strip() + _PROBE),
        _payload(source, arguments),
        "; else echo",
        QuoteString(_NO_PYTHON),
        "; fi",
    )


def act_command(
    source: Path, arguments: Mapping[str, Any], shown: tuple[str, ...] = (), **connector_arguments: Any
) -> StringCommand:
    """A command that calls `act(**arguments)` of a source file; a Problem raised there goes to stderr, exit code 1.

    `shown` are words for the operator's eye, put at the end of the command so that -vv says what it is about.
    """
    return StringCommand(
        "python3 -I -X utf8 -c",
        QuoteString(_LOAD.format(probing=0).strip() + _ACT),
        _payload(source, arguments),
        *(QuoteString(word) for word in shown),
        **connector_arguments,
    )
