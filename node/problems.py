"""How anything wrong is told: what was found, what was wanted, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass

EXCERPT_CHARACTERS = 160


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it should be, complete enough to be printed by itself.

    subject: what it is about ("gpu 3", "inventory key tensor_parallel", "driver").
    found, wanted: what is there and what should be.
    fix: what the owner does about it, a command where there is one.
    """

    subject: str
    found: str
    wanted: str
    fix: str

    def __str__(self) -> str:
        return f"{self.subject}: found {self.found}, wanted {self.wanted}. Fix: {self.fix}"


def excerpt(text: str, limit: int = EXCERPT_CHARACTERS) -> str:
    """The start of a program's output on one line, printable, at most `limit` characters."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    if len(flat) <= limit and len(text) <= 4 * limit:
        return flat
    return flat[: limit - 3].rstrip() + "..."


class Malformed(ValueError):
    """A program's output does not have the form it is known to have.

    what: which output, and what is wrong with it ("nvidia-smi topo -m: no header row").
    text: the output; only a short excerpt of it is kept.
    """

    def __init__(self, what: str, text: str = "") -> None:
        self.what = what
        self.excerpt = excerpt(text)
        super().__init__(f"{what}: {self.excerpt!r}" if self.excerpt else what)

    def problem(
        self,
        wanted: str = "output in a form this project knows",
        fix: str = "run the command on the host and look at what it prints",
    ) -> Problem:
        """The same as a Problem, for a reader that collects Problems instead of catching exceptions."""
        return Problem(
            subject=self.what, found=repr(self.excerpt) if self.excerpt else "nothing", wanted=wanted, fix=fix
        )
