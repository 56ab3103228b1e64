"""Runs in a release's environment for test_engine_arguments: its own parser and its own checks of argument vectors.

argv: JSON, {"gpu", "capability": [12, 0], "memory_mib", "count", "vectors": {name: [words]}, "asked": [attribute]}.
There is no GPU in the lab, so torch is made to report these; nvidia-smi, which SGLang also asks, is the lab's. Each
vector is looked at in a child of its own, because SGLang remembers what it decided in its environment. answer.json:
name -> {"resolved": {attribute: value}, "largest graph": its batch} or {"refused": text}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import torch

asked = json.loads(sys.argv[1])
major, minor = asked["capability"]
memory = asked["memory_mib"] << 20

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: asked["count"]
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (major, minor)
torch.cuda.get_device_name = lambda device=None: asked["gpu"]
torch.cuda.mem_get_info = lambda device=None: (memory, memory)
torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
    name=asked["gpu"], major=major, minor=minor, total_memory=memory, multi_processor_count=148, gcnArchName=""
)

from sglang.srt.server_args import prepare_server_args  # noqa: E402


def judged(vector: list[str]) -> dict[str, Any]:
    try:
        arguments = prepare_server_args(vector)
        if hasattr(arguments, "resolve_once"):  # 0.5.23 decides when it is launched; the older ones when it is made
            arguments.resolve_once()
        arguments.check_server_args()
    except SystemExit as error:
        return {"refused": f"argument parser: exit {error.code}"}
    except Exception as error:
        traceback.print_exc()
        return {"refused": f"{type(error).__name__}: {error}"}
    resolved = arguments.resolved_dict() if hasattr(arguments, "resolved_dict") else vars(arguments)
    graphs = resolved.get("cuda_graph_config")  # plain attributes in 0.5.12.post1, a record later, a dict in 0.5.23
    if graphs is None:
        largest = resolved["cuda_graph_max_bs"]
    else:
        largest = graphs["decode"]["max_bs"] if isinstance(graphs, dict) else graphs.decode.max_bs
    return {"resolved": {name: resolved[name] for name in asked["asked"]}, "largest graph": largest}


found = {}
for name, vector in asked["vectors"].items():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        print(f"--- {name}", file=sys.stderr, flush=True)
        answer = judged(vector)
        modules = [each for each in sys.modules if each.startswith(("sglang.", "transformers."))]
        os.write(writer, json.dumps([answer, modules], default=str).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    found[name], modules = json.loads(text) if text else ({"refused": "the process died"}, [])
    for module in modules if len(found) == 1 else []:  # so that the next children need not import them again
        try:
            __import__(module)
        except Exception as error:
            print(f"{module}: {error}", file=sys.stderr)

Path(os.environ["WORK"], "answer.json").write_text(json.dumps(found))
