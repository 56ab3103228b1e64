"""What a ready server must answer, as data: each question is a body of /v1/chat/completions and what must come back.

`register` makes the long text by rule, so that nothing is pasted and any length can be had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

COPY = "{copy}"
"""In a prompt: six digits that whoever asks draws anew, so that no earlier request has left its text in the cache."""
_THINGS = ("lamps", "cups", "keys", "pins", "ropes")
TOKENS_OF_A_DRAWER = 9
"""At most, in Kimi K2's tokenizer, for which a common word, and up to three digits, are one token each."""
TOKENS_AROUND = 200
"""For the first line, the prompt and the chat template, generously."""
FEWEST_DRAWERS = 16


@dataclass(frozen=True)
class Function:
    """A function that the model may call. integers: the names of its arguments, all of them whole numbers."""

    name: str
    description: str
    integers: tuple[str, ...]

    @property
    def tool(self) -> dict[str, Any]:
        """In the form of the OpenAI API's `tools`."""
        properties = {name: {"type": "integer"} for name in self.integers}
        parameters = {"type": "object", "properties": properties, "required": list(self.integers)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


@dataclass(frozen=True)
class Question:
    """One question and what shows that it was answered right.

    name: what messages call it. prompt: the user's message. expected: words that the answer must contain, all of them.
    function, arguments: instead, the call that must come back. drawers: lines of `register` in front of the prompt,
    which hold the expected words. times: how often the same text is asked in a row; from the second time on the engine
    has its keys and values in the prefix cache. max_tokens: thinking included.
    """

    name: str
    prompt: str
    max_tokens: int
    expected: tuple[str, ...] = ()
    function: Function | None = None
    arguments: Mapping[str, int] | None = None
    drawers: int = 0
    times: int = 1
    temperature: float = 1.0
    top_p: float = 0.95

    @property
    def text(self) -> str:
        """The whole message, with COPY in it where there is a register."""
        return register(self.drawers, self.expected) + self.prompt if self.drawers else self.prompt

    def body(self, model: str) -> dict[str, Any]:
        """Of a request to /v1/chat/completions. model: its served name."""
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            **({"tools": [self.function.tool]} if self.function else {}),
        }


def register(drawers: int, words: Sequence[str]) -> str:
    """A line for each drawer and what it holds. The words lie in drawers evenly apart, the first and the last a little
    way from the ends: both in what a second request finds in the cache, and in different chunks of a long prefill."""
    apart = drawers // len(words)
    places = {apart // 2 + number * apart: word for number, word in enumerate(words)}
    lines = [f"Copy {COPY} of the register of drawers."]
    for place in range(drawers):
        held = (
            f"the word {places[place]}" if place in places else f"{2 + place * 7 % 8} {_THINGS[place % len(_THINGS)]}"
        )
        lines.append(f"Drawer {place + 1}: {held}.")
    return "\n".join(lines) + "\n"


def within(questions: Sequence[Question], context_tokens: int) -> tuple[Question, ...]:
    """The questions, with answers of at most half the context and a register that fits beside them; without the one
    whose register cannot. The engine refuses a request that could become longer than its context."""
    fitting = []
    for question in questions:
        max_tokens = min(question.max_tokens, context_tokens // 2)
        drawers = min(question.drawers, (context_tokens - max_tokens - TOKENS_AROUND) // TOKENS_OF_A_DRAWER)
        if not question.drawers:
            fitting.append(replace(question, max_tokens=max_tokens))
        elif drawers >= FEWEST_DRAWERS:
            fitting.append(replace(question, max_tokens=max_tokens, drawers=drawers))
    return tuple(fitting)


MULTIPLY = Function("multiply", "Multiplies two integers.", ("a", "b"))


def of_readiness(drawers: int, max_tokens: int, thinking: int) -> tuple[Question, ...]:
    """A sampled answer; one prefix asked twice; a call of a function.

    max_tokens: of an answer. thinking: what a model that thinks first may spend on that, in tokens.
    """
    return (
        Question("sampled answer", "What is 17 times 23?", max_tokens + thinking, ("391",)),
        Question(
            "long prefix",
            "Two drawers hold a word. Which words?",
            max_tokens + thinking,
            ("heron", "maple"),
            drawers=drawers,
            times=2,
        ),
        Question(
            "tool call",
            "Call multiply with a = 17 and b = 23, do not calculate yourself.",
            max_tokens + thinking,
            function=MULTIPLY,
            arguments={"a": 17, "b": 23},
        ),
    )
