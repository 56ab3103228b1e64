"""The part of first_request.py that runs on the node, as root: restarts the server its three ways, and asks it.

Standard library alone. Told by one argument, JSON: {"requests": int, "words": int, "ways": [names], "prefix": folder of
the units' configuration, "seconds": longest start}. Prints JSON. Whatever happens, the server runs as deployed when it
ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import random
import shutil
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ASIDE = ".aside-for-first-request"
KEPT = ("cubins",)  # not compiled, and another user's
# Neither warm-up nor readiness question, as a server that is started by hand.
BARE = "[Service]\nExecStartPre=\nExecStartPost=\nType=exec\n"
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main(told: dict[str, Any]) -> dict[str, Any]:
    unit = running_unit()
    cache = Path(shown(unit, "WorkingDirectory"))
    readiness = json.loads(Path(told["prefix"], unit.replace(".service", ".readiness.json")).read_text())
    key = Path(readiness["key"]).read_text().strip()
    ask = Asker(readiness["address"], key, readiness["questions"][0]["body"]["model"], told["words"])
    settled_or_stop(cache)
    found: dict[str, Any] = {"unit": unit, "ways": {}}
    try:
        for way in told["ways"]:
            found["ways"][way] = one_way(way, unit, cache, ask, told)
            print(way, found["ways"][way], file=sys.stderr, flush=True)
    finally:
        put_back(unit, cache)
        systemctl("restart", unit)
    return found


def one_way(way: str, unit: str, cache: Path, ask: Asker, told: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each request in their order, and what was written into the cache meanwhile."""
    systemctl("stop", unit)
    override = drop_in(unit)
    with contextlib.ExitStack() as stack:
        if way == "cold":
            stack.enter_context(emptied(cache))
        if way != "ours":
            override.parent.mkdir(parents=True, exist_ok=True)
            override.write_text(BARE)
        systemctl("daemon-reload")
        began = time.monotonic()
        systemctl("reset-failed", unit)
        systemctl("start", unit)
        ask.until_healthy(told["seconds"], unit)
        ready = time.monotonic() - began
        before = compiled(cache)
        answers = [ask() for _ in range(told["requests"])]
        after = compiled(cache)
        systemctl("stop", unit)
        if override.exists():
            shutil.rmtree(override.parent)
            systemctl("daemon-reload")
    first, tenth = answers[0], statistics.median(answers[len(answers) // 2 :])
    return {
        "start": round(ready, 1),
        "first": first,
        "tenth": tenth,
        "ratio": first / tenth,
        "all": answers,
        "compiled_in_front_of_users": sorted(name for name, at in after.items() if before.get(name) != at),
    }


class Asker:
    """One request after another: as long as each other, and new to the server, so that no prefix is cached."""

    def __init__(self, address: str, key: str, model: str, words: int):
        self.address, self.key, self.model = address, key, model
        self.text = " ".join(f"word{number}" for number in range(words))

    def __call__(self) -> float:
        """Seconds to a whole sampled answer of 32 tokens."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"{random.randrange(10**6):06} {self.text} What is 17 times 23?"}],
            "max_tokens": 32,
            "ignore_eos": True,  # SGLang's: else an answer's length is drawn too, and decides its time
            "temperature": 1.0,
            "top_p": 0.95,
        }
        request = urllib.request.Request(
            f"{self.address}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
        )
        began = time.monotonic()
        with OPENER.open(request, timeout=1800) as answer:
            json.load(answer)
        return time.monotonic() - began

    def until_healthy(self, seconds: float, unit: str) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError, urllib.error.HTTPError),
                OPENER.open(f"{self.address}/health", timeout=30) as answer,
            ):
                if answer.status == 200:
                    return
            if shown(unit, "ActiveState") == "failed":
                break
            time.sleep(0.5)
        raise SystemExit(f"{unit}: found no healthy server, wanted one. Fix: journalctl -u {unit}")


def running_unit() -> str:
    listed = systemctl("list-units", "--plain", "--no-legend", "--state=active", "sglang-*.service").split()
    if not listed:
        raise SystemExit("found no active sglang-*.service, wanted a deployed node that serves. Fix: run deploy.py")
    return listed[0]


def drop_in(unit: str) -> Path:
    return Path(f"/run/systemd/system/{unit}.d/first-request.conf")


def settled_or_stop(cache: Path) -> None:
    if (cache / ASIDE).exists():
        raise SystemExit(
            f"{cache / ASIDE}: found what an earlier run has set aside, wanted none. Fix: move its content back to "
            f"{cache}, over what is there"
        )


@contextlib.contextmanager
def emptied(cache: Path) -> Iterator[None]:
    """Everything compiled is set aside, and comes back in place of what is compiled meanwhile."""
    aside = cache / ASIDE
    aside.mkdir()
    for path in list(cache.iterdir()):
        if path != aside and path.name not in KEPT:
            path.rename(aside / path.name)
    try:
        yield
    finally:
        restore(cache)


def restore(cache: Path) -> None:
    aside = cache / ASIDE
    if not aside.exists():
        return
    for path in list(cache.iterdir()):
        if path != aside and path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in list(aside.iterdir()):
        path.rename(cache / path.name)
    aside.rmdir()


def put_back(unit: str, cache: Path) -> None:
    systemctl("stop", unit)
    restore(cache)
    shutil.rmtree(drop_in(unit).parent, ignore_errors=True)
    systemctl("daemon-reload")


def compiled(cache: Path) -> dict[str, int]:
    """Objects, libraries and GPU code in the cache -> when they were written, in nanoseconds."""
    kinds = (".o", ".so", ".cu", ".cubin", ".ptx")
    return {
        str(path.relative_to(cache)): path.stat().st_mtime_ns
        for path in cache.rglob("*")
        if path.suffix in kinds and path.relative_to(cache).parts[0] not in (ASIDE, *KEPT)
    }


def shown(unit: str, name: str) -> str:
    return systemctl("show", f"--property={name}", "--value", "--", unit).strip()


def systemctl(*words: str) -> str:
    done = subprocess.run(["systemctl", *words], capture_output=True, text=True)
    if done.returncode and words[0] not in ("reset-failed", "stop"):
        raise SystemExit(f"systemctl {' '.join(words)}: {done.stderr.strip()}. Fix: see the journal")
    return done.stdout


if __name__ == "__main__":
    assert os.geteuid() == pwd.getpwnam("root").pw_uid
    print(json.dumps(main(json.loads(sys.argv[1]))))
