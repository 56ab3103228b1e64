"""Text that systemd reads back as exactly what we mean: environment files and command lines.

The two have rules of their own (systemd.exec(5), systemd.service(5)): an environment file knows no specifiers and no
variables, a command line both; "%" and "$" are doubled there and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r"[A-Za-z0-9_@:=+,./-]+")


def environment_file(environment: Mapping[str, str]) -> str:
    """The content of an EnvironmentFile=: one variable a line, every value in double quotes.

    Raises ValueError for a name that is none, and for a value that systemd would drop with a warning in its log:
    control characters other than tab and newline, and what is not valid Unicode.
    """
    lines = []
    for name, value in environment.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"environment variable {name!r}: wanted letters, digits and _, no digit first")
        _check(f"value of {name}", value, allowed="\t\n")
        escaped = re.sub(r'(["\\$`])', r"\\\1", value)
        lines.append(f'{name}="{escaped}"\n')
    return "".join(lines)


def command_line(arguments: Iterable[str]) -> str:
    """An argument vector as a unit's ExecStart= wants it. Raises ValueError for control characters but tab and
    newline."""
    return " ".join(map(argument, arguments))


def argument(text: str) -> str:
    """One argument of a command line. Raises ValueError as `command_line`."""
    _check("argument", text, allowed="\t\n")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return '"' + escaped.replace("%", "%%").replace("$", "$$") + '"'


def _check(what: str, text: str, allowed: str) -> None:
    for character in text:
        if (ord(character) < 32 and character not in allowed) or character == "\x7f":
            raise ValueError(f"{what}: found the control character {character!r}, which systemd does not take")
        if "\ud800" <= character <= "\udfff":
            raise ValueError(f"{what}: found {character!r}, which is no character")
