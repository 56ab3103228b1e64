"""Runs in a release's environment for test_engine_pipeline: the server itself, until it answers or is dead.

argv: JSON, {"model": a folder, "layers", "arguments": [words after those of model and port], "port", "seconds"}. The
model is the given one's configuration and tokenizer with so many layers and no weights. answer.json: {"answered":
whether /model_info did, "code": of the server, null while it ran, "modules": {process title: what it says of its
patched modules}, "log": text}. Nothing of it is left running.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

asked = json.loads(sys.argv[1])
work = Path(os.environ["WORK"])
model = work / "home" / "model"
model.mkdir()
for file in Path(asked["model"]).glob("*.json"):
    if not file.name.startswith("."):
        (model / file.name).write_bytes(file.read_bytes())
config = json.loads((model / "config.json").read_text())
config["num_hidden_layers"] = asked["layers"]
(model / "config.json").write_text(json.dumps(config))


def answered() -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{asked['port']}/model_info", timeout=5) as response:
            return "model_path" in json.load(response)
    except (OSError, ValueError, urllib.error.URLError):
        return False


def told(folder: Path) -> dict[str, Any]:
    """Process title, or its number once it is dead -> what it has written (files/tools/engine_log.py)."""
    found = {}
    for path in folder.glob("*.json"):
        try:
            title = Path("/proc", path.stem, "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
        except OSError:
            title = ""
        found[title or path.stem] = json.loads(path.read_text())["modules"]
    return found


log = work / "server.log"
with log.open("wb") as stream:
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"),
            *("--port", str(asked["port"]), *asked["arguments"]),
        ],
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
end = time.monotonic() + asked["seconds"]
came_up = False
try:
    while not came_up and server.poll() is None and time.monotonic() < end:
        time.sleep(0.5)
        came_up = answered()
    code = server.poll()
    modules = told(Path(os.environ["RUNTIME_DIRECTORY"], "modules"))
finally:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
text = log.read_text(errors="replace")
(work / "answer.json").write_text(json.dumps({"answered": came_up, "code": code, "modules": modules, "log": text}))
