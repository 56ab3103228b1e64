"""Runs on the host: make an API key where there is none, and put it into the server's configuration. Prints no key."""

from __future__ import annotations

import json
import os
import secrets

from kit import on_host
from kit.on_host import Problem


def act(key: str, configuration: str) -> None:
    """key, configuration: paths of both files, which end as root's alone.

    An existing key stays. Raises Problem for one that cannot be used.
    """
    os.umask(0o077)
    os.makedirs(os.path.dirname(key), exist_ok=True)
    text = on_host.text(key)
    words = ["sk-" + secrets.token_urlsafe(32)] if text is None else text.split()
    if len(words) != 1 or not 16 <= len(words[0]) <= 512:
        raise Problem(
            f"{key}: found {len(words)} words, {len(text or '')} characters; wanted one key of 16 to 512 characters. "
            "Fix: remove that file and deploy again, which makes a new key"
        )
    on_host.replace(key, f"{words[0]}\n".encode(), 0o600)
    on_host.replace(configuration, (json.dumps({"api-key": words[0]}) + "\n").encode(), 0o600)
