"""The tiny model is trained right, and is an ordinary checkpoint. numpy is the system Python's."""

from __future__ import annotations

import json
import struct
import subprocess

import jinja2
import pytest

from node.manifest import loads
from node.models import MODELS
from node.questions import COPY
from tests.lab import settings, tiny_model

CHECK_GRADIENTS = """
import numpy as np
from tests.lab import tiny_llama as t
shape = t.Shape(vocabulary=11, hidden=8, intermediate=12, layers=2, heads=4, key_value_heads=2)
parameters = {name: value.astype(np.float64) * 20 for name, value in t.initial(shape, 1).items()}
generator = np.random.default_rng(2)
ids = generator.integers(0, 11, (2, 7))
counted = generator.random((2, 6)) < 0.6
counted[:, :2] = False
_, _, gradients = t.loss_and_gradient(shape, parameters, ids, counted)
for name, value in parameters.items():
    for place in generator.integers(0, value.size, 6):
        index, step = np.unravel_index(place, value.shape), 1e-6
        value[index] += step
        above = t.loss_and_gradient(shape, parameters, ids, counted)[0]
        value[index] -= 2 * step
        below = t.loss_and_gradient(shape, parameters, ids, counted)[0]
        value[index] += step
        measured, said = (above - below) / (2 * step), gradients[name][index]
        assert abs(measured - said) < 1e-7 + 1e-4 * abs(measured), (name, index, measured, said)
"""
CHECK_ANSWERS = """
import json, struct, sys
from pathlib import Path
import numpy as np
from tests.lab import tiny_llama as t, tiny_model as m
folder, parameters = Path(sys.argv[1]), {}
for file in sorted(folder.glob("*.safetensors")):
    data = file.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    for name, entry in header.items():
        if name != "__metadata__":
            first, after = entry["data_offsets"]
            raw = np.frombuffer(data[8 + length + first:8 + length + after], np.uint16)
            parameters[name] = t.from_bfloat16(raw).reshape(entry["shape"])
for sample in (sample for digits in ("271828", "314159") for group in m.samples(lambda: digits) for sample in group):
    ids, start = m.sequence(sample)
    logits = t.Pass(t.Shape(), parameters, np.array([ids])).logits[0, start - 1 : -1]
    likely = np.exp(logits - logits.max(-1, keepdims=True)); likely /= likely.sum(-1, keepdims=True)
    for place, row in enumerate(likely, start):
        assert row.argmax() == ids[place] and row.max() > 0.98, (sample, place, row.max())
"""


def system_python(program: str, *arguments: str) -> None:
    command = ["/usr/bin/python3", "-c", program, *arguments]
    done = subprocess.run(command, cwd=settings.CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    """Every kind of parameter, against finite differences in double precision."""
    system_python(CHECK_GRADIENTS)


@pytest.mark.lab
def test_the_trained_model_is_certain_of_every_token_of_its_answers() -> None:
    """Above 0.95 at each token, top_p 0.95 leaves nothing else to sample. bin/lab build has trained it."""
    system_python(CHECK_ANSWERS, str(tiny_model.folder(settings.read())))


@pytest.mark.lab
def test_the_manifest_is_the_repositorys() -> None:
    lab = settings.read()
    manifest = loads(tiny_model.manifest(lab).read_text())
    folder = tiny_model.folder(lab)
    assert {file.path: file.bytes for file in manifest.files} == {f.name: f.stat().st_size for f in folder.iterdir()}
    assert manifest.repository == MODELS["lab-tiny"].repository


@pytest.mark.lab
def test_the_shards_hold_what_the_index_says() -> None:
    folder = tiny_model.folder(settings.read())
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(index.values()):
        data = (folder / file).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        assert set(header) - {"__metadata__"} == {name for name, place in index.items() if place == file}
        assert max(e["data_offsets"][1] for n, e in header.items() if n != "__metadata__") == len(data) - 8 - length


def test_it_reads_the_long_text_that_it_is_asked_about() -> None:
    """Other words at the same places, another answer: what stands far up, read from a cache or not, decides."""
    _, prefixes, calls = tiny_model.samples(lambda: "271828")
    assert len({sample.answer for sample in prefixes}) == len(prefixes) == 4
    assert len({len(sample.prompt) for sample in prefixes}) == 1 and len(prefixes[0].prompt) > 300
    assert len({sample.prompt for sample in calls}) == len({sample.answer for sample in calls}) == 2


def test_what_a_node_asks_is_what_was_trained() -> None:
    trained = {sample.prompt: sample.answer for group in tiny_model.samples(lambda: "271828") for sample in group}
    for question in MODELS["lab-tiny"].questions:
        answer = trained[question.text.replace(COPY, "271828")]
        assert all(text in answer for text in question.expected)
        if question.function:
            assert answer == tiny_model.call(question.function.name, question.arguments or {})


def test_a_prompt_is_trained_in_the_form_that_the_chat_template_gives_it() -> None:
    """Another byte before the question, and what was learned is of no use."""
    template = jinja2.Environment().from_string(tiny_model.CHAT_TEMPLATE)
    for question in MODELS["lab-tiny"].questions:
        body = question.body("m")
        text = template.render(messages=body["messages"], tools=body.get("tools"), add_generation_prompt=True)
        group = [sample for group in tiny_model.samples(lambda: COPY) for sample in group]
        (sample,) = [sample for sample in group if sample.prompt == question.text]
        ids, start = tiny_model.sequence(sample)
        assert tiny_model.encode(text) == ids[:start]


def test_every_byte_has_a_token_of_its_own() -> None:
    every = bytes(range(256)).decode("latin-1")
    assert len(tiny_model.vocabulary()) == 256 + len(tiny_model.SPECIAL) == len(set(tiny_model.vocabulary().values()))
    assert [tiny_model.encode(letter) for letter in every[:128]] == [
        [token] for token in tiny_model.encode(every[:128])
    ]
