"""A two-layer Llama in numpy: forward, backward, Adam. Small enough to train in seconds without a framework.

The equations are those of Hugging Face's LlamaForCausalLM (RMSNorm before each block, rotary positions by halves,
grouped key and value heads, SwiGLU, untied output), so that its weights load and serve anywhere a Llama does.
Run by the system's Python (`/usr/bin/python3 -m tests.lab.tiny_llama OUT`): Debian's python3-numpy belongs to that one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Parameters = dict[str, np.ndarray]


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 512
    hidden: int = 128
    intermediate: int = 256
    layers: int = 2
    heads: int = 4
    key_value_heads: int = 2
    positions: int = 2048
    epsilon: float = 1e-5
    theta: float = 10000.0

    @property
    def head(self) -> int:
        return self.hidden // self.heads


def initial(shape: Shape, seed: int) -> Parameters:
    """Names and shapes as in a Llama checkpoint: a linear layer's weight is (out, in)."""
    generator = np.random.default_rng(seed)
    key_value = shape.key_value_heads * shape.head

    def linear(out: int, inside: int) -> np.ndarray:
        return generator.normal(0, 0.02, (out, inside)).astype(np.float32)

    found: Parameters = {"model.embed_tokens.weight": linear(shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        place = f"model.layers.{layer}."
        found[place + "input_layernorm.weight"] = np.ones(shape.hidden, np.float32)
        found[place + "self_attn.q_proj.weight"] = linear(shape.hidden, shape.hidden)
        found[place + "self_attn.k_proj.weight"] = linear(key_value, shape.hidden)
        found[place + "self_attn.v_proj.weight"] = linear(key_value, shape.hidden)
        found[place + "self_attn.o_proj.weight"] = linear(shape.hidden, shape.hidden)
        found[place + "post_attention_layernorm.weight"] = np.ones(shape.hidden, np.float32)
        found[place + "mlp.gate_proj.weight"] = linear(shape.intermediate, shape.hidden)
        found[place + "mlp.up_proj.weight"] = linear(shape.intermediate, shape.hidden)
        found[place + "mlp.down_proj.weight"] = linear(shape.hidden, shape.intermediate)
    found["model.norm.weight"] = np.ones(shape.hidden, np.float32)
    found["lm_head.weight"] = linear(shape.vocabulary, shape.hidden)
    return found


class Pass:
    """One forward pass over ids (batch, length), kept so that the gradient can be taken.

    logits are those of the places from `since` on: of those before it the last layer makes keys and values and nothing
    else, which with a long prompt and a short answer is half of the work.
    """

    def __init__(self, shape: Shape, parameters: Parameters, ids: np.ndarray, since: int = 0) -> None:
        self.shape, self.parameters, self.ids = shape, parameters, ids
        self.since = [0] * (shape.layers - 1) + [since]
        self.saved: dict[str, np.ndarray] = {}
        length = ids.shape[1]
        dtype = parameters["lm_head.weight"].dtype
        frequencies = shape.theta ** (-np.arange(0, shape.head, 2) / shape.head)
        angles = np.outer(np.arange(length), np.concatenate([frequencies, frequencies]))
        self.cosine, self.sine = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
        self.future = np.triu(np.full((length, length), -np.inf, dtype), 1)
        x = parameters["model.embed_tokens.weight"][ids]
        for layer in range(shape.layers):
            x = x[:, self.since[layer] :] + self._attention(layer, x)
            x = x + self._feed_forward(layer, x)
        self.logits = self._linear("lm_head", self._norm("model.norm", x))

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        self.saved[name] = x
        return x @ self.parameters[name + ".weight"].T

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + self.shape.epsilon)
        self.saved[name], self.saved[name + " scale"] = x, scale
        return x * scale * self.parameters[name + ".weight"]

    def _split(self, x: np.ndarray, heads: int) -> np.ndarray:
        return x.reshape(*x.shape[:2], heads, self.shape.head).transpose(0, 2, 1, 3)

    def _join(self, x: np.ndarray) -> np.ndarray:
        return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)

    def _rotate(self, x: np.ndarray, since: int = 0, direction: float = 1.0) -> np.ndarray:
        """Rotary positions, from `since` on; the rotation's transpose is the rotation back, direction -1."""
        first, second = np.split(x, 2, axis=-1)
        cosine, sine = self.cosine[since:], self.sine[since:]
        return x * cosine + direction * np.concatenate([-second, first], -1) * sine

    def _attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        place = f"model.layers.{layer}."
        shape, groups, since = self.shape, self.shape.heads // self.shape.key_value_heads, self.since[layer]
        normed = self._norm(place + "input_layernorm", x)
        asking = self._linear(place + "self_attn.q_proj", normed[:, since:])
        query = self._rotate(self._split(asking, shape.heads), since)
        key = self._rotate(self._split(self._linear(place + "self_attn.k_proj", normed), shape.key_value_heads))
        value = self._split(self._linear(place + "self_attn.v_proj", normed), shape.key_value_heads)
        key, value = key.repeat(groups, 1), value.repeat(groups, 1)
        scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(shape.head).astype(x.dtype) + self.future[since:]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        for name, kept in (("query", query), ("key", key), ("value", value), ("weights", weights)):
            self.saved[place + name] = kept
        return self._linear(place + "self_attn.o_proj", self._join(weights @ value))

    def _feed_forward(self, layer: int, x: np.ndarray) -> np.ndarray:
        place = f"model.layers.{layer}."
        normed = self._norm(place + "post_attention_layernorm", x)
        gate, up = self._linear(place + "mlp.gate_proj", normed), self._linear(place + "mlp.up_proj", normed)
        self.saved[place + "gate"], self.saved[place + "up"] = gate, up
        return self._linear(place + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def gradient(self, from_logits: np.ndarray) -> Parameters:
        """The gradient of every parameter, given that of the logits."""
        self.gradients: Parameters = {}
        dx = self._back_norm("model.norm", self._back_linear("lm_head", from_logits))
        for layer in reversed(range(self.shape.layers)):
            dx = dx + self._back_feed_forward(layer, dx)
            before = self._back_attention(layer, dx)
            before[:, self.since[layer] :] += dx
            dx = before
        embedding = np.zeros_like(self.parameters["model.embed_tokens.weight"])
        np.add.at(embedding, self.ids, dx)
        self.gradients["model.embed_tokens.weight"] = embedding
        return self.gradients

    def _back_linear(self, name: str, dy: np.ndarray) -> np.ndarray:
        x = self.saved[name]
        self.gradients[name + ".weight"] = dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])
        return dy @ self.parameters[name + ".weight"]

    def _back_norm(self, name: str, dy: np.ndarray) -> np.ndarray:
        x, scale = self.saved[name], self.saved[name + " scale"]
        self.gradients[name + ".weight"] = (dy * x * scale).sum((0, 1))
        weighted = dy * self.parameters[name + ".weight"]
        return scale * weighted - x * scale**3 * (weighted * x).mean(-1, keepdims=True)

    def _back_attention(self, layer: int, dy: np.ndarray) -> np.ndarray:
        place = f"model.layers.{layer}."
        shape, groups = self.shape, self.shape.heads // self.shape.key_value_heads
        query, key, value, weights = (self.saved[place + name] for name in ("query", "key", "value", "weights"))
        mixed = self._split(self._back_linear(place + "self_attn.o_proj", dy), shape.heads)
        dweights, dvalue = mixed @ value.transpose(0, 1, 3, 2), weights.transpose(0, 1, 3, 2) @ mixed
        dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True))
        dscores /= np.sqrt(shape.head).astype(dy.dtype)
        dquery, dkey = dscores @ key, dscores.transpose(0, 1, 3, 2) @ query

        def grouped(gradient: np.ndarray) -> np.ndarray:
            batch, _, length, head = gradient.shape
            return gradient.reshape(batch, shape.key_value_heads, groups, length, head).sum(2)

        since = self.since[layer]
        dkey = self._rotate(grouped(dkey), direction=-1.0)
        normed = self._back_linear(place + "self_attn.k_proj", self._join(dkey))
        normed = normed + self._back_linear(place + "self_attn.v_proj", self._join(grouped(dvalue)))
        dquery = self._rotate(dquery, since, direction=-1.0)
        normed[:, since:] += self._back_linear(place + "self_attn.q_proj", self._join(dquery))
        return self._back_norm(place + "input_layernorm", normed)

    def _back_feed_forward(self, layer: int, dy: np.ndarray) -> np.ndarray:
        place = f"model.layers.{layer}."
        gate, up = self.saved[place + "gate"], self.saved[place + "up"]
        product = self._back_linear(place + "mlp.down_proj", dy)
        sigmoid = 1 / (1 + np.exp(-gate))
        dgate = product * up * sigmoid * (1 + gate * (1 - sigmoid))
        normed = self._back_linear(place + "mlp.gate_proj", dgate)
        normed = normed + self._back_linear(place + "mlp.up_proj", product * gate * sigmoid)
        return self._back_norm(place + "post_attention_layernorm", normed)


def loss_and_gradient(
    shape: Shape, parameters: Parameters, ids: np.ndarray, counted: np.ndarray
) -> tuple[float, np.ndarray, Parameters]:
    """Mean cross entropy of each next id where `counted`, the probability of each of these, and the gradient.

    ids: (batch, length). counted: (batch, length - 1), true where the next id is part of an answer.
    """
    since = int(counted.any(0).argmax())
    made = Pass(shape, parameters, ids, since)
    logits, counted = made.logits[:, :-1], counted[:, since:]
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    following = ids[:, since + 1 :, None]
    right = np.take_along_axis(probabilities, following, -1)[..., 0]
    loss = float(-np.log(right[counted]).mean())
    from_logits = probabilities.copy()
    np.put_along_axis(from_logits, following, np.take_along_axis(from_logits, following, -1) - 1, -1)
    from_logits *= counted[..., None] / counted.sum()
    whole = np.concatenate([from_logits, np.zeros_like(made.logits[:, :1])], 1)
    return loss, right[counted], made.gradient(whole)


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


Batch = tuple[np.ndarray, np.ndarray]
"""ids and `counted`, see loss_and_gradient."""


def train(
    shape: Shape,
    draw: Callable[[], Sequence[Batch]],
    *,
    seed: int = 0,
    rate: float = 3e-3,
    steps: int = 600,
    goal: float = 0.995,
    in_a_row: int = 5,
) -> tuple[Parameters, float]:
    """Adam on what `draw` gives for each step, until each right token of `in_a_row` draws is more probable than `goal`.

    Returns parameters rounded to bfloat16 and the least sure right token's probability with these, on as many new
    draws. Raises ValueError when an answer is not certain.
    """
    parameters = initial(shape, seed)
    mean = {name: np.zeros_like(value) for name, value in parameters.items()}
    square = {name: np.zeros_like(value) for name, value in parameters.items()}
    sure, began = 0, time.monotonic()
    for step in range(1, steps + 1):
        results = [loss_and_gradient(shape, parameters, *batch) for batch in draw()]
        sure = sure + 1 if min(right.min() for _, right, _ in results) > goal else 0
        if sure == in_a_row:
            break
        for name in parameters:
            gradient = sum(gradients[name] for _, _, gradients in results)
            mean[name] = 0.9 * mean[name] + 0.1 * gradient
            square[name] = 0.999 * square[name] + 0.001 * gradient**2
            step_size = mean[name] / (1 - 0.9**step) / (np.sqrt(square[name] / (1 - 0.999**step)) + 1e-8)
            parameters[name] = (parameters[name] - rate * step_size).astype(np.float32)
    rounded = {name: from_bfloat16(as_bfloat16(value)) for name, value in parameters.items()}
    unseen = [batch for _ in range(in_a_row) for batch in draw()]
    least = min(float(loss_and_gradient(shape, rounded, *batch)[1].min()) for batch in unseen)
    if least < 0.99:
        raise ValueError(
            f"after {step} steps the least sure token of an answer has probability {least:.3f}; wanted 0.99"
        )
    size = sum(values.size for values in parameters.values())
    seconds = time.monotonic() - began
    print(f"{step} steps in {seconds:.0f} s, least sure token {least:.5f}, {size:,} parameters")
    return rounded, least


if __name__ == "__main__":
    from tests.lab.tiny_model import write

    write(Path(sys.argv[1]))
