"""What a ready server is asked: long enough, certain of its answer, and never longer than the context."""

from __future__ import annotations

import re

import pytest

from node.models import MODELS, Model
from node.questions import COPY, FEWEST_DRAWERS, Question, register, within

KIMI = MODELS["kimi-k2.6"].questions
# Where Kimi's tokenizer cuts before it looks for tokens (tokenization_kimi.py, the part for Latin text): a word with
# the space before it, up to three digits, other signs with the line's end. Each piece is one token or more; of this
# text each is one.
PIECES = re.compile(r"[^\r\n\w]?[A-Za-z]+|[0-9]{1,3}| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+")
LARGEST_CHUNK = 16384  # of SGLang's prefill, on a GPU of 160 GiB or more


def long(questions: tuple[Question, ...]) -> Question:
    (found,) = [question for question in questions if question.times > 1]
    return found


def test_the_long_text_takes_more_than_one_chunk_of_prefill_on_every_gpu() -> None:
    pieces = PIECES.findall(long(KIMI).text)
    assert "".join(pieces) == long(KIMI).text
    assert LARGEST_CHUNK < len(pieces) < 32_768  # the fewest tokens of KV cache that a plan accepts, node/memory.py


def test_what_the_long_text_is_asked_for_stands_in_it_once_and_apart() -> None:
    question = long(KIMI)
    places = [question.text.index(word) for word in question.expected]
    assert all(question.text.count(word) == 1 for word in question.expected)
    assert not any(word in question.prompt for word in question.expected)
    assert places[0] < len(question.text) / 3 and places[1] > len(question.text) / 2
    assert question.text.index(COPY) < 20 and question.text.count(COPY) == 1


@pytest.mark.parametrize("drawers", [16, 17, 100, 2000])
def test_a_register_is_of_the_length_that_was_asked_for(drawers: int) -> None:
    text = register(drawers, ("heron", "maple"))
    assert len(text.splitlines()) == drawers + 1
    assert text == register(drawers, ("heron", "maple"))


@pytest.mark.parametrize("context", [256, 4096, 6000, 8192, 16_384, 262_144])
def test_no_question_is_longer_than_the_context(context: int) -> None:
    """SGLang refuses a request whose text and answer together are longer."""
    asked = within(KIMI, context)
    assert {question.name for question in asked} >= {question.name for question in KIMI if not question.drawers}
    for question in asked:
        assert len(PIECES.findall(question.text)) + question.max_tokens + 50 <= context  # 50 for the chat template
        assert question.drawers == 0 or question.drawers >= FEWEST_DRAWERS
    assert (asked == KIMI) == (context == 262_144)


@pytest.mark.parametrize("found", MODELS.values(), ids=lambda model: model.key)
def test_a_call_is_asked_for_where_the_model_has_a_parser_of_calls(found: Model) -> None:
    calls = [question for question in found.questions if question.function]
    assert bool(calls) == bool(found.tool_call_parser)
    for question in calls:
        assert question.function and set(question.function.integers) == set(question.arguments or {})
        assert all(str(number) in question.prompt for number in (question.arguments or {}).values())
    assert found.questions[0].times == 1 and not found.questions[0].function


@pytest.mark.parametrize("model", MODELS)
def test_every_answer_is_sampled(model: str) -> None:
    for question in MODELS[model].questions:
        body = question.body("m")
        assert body["temperature"] == 1.0 and body["top_p"] < 1
