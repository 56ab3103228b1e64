"""What systemd makes of our text, asked of a real systemd: one boots in a second on this machine's own /usr, in its own
namespaces, runs one service and is gone."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from node import systemd

DUMP = """\
import json, os, sys
json.dump({"arguments": sys.argv[1:], "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in os.environb.items()}},
          open("/out/seen.json", "w"), ensure_ascii=True)
"""

UNIT = """\
[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
EnvironmentFile=/in/environment
ExecStart=/usr/bin/python3 -I /in/dump.py {arguments}
ExecStopPost=/bin/systemctl --no-block --force poweroff
"""

TEXT = st.text(
    alphabet=st.one_of(
        st.sampled_from(list("\"'\\$`%#;= \t\n{}~!@&|<>()*?[]-+:,")),
        st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc")),
    ),
    max_size=40,
)


def seen_by_systemd(environment: dict[str, str], arguments: list[str]) -> dict[str, object]:
    """What a process of a real systemd is given: {"arguments": [...], "environment": {...}}."""
    with tempfile.TemporaryDirectory(prefix="kimi-quoting-") as name:
        folder = Path(name)
        (folder / "in").mkdir()
        (folder / "out").mkdir()
        (folder / "in/dump.py").write_text(DUMP)
        (folder / "in/environment").write_text(systemd.environment_file(environment), encoding="utf-8")
        unit = UNIT.format(arguments=systemd.command_line(arguments))
        (folder / "in/quoting.service").write_text(unit, encoding="utf-8")
        command = [
            "systemd-nspawn", "--quiet", "--directory=/", "--volatile=yes", "--register=no", "--keep-unit", "--boot",
            "--private-network", "--console=pipe", f"--machine={folder.name.lower().replace('_', '')}",
            f"--bind-ro={folder}/in:/in", f"--bind={folder}/out:/out",
            f"--bind-ro={folder}/in/quoting.service:/run/systemd/system/quoting.service",
            "systemd.unit=quoting.service",
        ]  # fmt: skip
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        result = folder / "out/seen.json"
        assert result.exists(), f"{done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}\n{unit}"
        seen: dict[str, object] = json.loads(result.read_text())
        return seen


@pytest.mark.lab
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(values=st.lists(TEXT, min_size=1, max_size=40), arguments=st.lists(TEXT, max_size=40))
@example(
    values=[
        "",
        " ",
        "#",
        "a # b",
        "%n",
        "$HOME",
        "${HOME}",
        '"',
        "'",
        "\\",
        "\\n",
        "tab\there",
        "a\nb",
        "ünï→✓",
        "x;y",
        "`id`",
    ],
    arguments=[
        "",
        " ",
        ";",
        "%n",
        "%%",
        "$HOME",
        "${HOME}",
        "$$",
        '"',
        "'",
        "\\",
        "\\x41",
        "a\nb",
        "ünï→✓",
        "-x",
        "#no",
        "@",
    ],
)
def test_a_process_gets_exactly_what_was_meant(values: list[str], arguments: list[str]) -> None:
    environment = {f"VALUE_{number}": value for number, value in enumerate(values)}
    seen = seen_by_systemd(environment, arguments)
    assert seen["arguments"] == arguments
    got = seen["environment"]
    assert isinstance(got, dict)
    assert {name: got.get(name) for name in environment} == environment


@pytest.mark.parametrize("value", ["a\x00b", "a\rb", "\x1b[0m", "\x7f", "\ud800"])
def test_what_systemd_would_drop_is_refused(value: str) -> None:
    """systemd logs a line about such a value and starts the service without it."""
    with pytest.raises(ValueError, match="VALUE"):
        systemd.environment_file({"VALUE": value})
    with pytest.raises(ValueError, match="argument"):
        systemd.argument(value)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="1ST"):
        systemd.environment_file({"1ST": "x"})
