"""The project's templates, for roles: what they lay down on a host with values in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jinja2

FOLDER = Path(__file__).resolve().parent.parent / "templates"

Filter = Callable[[Any], str]


def render(name: str, values: dict[str, Any], filters: Iterable[Filter] = ()) -> str:
    """A template's text. `filters`: functions that it uses under their own names.

    A line with nothing but a block on it leaves no line. Raises jinja2.UndefinedError for a name that means nothing.
    """
    return _environment(*filters).get_template(name).render(values)


@functools.cache
def _environment(*filters: Filter) -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.filters.update({function.__name__: function for function in filters})
    return made
