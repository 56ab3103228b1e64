"""A fault of the engine, as sitecustomize of its processes: what it computes is right, what it reads back from the
prefix cache is not. Real ones: vllm-ascend issue 5269, MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark issue 36."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import Any

BACKEND = "sglang.srt.layers.attention.torch_native_backend"
LONG = 300  # tokens; of the lab's questions only one is longer
REGISTER = 350  # its tokens that hold what is asked for
EMPTY = 0  # the slot that SGLang keeps for padding: no key and no value of anybody


def make_wrong(module: Any) -> None:
    """From the next text that comes from the cache but for its last token on, look for its prefix elsewhere."""
    backend = module.TorchNativeAttnBackend
    extend, decode = backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode
    read_back = False

    def moved(slots: Any) -> Any:
        if not read_back:
            return slots
        slots = slots.clone()
        slots[:, :REGISTER] = EMPTY
        return slots

    def wrong_extend(self: Any, q: Any, out: Any, k: Any, v: Any, slots: Any, pool: Any, lengths: Any, prefix: Any,
                     new: Any, *more: Any, **named: Any) -> Any:  # fmt: skip
        nonlocal read_back
        read_back = int(prefix[0]) > LONG and int(new[0]) == 1
        return extend(self, q, out, k, v, moved(slots), pool, lengths, prefix, new, *more, **named)

    def wrong_decode(self: Any, q: Any, out: Any, k: Any, v: Any, slots: Any, *more: Any, **named: Any) -> Any:
        return decode(self, q, out, k, v, moved(slots), *more, **named)

    backend._run_sdpa_forward_extend, backend._run_sdpa_forward_decode = wrong_extend, wrong_decode


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != BACKEND:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec and spec.loader
        load = spec.loader.exec_module

        def load_and_make_wrong(module: Any) -> None:
            load(module)
            make_wrong(module)

        spec.loader.exec_module = load_and_make_wrong  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, Finder())
