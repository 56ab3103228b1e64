"""Is the server ready? Ask it questions that take the ways which real requests take, and look at what it answers.

    ready_probe.py READINESS             in ExecStartPost= of the server's unit: wait until it answers all of them right
    ready_probe.py READINESS --now       by hand: ask each once, print a line of JSON for each answer

Exit 0: every answer is right. Exit 1: one is not, or the server's main process ($MAINPID) is gone, or time is up; the
last line says which. READINESS is JSON, made of node/questions.py:

    {"address": "http://127.0.0.1:30000", "key": path, "user": name, "seconds": int, "copy": text, "questions": [
        {"name": text, "body": of a request to /v1/chat/completions, "times": int, "expected": [words that the
         answer must contain, each by itself]}
         or, in place of "expected", "call": {"name": function, "arguments": {name: value}}]}

`copy` stands in a prompt for six digits, drawn for each attempt, so that its text is new to the server the first time.
With "times": 2 the same text is asked again: then it is read from the prefix cache, and an engine can be right at
first and say rubbish the second.

It is started as root, because systemd before 254 hides credentials from ExecStartPost=; it reads the key and goes on as
`user`.

A listening port, /v1/models and /health are no proof: the kernels that sample are loaded, and compiled where the cache
is cold, by the first request with top_p, and SGLang has been seen healthy with a dead scheduler, or saying rubbish.
/health is asked only to know when the questions may come: it answers 503 until the weights are loaded, and asking often
piles up work.
"""

from __future__ import annotations

import json
import os
import pwd
import random
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ATTEMPTS = 3  # of each question. Temperature is not zero: a model may miss once
BETWEEN_LOOKS = 2.0  # seconds
STILL_WAITING = 30.0  # seconds between two lines that say so
HEALTH_SECONDS = 30.0  # SGLang takes up to 20 s itself to find out
ANSWER_SECONDS = 600.0
WRONG = "a healthy server that answers wrong has wrong weights or wrong kernels: pytest tests/host tells which"
READ_BACK_WRONG = (
    "what is computed is right, what is read back from the prefix cache is not, and every later message of a chat is "
    "read so: deploy another profile or release"
)
UNPARSED_CALL = re.compile(r"<\|?tool_call|functions\.\w+:\d")  # as Kimi K2, Qwen and others begin one

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a proxy: it is this machine


class NotReady(Exception):
    """Why not, ending with `Fix: ...`."""


class Wrong(Exception):
    """What was asked, found and wanted of one answer."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2) or arguments[1:] not in ([], ["--now"]):
        print(__doc__, file=sys.stderr)
        return 2
    readiness = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        key = read_key(Path(readiness["key"]))
        become(readiness["user"])
        if arguments[1:]:
            for question in readiness["questions"]:
                for answer in attempt(readiness, question, key, time.monotonic() + ANSWER_SECONDS):
                    print(json.dumps(answer, ensure_ascii=False), flush=True)
        else:
            wait_until_ready(readiness, key)
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


def wait_until_ready(readiness: Mapping[str, Any], key: str) -> None:
    """Wait for the server to come up, ask, judge. Raises NotReady."""
    process = int(os.environ.get("MAINPID") or 0)
    began = time.monotonic()
    until = began + readiness["seconds"]
    wait_until_up(readiness, process, began, until)
    answers: list[dict[str, Any]] = []
    for question in readiness["questions"]:
        say(f"asking: {question['name']}", began)
        for answer in with_patience(readiness, question, key, process, began, until):
            answers.append(answer)
            print(told(answer), flush=True)
    say("ready", began, answers=answers)


def with_patience(
    readiness: Mapping[str, Any], question: Mapping[str, Any], key: str, process: int, began: float, until: float
) -> list[dict[str, Any]]:
    """What `attempt` gives, of a few. Raises NotReady."""
    for number in range(1, ATTEMPTS + 1):
        try:
            return attempt(readiness, question, key, until)
        except NotReady as error:
            if not alive(process):
                raise NotReady(gone(process, time.monotonic() - began)) from None
            if number == ATTEMPTS or time.monotonic() > until:
                raise
            say(f"attempt {number} of {ATTEMPTS}: {error}", began)
            time.sleep(BETWEEN_LOOKS)
    raise AssertionError("the last attempt returns or raises")


def wait_until_up(readiness: Mapping[str, Any], process: int, began: float, until: float) -> None:
    """Return when /health says 200. Raises NotReady when the process is gone or time is up."""
    phase, said = "", began
    while True:
        found = health(readiness["address"])
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
                f"{new} for {now - began:.0f} s, wanted an answer within {readiness['seconds']} s. "
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


def attempt(readiness: Mapping[str, Any], question: Mapping[str, Any], key: str, until: float) -> list[dict[str, Any]]:
    """Ask as many times in a row as the question says, always the same: {"question", "answer", "seconds",
    "prompt_tokens", "cached_tokens"} of each time. Raises NotReady at the first that is not right."""
    digits = str(random.SystemRandom().randrange(10**5, 10**6))
    body = {**question["body"]}
    body["messages"] = [
        {**message, "content": message["content"].replace(readiness["copy"], digits)} for message in body["messages"]
    ]
    answers: list[dict[str, Any]] = []
    for turn in range(1, question["times"] + 1):
        name = question["name"] if turn == 1 else f"{question['name']}, again"
        asked = time.monotonic()
        reply = ask(readiness["address"], body, key, name, min(ANSWER_SECONDS, max(1.0, until - asked)))
        tokens = usage(reply)
        try:
            choice = reply["choices"][0]
            message, ended = choice["message"], choice["finish_reason"]
            judge = judged_call if "call" in question else judged_answer
            answer = judge(question, message, ended)
        except (LookupError, TypeError, AttributeError) as error:
            raise NotReady(
                f"{name}: found a reply of another form ({error!r}), wanted an OpenAI chat completion. "
                "Fix: see the server's log"
            ) from None
        except Wrong as error:
            if turn == 1:
                raise NotReady(f"{name}: {error}. Fix: {error.fix}") from None
            raise NotReady(f"{name}: {after_a_right_one(tokens)}{error}. Fix: {READ_BACK_WRONG}") from None
        seconds = round(time.monotonic() - asked, 2)
        answers.append({"question": name, "answer": answer, "seconds": seconds, **tokens})
    return answers


def ask(address: str, body: Mapping[str, Any], key: str, name: str, seconds: float) -> dict[str, Any]:
    """The server's reply. Raises NotReady."""
    request = urllib.request.Request(
        address + "/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with _OPENER.open(request, timeout=seconds) as response:
            reply = json.load(response)
    except urllib.error.HTTPError as error:
        said = error.read(300).decode(errors="replace").replace(key, "[api key]")
        raise NotReady(
            f"{name}: the server refused the question: {error.code} {said!r}. Fix: see the server's log"
        ) from None
    except TimeoutError:
        raise NotReady(
            f"{name}: no answer to the question within {seconds:.0f} s. Fix: see the server's log; a slow disk wants a "
            "larger start_timeout"
        ) from None
    except (OSError, ValueError) as error:
        raise NotReady(f"{name}: no answer to the question: {error!r}. Fix: see the server's log") from None
    if not isinstance(reply, dict):
        raise NotReady(
            f"{name}: found a reply that is a {type(reply).__name__}, wanted an object. Fix: see the server's log"
        )
    return reply


def usage(reply: Mapping[str, Any]) -> dict[str, int | None]:
    """{"prompt_tokens", "cached_tokens"}: of the prompt, and of these from the prefix cache. None where the reply does
    not say. Of none from the cache, SGLang before 0.5.23 says nothing (openai/usage_processor.py)."""
    said = reply.get("usage")
    if not isinstance(said, dict):
        return {"prompt_tokens": None, "cached_tokens": None}
    details = said.get("prompt_tokens_details") or {}
    return {"prompt_tokens": said.get("prompt_tokens"), "cached_tokens": details.get("cached_tokens", 0)}


def after_a_right_one(tokens: Mapping[str, int | None]) -> str:
    """What is to be known of a wrong answer that follows a right one to the same text."""
    return (
        f"the same text was answered right the first time; now, with {tokens['cached_tokens']} of its "
        f"{tokens['prompt_tokens']} tokens from the prefix cache, "
    )


def judged_answer(question: Mapping[str, Any], message: Mapping[str, Any], ended: str) -> str:
    """The answer, if it has the expected content. Raises Wrong."""
    answer = message["content"] or ""
    if all(has_word(answer, text) for text in question["expected"]):
        return str(answer)
    raise Wrong(
        f"asked {last_line(question)!r}, found the answer {shown(message, ended)}, "
        f"wanted {' and '.join(map(repr, question['expected']))} in it",
        WRONG,
    )


def has_word(answer: str, text: str) -> bool:
    """Whether a word or number stands in an answer by itself: rubbish can hold its letters, as in "ambheronmaplea"."""
    return re.search(rf"(?<!\w){re.escape(text)}(?!\w)", answer, re.IGNORECASE) is not None


def judged_call(question: Mapping[str, Any], message: Mapping[str, Any], ended: str) -> str:
    """The call, as name(arguments), if it is the expected one. Raises Wrong."""
    wanted = question["call"]
    asked = f"asked {last_line(question)!r}, "
    call = f"wanted a call of {wanted['name']} with {json.dumps(wanted['arguments'])} in tool_calls"
    parser = "--tool-call-parser must be the model's; node/models.py has it"
    calls = message.get("tool_calls") or []
    if not calls:
        said = shown(message, ended)
        if UNPARSED_CALL.search(f"{message.get('content')} {message.get('reasoning_content')}"):
            raise Wrong(f"{asked}found a call left unparsed, {said}, {call}", parser)
        raise Wrong(
            f"{asked}found no call but the answer {said}, {call}",
            "see whether the chat template of the weights renders tools, and pytest tests/host whether they are right",
        )
    function = calls[0]["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, TypeError):
        given = str(function["arguments"])[:200]
        raise Wrong(
            f"{asked}found a call of {function['name']} with {given!r}, which is no JSON, {call}", parser
        ) from None
    if (function["name"], arguments) != (wanted["name"], wanted["arguments"]):
        given = json.dumps(arguments)[:200]
        raise Wrong(f"{asked}found a call of {function['name']} with {given}, {call}", WRONG)
    return f"{function['name']}({json.dumps(arguments)})"


def last_line(question: Mapping[str, Any]) -> str:
    """Of what was asked: a register in front of it says nothing."""
    return str(question["body"]["messages"][-1]["content"]).rpartition("\n")[2]


def shown(message: Mapping[str, Any], ended: str) -> str:
    """What was said, for a message. A model that thinks first says nothing else when its tokens end on the way."""
    said = repr(str(message.get("content") or "")[:200])
    thought = str(message.get("reasoning_content") or "")
    return f"{said} (ended by {ended}{f', after {len(thought)} characters of thinking' if thought else ''})"


def told(answer: Mapping[str, Any]) -> str:
    """An answer as a line of the journal."""
    tokens = "" if answer["prompt_tokens"] is None else f", {answer['prompt_tokens']} tokens asked"
    cached = "" if answer["cached_tokens"] is None else f", {answer['cached_tokens']} of them from the prefix cache"
    return f"{answer['question']}: {str(answer['answer'])[:200]!r} after {answer['seconds']} s{tokens}{cached}"


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
    """To the journal, and with what more there is to status.json in the unit's runtime directory for whoever waits."""
    seconds = round(time.monotonic() - began, 1)
    print(f"{phase} ({seconds:.0f} s after the start)", flush=True)
    folder = os.environ.get("RUNTIME_DIRECTORY")
    if folder:
        beside = Path(folder, ".status.json.new")
        beside.write_text(json.dumps({"phase": phase, "seconds": seconds, **more}) + "\n", encoding="utf-8")
        beside.chmod(0o644)
        beside.rename(Path(folder, "status.json"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
