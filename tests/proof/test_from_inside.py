"""What a node's server reaches of others: nothing that a client may point it at. Asked with SGLang's own function for
pictures by address, run by the release as the server's user, of a machine that would answer."""

from __future__ import annotations

import base64
import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from node import layout
from tests.proof.conftest import Node
from tests.proof.engine import Engine

PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PROGRAM = """
import json, os, pwd, socket, sys, time
from sglang.srt.utils.common import get_image_bytes

def seen(ask):
    began = time.monotonic()
    try:
        said = ask()
    except OSError as error:  # requests' own errors are OSErrors
        said = str(error)
    return {"said": said, "seconds": time.monotonic() - began}

def connect(port):
    with socket.socket() as one:
        one.settimeout(5)
        one.connect(("127.0.0.1", port))
    return "answered"

def all_of(user):
    return {
        "picture": seen(lambda: f"{len(get_image_bytes(sys.argv[1] + user))} bytes"),
        "server": seen(lambda: connect(int(sys.argv[2]))),
        "ssh": seen(lambda: connect(22)),
    }

found = {"root": all_of("root")}
user = pwd.getpwnam(sys.argv[3])
os.setgroups([]); os.setgid(user.pw_gid); os.setuid(user.pw_uid)
found["server"] = all_of("server")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def seen(deployed: Node) -> Iterator[dict[str, Any]]:
    """What root and the server's user got, and what the machine with the picture was asked: {"root", "server",
    "asked"}."""
    plan = Engine.of(deployed).plan
    asked: list[str] = []

    class Pictures(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PICTURE)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    address = deployed.ssh("ip -4 -o addr show scope global | awk '{print $4}' | cut -d/ -f1 | head -1")
    words = subprocess.run(["ip", "route", "get", address], capture_output=True, text=True, check=True).stdout.split()
    with http.server.ThreadingHTTPServer((words[words.index("src") + 1], 0), Pictures) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            host, port = server.server_address[:2]
            url = f"http://{host!s}:{port}/"
            environment, python = plan.service_paths.environment, plan.paths.python
            arguments = f"{url} {plan.service.port} {layout.SERVICE_USER}"
            command = f"set -a; . {environment}; cd /; {python} - {arguments}"
            output = deployed.ssh(f"{command} <<'END' 2>/dev/null\n{PROGRAM}\nEND")
        finally:
            server.shutdown()
            thread.join()
    yield {**json.loads(output.splitlines()[-1]), "asked": asked}


def test_a_picture_is_not_fetched_from_where_a_client_points(seen: dict[str, Any]) -> None:
    """Refused at once, with an error that the client is shown, and no packet of it arrives. Root gets the picture."""
    assert seen["root"]["picture"]["said"] == f"{len(PICTURE)} bytes"
    refused = seen["server"]["picture"]
    assert "refused" in refused["said"] and refused["seconds"] < 1, refused
    assert seen["asked"] == ["/root"]


def test_on_loopback_it_reaches_itself_and_no_service_of_the_machine(seen: dict[str, Any]) -> None:
    assert {name: seen["root"][name]["said"] for name in ("server", "ssh")} == dict.fromkeys(
        ("server", "ssh"), "answered"
    )
    assert seen["server"]["server"]["said"] == "answered"
    assert "refused" in seen["server"]["ssh"]["said"] and seen["server"]["ssh"]["seconds"] < 1
