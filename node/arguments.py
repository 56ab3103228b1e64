"""Neutral option names to a server's argument vector, in the dialect of the release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from node.releases import Release


def render(options: Mapping[str, Any], release: Release) -> list[str]:
    """The argument vector for options. None and False leave a flag out, True gives it bare, the rest gives it a value.

    Raises KeyError for an option that the release's dialect does not know: a mistake of ours, held by a unit test over every
    profile and release.
    """
    vector: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        vector.append(release.dialect[name])
        if value is not True:
            vector.append(str(value))
    return vector
