"""Runs on the host for --diff in `kit.files`: the text of files."""

from __future__ import annotations

from kit import on_host


def probe(paths: list[str], up_to: int) -> dict[str, str | None]:
    """The text of each path, None where there is no file or it is larger than `up_to` bytes."""
    texts = {path: on_host.text(path, up_to + 1) for path in paths}
    return {path: text if text is None or len(text) <= up_to else None for path, text in texts.items()}
