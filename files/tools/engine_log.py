"""What the engine logs, without the API key.

SGLang 0.5.12 to 0.5.23 log all of their arguments at start, the API key among them (entrypoints/engine.py,
`logger.info(f"{server_args=}")`), and SGLANG_LOGGING_CONFIG_PATH is the one way to change what it logs. The
configuration that is laid down names the Formatter below; it keeps the engine's own form, rank in front, and puts
[api key] for the key.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

HIDDEN = "[api key]"


class Formatter(logging.Formatter):
    """`[time rank] message`, as SGLang's configure_logger has it."""

    def __init__(self) -> None:
        super().__init__(f"[%(asctime)s{rank()}] %(message)s", "%Y-%m-%d %H:%M:%S")
        self.key = api_key()

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text.replace(self.key, HIDDEN) if self.key else text


def rank(title: str | None = None) -> str:
    """ " PP2 TP0" in the scheduler that says so in its process title, "sglang::scheduler_PP2_TP0"; "" elsewhere."""
    if title is None:
        title = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    found = re.fullmatch(r"sglang::scheduler((?:_(?:ATTN_CP|MOE_DP|[A-Z]+)\d+)+)", title)
    return re.sub(r"_((?:ATTN_CP|MOE_DP|[A-Z]+)\d+)", r" \1", found[1]) if found else ""


def api_key() -> str:
    """The key that systemd handed to this service; "" outside of one."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    if not folder:
        return ""
    try:
        return Path(folder, "api-key").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
