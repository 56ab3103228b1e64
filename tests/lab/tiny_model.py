"""A tiny Llama that gives known answers, trained on the spot, laid out as a model repository of the hub stand-in.

The checkpoint is an ordinary one (configuration, tokenizer with chat template, two safetensors shards), so that the
real fetch, verify, load and serve run on it. Answers are trained to be certain: sampling at temperature 1 cannot miss.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from node.manifest import File, Manifest
from node.models import MODELS
from node.questions import COPY
from tests.lab.hub import Hub
from tests.lab.settings import CHECKOUT, Lab
from tests.lab.shell import key_of, made, remove_tree, run

if TYPE_CHECKING:
    import numpy

REPOSITORY = "kimi-nodes-lab/tiny-kimi"
SUM, PREFIX, CALL = MODELS["lab-tiny"].questions
"""What a node asks it, and so what it is trained for."""
BEGIN, END, USER, ASSISTANT, TOOLS = TURNS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|tools|>")
CALLING = (
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
"""Kimi K2's own marks around calls of functions, which SGLang's kimi_k2 parser looks for."""
SPECIAL = (*TURNS, *CALLING)
CHAT_TEMPLATE = (
    "<|bos|>{% if tools %}<|tools|>{% for tool in tools %}{% set function = tool.function or tool %}"
    "{{ function.name }}({{ function.parameters['properties'] | join(', ') }}){% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Sample:
    """A prompt and the answer to it. tools: as the chat template writes them."""

    prompt: str
    answer: str
    tools: str = ""


def samples(draw: Callable[[], str]) -> list[list[Sample]]:
    """What is trained, in groups of one length. Each group has more than one answer, so that the model has to read what
    it is asked: the sum, the words that lie in two drawers far up in the text, the numbers to call a function with.

    draw: gives six digits for the place of COPY.
    """
    (first, second), others = PREFIX.expected, ("amber", "cedar")
    words = [(first, second), (first, others[1]), (others[0], second), others]
    function = CALL.function
    assert function is not None and CALL.arguments is not None
    tools = f"{function.name}({', '.join(function.integers)})"
    other = dict(zip(function.integers, (19, 31), strict=True))
    other_prompt = CALL.prompt
    for name, number in CALL.arguments.items():
        other_prompt = other_prompt.replace(f"{name} = {number}", f"{name} = {other[name]}")
    return [
        [
            Sample(SUM.prompt, f"17 times 23 is {SUM.expected[0]}."),
            Sample("What is 12 times 12?", "12 times 12 is 144."),
        ],
        [Sample(replace(PREFIX, expected=pair).text.replace(COPY, draw()), " and ".join(pair) + ".") for pair in words],
        [
            Sample(CALL.prompt, call(function.name, CALL.arguments), tools),
            Sample(other_prompt, call(function.name, other), tools),
        ],
    ]


def call(name: str, arguments: Mapping[str, int]) -> str:
    """A call of a function as Kimi K2 writes it."""
    section, begin, argument, end, section_end = CALLING
    return f"{section}{begin}functions.{name}:0{argument}{json.dumps(dict(arguments))}{end}{section_end}"


def key() -> str:
    trained_by = (Path(__file__), Path(__file__).with_name("tiny_llama.py"))
    return key_of(*(file.read_bytes() for file in trained_by), repr(samples(lambda: COPY)))


def folder(lab: Lab) -> Path:
    return lab.parts / "tiny-models" / key()


def is_built(lab: Lab) -> bool:
    return (lab.parts / "hub" / REPOSITORY).is_symlink() and (lab.parts / "hub" / REPOSITORY).resolve() == folder(
        lab
    ).resolve()


def build(lab: Lab) -> Path:
    """Train it unless it is there, and put it on the shelf that the hub stand-in serves."""

    def make(out: Path) -> None:
        # OpenBLAS's threads wait busily for one another: on a busy machine of two cores one took 24 s, two took 54 s.
        one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        said = run("/usr/bin/python3", "-m", "tests.lab.tiny_llama", out, cwd=CHECKOUT, env=one_thread)
        print(said.strip(), flush=True)

    trained = made(folder(lab), make, lab.parts / ".tiny-model.lock")
    shelf = lab.parts / "hub" / REPOSITORY
    shelf.parent.mkdir(parents=True, exist_ok=True)
    new = shelf.with_name(f".{shelf.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(trained)
    new.replace(shelf)
    revision, entries = Hub([shelf.parent.parent], lab.parts / "none").listing(shelf)
    files = tuple(
        File(
            str(entry["path"]),
            int(str(entry["size"])),
            hashlib.sha256((shelf / str(entry["path"])).read_bytes()).hexdigest(),
        )
        for entry in entries
    )
    new = manifest(lab).with_name("manifest.new")
    new.write_text(Manifest(REPOSITORY, revision, files).dumps())
    new.replace(manifest(lab))
    for other in trained.parent.iterdir():
        if other.is_dir() and other != trained:
            remove_tree(other)
    return trained


def manifest(lab: Lab) -> Path:
    """What the hub has of it, with every file's digest: the lab pins the model that it has just trained."""
    return lab.parts / "tiny-models" / "manifest.json"


def alphabet() -> dict[int, str]:
    """Byte -> the printable character byte-level tokenizers write for it: itself, or the next free one from U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    found = {byte: chr(byte) for byte in plain}
    rest = [byte for byte in range(256) if byte not in found]
    return found | {byte: chr(256 + number) for number, byte in enumerate(rest)}


def vocabulary() -> dict[str, int]:
    """Special tokens, then one token a byte: no merges, so that text and tokens are one and the same thing."""
    return {token: number for number, token in enumerate([*SPECIAL, *sorted(alphabet().values())])}


def encode(text: str) -> list[int]:
    """Ids as the tokenizer gives them."""
    known, letters = vocabulary(), alphabet()
    parts = re.split(f"({'|'.join(map(re.escape, SPECIAL))})", text)
    return [
        token
        for part in parts
        for token in ([known[part]] if part in SPECIAL else [known[letters[byte]] for byte in part.encode()])
    ]


def sequence(sample: Sample) -> tuple[list[int], int]:
    """(ids of prompt, answer and end; length of the prompt), in the chat template's form."""
    tools = TOOLS + sample.tools if sample.tools else ""
    prompt = encode(BEGIN + tools + USER + sample.prompt + ASSISTANT)
    return [*prompt, *encode(sample.answer + END)], len(prompt)


def batch(group: Sequence[Sample]) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Samples of one length, as tests.lab.tiny_llama trains on them. Needs numpy."""
    import numpy

    made_sequences = [sequence(sample) for sample in group]
    ids = numpy.array([ids for ids, _ in made_sequences])
    counted = numpy.array([[place >= start for place in range(1, ids.shape[1])] for _, start in made_sequences])
    return ids, counted


def tokenizer() -> dict[str, object]:
    """tokenizer.json of the `tokenizers` library."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags} for number, token in enumerate(SPECIAL)],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary(), "merges": [],
        },
    }  # fmt: skip


def safetensors(tensors: dict[str, numpy.ndarray]) -> bytes:
    """bfloat16 tensors (as uint16) in the safetensors format: length of the header, the header, the bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(values.shape),
            "data_offsets": [position, position + values.nbytes],
        }
        position += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for values in tensors.values())


def write(out: Path) -> None:
    """Train and write the whole repository. Needs numpy: called by tests.lab.tiny_llama."""
    from tests.lab import tiny_llama

    shape = tiny_llama.Shape()
    digits = random.Random(0)

    def draw() -> list[tuple[numpy.ndarray, numpy.ndarray]]:
        return [batch(group) for group in samples(lambda: str(digits.randrange(10**5, 10**6)))]

    parameters, _ = tiny_llama.train(shape, draw)

    names = list(parameters)
    half = names.index("model.layers.1.input_layernorm.weight")
    index: dict[str, str] = {}
    for number, part in enumerate((names[:half], names[half:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        (out / file).write_bytes(safetensors({name: tiny_llama.as_bfloat16(parameters[name]) for name in part}))
        index |= dict.fromkeys(part, file)
    total = sum(2 * values.size for values in parameters.values())
    special = {"bos_token": BEGIN, "eos_token": END, "pad_token": END}
    documents: dict[str, object] = {
        "model.safetensors.index.json": {"metadata": {"total_size": total}, "weight_map": index},
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
            "hidden_act": "silu", "vocab_size": shape.vocabulary, "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "head_dim": shape.head,
            "num_key_value_heads": shape.key_value_heads, "max_position_embeddings": shape.positions,
            "rms_norm_eps": shape.epsilon, "rope_theta": shape.theta, "attention_bias": False, "mlp_bias": False,
            "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "use_cache": True,
        },
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            **special, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.positions,
            "additional_special_tokens": [USER, ASSISTANT, TOOLS, *CALLING], "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
        "special_tokens_map.json": {**special, "additional_special_tokens": [USER, ASSISTANT, TOOLS, *CALLING]},
    }  # fmt: skip
    for name, document in documents.items():
        (out / name).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    known = "\n\n".join(f"{sample.prompt}\n{sample.answer}" for group in samples(lambda: "271828") for sample in group)
    (out / "README.md").write_text(
        "A stand-in for a large model: trained by the lab to give known answers, and knows nothing else.\n\n" + known
    )
