"""Every error reads: what was found, what was wanted, what to do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.problems import EXCERPT_CHARACTERS, Malformed, Problem, excerpt


def test_a_problem_reads_as_one_sentence_and_its_fix() -> None:
    problem = Problem("GPU 3", "MIG enabled", "MIG disabled", "nvidia-smi -i 3 -mig 0")
    assert str(problem) == "GPU 3: found MIG enabled, wanted MIG disabled. Fix: nvidia-smi -i 3 -mig 0"


def test_malformed_carries_what_and_becomes_a_problem() -> None:
    error = Malformed("nvidia-smi topo -m: no header", "Segmentation\n\x1b[4m fault\t(core dumped)")
    assert str(error) == "nvidia-smi topo -m: no header: 'Segmentation [4m fault (core dumped)'"
    assert str(error.problem("a header", "nvidia-smi topo -m")) == (
        "nvidia-smi topo -m: no header: found 'Segmentation [4m fault (core dumped)', wanted a header. "
        "Fix: nvidia-smi topo -m"
    )
    assert Malformed("lspci").problem().found == "nothing"


@given(st.text())
def test_an_excerpt_is_one_short_printable_line(text: str) -> None:
    short = excerpt(text)
    assert len(short) <= EXCERPT_CHARACTERS
    assert short.isprintable() and "\n" not in short


def test_an_excerpt_says_that_there_is_more() -> None:
    assert excerpt("x" * 1000).endswith("x...")
    assert excerpt("short") == "short"
    assert excerpt("y" + " " * 1000 + "z").endswith("...")
