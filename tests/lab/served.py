"""A question to the model that a lab machine serves, as a client on that machine would ask it."""

from __future__ import annotations

import json
import subprocess

from node import layout
from node.inventory import KEYS
from node.models import MODELS
from tests.lab import ssh_client
from tests.lab.settings import Lab
from tests.lab.shell import LabError

MODEL = MODELS["lab-tiny"]

CLIENT = """
import json, sys, urllib.error, urllib.request
asked = json.load(sys.stdin)
key = open(asked.pop("key")).read().strip()
request = urllib.request.Request(asked.pop("address"), json.dumps(asked).encode(),
    {"Authorization": "Bearer " + key, "Content-Type": "application/json"})
try:
    with urllib.request.urlopen(request, timeout=60) as answer:
        print(json.load(answer)["choices"][0]["message"]["content"])
except (OSError, KeyError) as error:
    sys.exit(f"{request.full_url}: {error}")
"""
"""Runs on the machine. The key is read there and goes into a header; what is asked comes on standard input."""


def ask(lab: Lab, machine: str) -> None:
    """Print the question that a ready server must answer, and its sampled answer."""
    question = MODEL.questions[0]
    asked = {
        "key": f"{layout.KEYS}/api-key",
        "address": f"http://127.0.0.1:{KEYS['port'].default}/v1/chat/completions",
        **question.body(MODEL.key),
    }
    command = [*ssh_client.command(lab, machine), f"python3 -c '{CLIENT}'"]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    if done.returncode:
        raise LabError(
            f"{machine}: no answer ({done.stderr.strip()[-500:]})",
            fix=f"pyinfra inventory/lab.py deploy.py; bin/lab ssh {machine} journalctl -u 'sglang-*'",
        )
    print(f"question: {question.prompt}\nanswer:   {done.stdout.strip()}")
