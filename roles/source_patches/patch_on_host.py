"""Runs on the host: make exact edits of files whose digest is known, then write the receipt."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from typing import Any

from kit import on_host
from kit.on_host import Problem


def act(
    problems: list[str], python: str, site_packages: str, edits: list[dict[str, str]], compiled: list[str],
    receipt: str, record: dict[str, Any],
) -> None:  # fmt: skip
    """Edit, compile, and write `record` as the receipt, last.

    problems: why this cannot be done; nothing is then. edits: [{"id", "file", "before", "after", "old", "new"}], with
    sha256 before and after; the file is replaced by rename, so that it is the one or the other. compiled: files whose
    bytecode is made anew by `python`, the release's own. Raises Problem.
    """
    if problems:
        raise Problem(" ".join(problems))
    os.umask(0o022)
    for edit in edits:
        path = f"{site_packages}/{edit['file']}"
        # Its other hard links, in uv's cache, keep the old content.
        on_host.replace(path, edited(site_packages, edit), os.stat(path).st_mode & 0o7777)
    for name in compiled:
        refresh(python, f"{site_packages}/{name}")
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    content = json.dumps({**record, "patched": now}, indent=1) + "\n"
    on_host.replace(receipt, content.encode(), 0o644)


def edited(site_packages: str, edit: dict[str, str]) -> bytes:
    """The file with the edit. Raises Problem where it is not what was seen a moment ago, or the result is not right."""
    path = f"{site_packages}/{edit['file']}"
    with open(path, "rb") as file:
        source = file.read()
    found = hashlib.sha256(source).hexdigest()
    if found != edit["before"]:
        raise Problem(
            f"{path}: found sha256 {found}, wanted {edit['before']} to apply patch {edit['id']}. "
            "Fix: see who changes files there, then run deploy.py again"
        )
    old = edit["old"].encode()
    if source.count(old) != 1:
        raise Problem(
            f"{path}: found the text of patch {edit['id']} {source.count(old)} times, wanted it once. "
            "Fix: mend the patch in node/patches.py"
        )
    result = source.replace(old, edit["new"].encode())
    if (digest := hashlib.sha256(result).hexdigest()) != edit["after"]:
        raise Problem(
            f"{path}: patch {edit['id']} results in sha256 {digest}, wanted {edit['after']}. "
            "Fix: mend the patch in node/patches.py"
        )
    return result


def refresh(python: str, path: str) -> None:
    """Compile one module again: whoever serves may not, and would do so at every start."""
    code, said = on_host.output([python, "-I", "-m", "py_compile", path])
    if code:
        raise Problem(f"{path}: does not compile: {said.strip()[-400:]}. Fix: mend its patch in node/patches.py")
