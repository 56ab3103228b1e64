"""Is the server ready? Ask it a question that makes it sample, and look at what it answers.

    ready_probe.py QUESTION             in ExecStartPost= of the server's unit: wait until it answers right
    ready_probe.py QUESTION --now       by hand: ask once, print the answer

Exit 0: the answer has the expected content. Exit 1: it has not, or the server's main process ($MAINPID) is gone, or
time is up; the last line says which. QUESTION is JSON:

    {"address": "http://127.0.0.1:30000", "model": name, "key": path, "user": name, "prompt": text, "expected": text,
     "max_tokens": int, "temperature": float, "top_p": float, "seconds": int}

It is started as root, because systemd before 254 hides credentials from ExecStartPost=; it reads the key and goes on as
`user`.

A listening port, /v1/models and /health are no proof: the kernels that sample are loaded, and compiled where the cache
is cold, by the first request with top_p, and SGLang has been seen healthy with a dead scheduler, or saying rubbish.
/health is asked only to know when the question may come: it answers 503 until the weights are loaded, and asking often
piles up work.
"""

from __future__ import annotations

import json
import os
import pwd
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ATTEMPTS = 3  # temperature is not zero: a model may miss once
BETWEEN_LOOKS = 2.0  # seconds
STILL_WAITING = 30.0  # seconds between two lines that say so
HEALTH_SECONDS = 30.0  # SGLang takes up to 20 s itself to find out
ANSWER_SECONDS = 600.0

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a proxy: it is this machine


class NotReady(Exception):
    """Why not, ending with `Fix: ...`."""


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2) or arguments[1:] not in ([], ["--now"]):
        print(__doc__, file=sys.stderr)
        return 2
    question = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        key = read_key(Path(question["key"]))
        become(question["user"])
        if arguments[1:]:
            print(attempt(question, key, ANSWER_SECONDS))
        else:
            wait_until_ready(question, key)
    except NotReady as error:
        print(f"not ready: {error}", file=sys.stderr)
        return 1
    return 0


def read_key(path: Path) -> str:
    """The key, one line. Raises NotReady."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise NotReady(f"{path}: {error.strerror}, wanted the API key. Fix: deploy again, which makes it") from None


def become(user: str) -> None:
    """Root is no more needed once the key is read."""
    if os.geteuid() == 0:
        found = pwd.getpwnam(user)
        os.setgroups([])
        os.setgid(found.pw_gid)
        os.setuid(found.pw_uid)


def wait_until_ready(question: Mapping[str, Any], key: str) -> None:
    """Wait for the server to come up, ask, judge. Raises NotReady."""
    process = int(os.environ.get("MAINPID") or 0)
    began = time.monotonic()
    until = began + question["seconds"]
    wait_until_up(question, process, began, until)
    say("asking a question that makes it sample", began)
    for number in range(1, ATTEMPTS + 1):
        asked = time.monotonic()
        try:
            answer = attempt(question, key, min(ANSWER_SECONDS, max(1.0, until - asked)))
        except NotReady as error:
            if not alive(process):
                raise NotReady(gone(process, time.monotonic() - began)) from None
            if number == ATTEMPTS or time.monotonic() > until:
                raise
            say(f"attempt {number} of {ATTEMPTS}: {error}", began)
            time.sleep(BETWEEN_LOOKS)
            continue
        say("ready", began, answer=answer, first_answer_seconds=round(time.monotonic() - asked, 2))
        return


def wait_until_up(question: Mapping[str, Any], process: int, began: float, until: float) -> None:
    """Return when /health says 200. Raises NotReady when the process is gone or time is up."""
    phase, said = "", began
    while True:
        found = health(question["address"])
        if found == 200:
            return
        new = {
            0: "the server does not listen yet: it imports, or loads weights",
            503: "the server listens and says that it is starting",
        }.get(found, f"the server's /health says {found}")
        now = time.monotonic()
        if not alive(process):
            raise NotReady(gone(process, now - began))
        if now > until:
            raise NotReady(
                f"{new} for {now - began:.0f} s, wanted an answer within {question['seconds']} s. "
                "Fix: the lines above say how far it came; a slow disk wants a larger start_timeout"
            )
        if new != phase or now - said > STILL_WAITING:
            say(new, began)
            phase, said = new, now
        time.sleep(BETWEEN_LOOKS)


def health(address: str) -> int:
    """Status of /health; 0 where nobody answers."""
    try:
        with _OPENER.open(address + "/health", timeout=HEALTH_SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def attempt(question: Mapping[str, Any], key: str, seconds: float) -> str:
    """Ask once: the answer, if it has the expected content. Raises NotReady."""
    body = {
        "model": question["model"],
        "messages": [{"role": "user", "content": question["prompt"]}],
        "max_tokens": question["max_tokens"],
        "temperature": question["temperature"],
        "top_p": question["top_p"],
    }
    request = urllib.request.Request(
        question["address"] + "/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with _OPENER.open(request, timeout=seconds) as response:
            reply = json.load(response)
        choice = reply["choices"][0]
        answer, ended = choice["message"]["content"] or "", choice["finish_reason"]
    except urllib.error.HTTPError as error:
        said = error.read(300).decode(errors="replace").replace(key, "[api key]")
        raise NotReady(f"the server refused the question: {error.code} {said!r}. Fix: see the server's log") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise NotReady(f"no answer to the question: {error!r}. Fix: see the server's log") from None
    if question["expected"] not in answer:
        raise NotReady(
            f"asked {question['prompt']!r}, found the answer {answer[:200]!r} (ended by {ended}), "
            f"wanted {question['expected']!r} in it. "
            "Fix: a healthy server that answers wrong has wrong weights or wrong kernels: pytest tests/host tells which"
        )
    return str(answer)


def alive(process: int) -> bool:
    """Whether the process runs; a zombie does not. True where none was named."""
    if not process:
        return True
    try:
        state = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def gone(process: int, seconds: float) -> str:
    return (
        f"the server's process {process} ended {seconds:.0f} s after its start, wanted it to answer. "
        "Fix: its last lines, above this one, say why"
    )


def say(phase: str, began: float, **more: Any) -> None:
    """To the journal, and to status.json in the unit's runtime directory for whoever waits."""
    seconds = round(time.monotonic() - began, 1)
    shown = "".join(f", {name} {value!r}" for name, value in more.items())
    print(f"{phase} ({seconds:.0f} s after the start{shown})", flush=True)
    folder = os.environ.get("RUNTIME_DIRECTORY")
    if folder:
        beside = Path(folder, ".status.json.new")
        beside.write_text(json.dumps({"phase": phase, "seconds": seconds, **more}) + "\n", encoding="utf-8")
        beside.chmod(0o644)
        beside.rename(Path(folder, "status.json"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
