"""What an owner may decide about a node: every key, its type, its default and its unit. Anything else is an error.

`docs/inventory.md` is made from this table (`python -m node.inventory`), so that the two cannot disagree.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from node import edge, models, profiles, releases, toolkits
from node.hardware import GPU_MODELS
from node.manifest import REVISION
from node.problems import Problem

Check = Callable[[Any], "str | None"]  # what is wanted instead, or None when the value is good


@dataclass(frozen=True)
class Key:
    """One inventory key. type: what the value must be; required: no default stands in; unit: for the reader; choices:
    all values there are, where they have names."""

    name: str
    type: type
    doc: str
    default: Any = None
    required: bool = False
    unit: str = ""
    check: Check = lambda value: None
    choices: Collection[str] = ()

    def problem(self, value: Any) -> str | None:
        """What is wanted instead of a value of the right type; None where it is good."""
        if self.choices:
            return None if value in self.choices else "one of " + ", ".join(sorted(self.choices))
        return self.check(value)


def _absolute_path(value: str) -> str | None:
    good = (
        value.startswith("/") and value != "/" and "/../" not in value + "/" and re.fullmatch(r"[\w@%+=:,./-]+", value)
    )
    return None if good and not value.endswith("/") else "an absolute path, without '..', spaces or a slash at its end"


# Of /tmp and /var/tmp each unit has its own (PrivateTmp=), the others hold no files that stay.
_NOT_FOR_WEIGHTS = ("/tmp", "/var/tmp", "/run", "/dev", "/proc", "/sys")


def _weights_directory(value: str) -> str | None:
    below = any((value + "/").startswith(folder + "/") for folder in _NOT_FOR_WEIGHTS)
    return f"a folder that stays, not below {', '.join(_NOT_FOR_WEIGHTS)}" if below else _absolute_path(value)


def _between(low: float, high: float) -> Check:
    def check(value: float) -> str | None:
        return None if low <= value <= high else f"a number from {low} to {high}"

    return check


def _revision(value: str) -> str | None:
    return None if REVISION.fullmatch(value) else "a commit of 40 hex digits, in small letters; a branch name can move"


def _https(value: str) -> str | None:
    return None if re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./~-]*)?", value) else "an http or https address"


def _hub(value: str) -> str | None:
    names = r"\{(repository|revision|path)\}"
    plain = re.sub(names, "x", value)
    if value.startswith("file:///"):
        good = "{path}" in value and _absolute_path(plain.removeprefix("file://")) is None
    else:
        good = _https(plain) is None and ("{path}" in value or plain == value)
    return None if good else "an http, https or file address, of a hub or with {path} where the file's path goes"


def _fingerprint(value: str) -> str | None:
    return None if re.fullmatch(r"[0-9A-F]{40}", value) else "40 hex digits in capitals, without spaces"


def _name(value: str) -> str | None:
    return (
        None if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,95}", value) else "letters, digits, '.', '_', '-' and '/'"
    )


def _ipv4(value: str) -> str | None:
    try:
        ipaddress.IPv4Address(value)
    except ValueError:
        return "an IPv4 address such as 10.0.0.7"
    return None


def _file(value: str) -> str | None:
    return None if value and "\0" not in value else "the path of a file on the controller"


def _versions(value: list[Any]) -> str | None:
    known = toolkits.TOOLKITS
    return None if all(v in known for v in value) else "a list out of " + ", ".join(f'"{v}"' for v in sorted(known))


KEYS = {
    key.name: key
    for key in (
        Key("gpu", str, "The GPU model that the machine must have.", required=True, choices=GPU_MODELS),
        Key("gpu_count", int, "How many of them it must have.", required=True, unit="GPUs", check=_between(1, 16)),
        Key(
            "weights_directory",
            str,
            "Where weights lie. Its file system must have room for all of them.",
            required=True,
            check=_weights_directory,
        ),
        Key("profile", str, "How the GPUs work together.", default="tp8", choices=profiles.PROFILES),
        Key(
            "release",
            str,
            "The pinned set of software.",
            default=releases.DEFAULT_RELEASE,
            choices=releases.RELEASES,
        ),
        Key("model", str, "The model to serve.", default="kimi-k2.6", choices=models.MODELS),
        Key(
            "revision",
            str,
            "The model's commit on the hub. Default: the one that node/models.py pins.",
            check=_revision,
        ),
        Key(
            "manifest",
            str,
            "The manifest of the model's weights, on the controller. "
            "Default: files/manifests/MODEL.json, which bin/pin writes.",
            check=_file,
        ),
        Key(
            "drafter",
            str,
            "The speculative drafter. Default: the first that fits the model, where the profile drafts.",
            choices=models.DRAFTERS,
        ),
        Key(
            "drafter_revision",
            str,
            "The drafter's commit on the hub. Default: the one that node/models.py pins.",
            check=_revision,
        ),
        Key(
            "drafter_manifest",
            str,
            "The manifest of the drafter's weights. Default: files/manifests/DRAFTER.json.",
            check=_file,
        ),
        Key(
            "speculative",
            str,
            "Speculative decoding. Default: what the profile says.",
            choices=profiles.SPECULATIVE,
        ),
        Key(
            "hub",
            str,
            "Where weights come from: the hub, a mirror that answers like it, or any http, https or file:// address "
            "with {path}, and where wanted {repository} and {revision}, in it.",
            default="https://huggingface.co",
            check=_hub,
        ),
        Key(
            "hub_token_file",
            str,
            "A file on the controller that holds a hub token, for gated repositories. "
            "It reaches the node as a root-only file.",
            check=_file,
        ),
        Key(
            "weights_sharing",
            str,
            "on: one node of the inventory fetches weights from the hub, and those of the same model and revision "
            "spread them among themselves. off: each node for itself.",
            default="on",
            choices=("on", "off"),
        ),
        Key(
            "weights_address",
            str,
            "The node's IPv4 address on the network that its peers are on. Default: that of ssh_hostname.",
            check=_ipv4,
        ),
        Key(
            "weights_port",
            int,
            "The port of pieces between nodes; their lists are on the next one. Open to the inventory's nodes only.",
            default=30200,
            unit="TCP port",
            check=_between(1024, 65534),
        ),
        Key(
            "api_key_file",
            str,
            "A file on the controller that holds the API key of the server. "
            "Default: a key is made on the node, in /etc/kimi-nodes/keys.",
            check=_file,
        ),
        Key("served_model_name", str, "What clients call the model. Default: its key.", check=_name),
        Key(
            "port", int, "The server's port, on loopback.", default=30000, unit="TCP port", check=_between(1024, 65535)
        ),
        Key(
            "nccl_port",
            int,
            "The port of torch's rendezvous store.",
            default=30100,
            unit="TCP port",
            check=_between(1024, 65535),
        ),
        Key(
            "context_length",
            int,
            "The longest context to accept. Default: the model's own.",
            unit="tokens",
            check=_between(256, 10_000_000),
        ),
        Key(
            "cubins_repository",
            str,
            "A mirror of the kernels that NVIDIA ships compiled for FlashInfer (B200, B300), for sites that do not "
            "reach NVIDIA's own. It serves the same paths; index pages are not needed.",
            check=_https,
        ),
        Key("kv_cache_dtype", str, "The type of the KV cache.", default="auto", choices=("auto", "fp8_e4m3")),
        Key(
            "memory_fraction",
            float,
            "Share of GPU memory for weights and KV cache. Default: what node/memory.py finds.",
            check=_between(0.3, 0.97),
        ),
        Key(
            "max_running_requests",
            int,
            "Requests decoded at once. Default: the engine decides.",
            unit="requests",
            check=_between(1, 4096),
        ),
        Key(
            "start_timeout",
            int,
            "How long a start may take, weights load and first answer included.",
            default=3600,
            unit="seconds",
            check=_between(60, 86_400),
        ),
        Key(
            "fetch_media",
            str,
            "What a client's image_url, video_url or audio_url may make the server fetch. none: nothing, media come in "
            "the request itself (data:). public: ports 80 and 443 of public addresses.",
            default="none",
            choices=("none", "public"),
        ),
        Key(
            "edge_name",
            str,
            "Host name under which clients reach the node over TLS. Default: no edge, the server stays on loopback.",
            check=edge.name_problem,
        ),
        Key(
            "edge_port",
            int,
            "The port of the edge, the only one besides ssh that is open to others.",
            default=443,
            unit="TCP port",
            check=_between(1, 65535),
        ),
        Key(
            "edge_address",
            str,
            "The node's IP address that the edge listens on. Default: all of them.",
            check=edge.address_problem,
        ),
        Key(
            "edge_certificate_file",
            str,
            "A file on the controller with the edge's certificate and those between it and its authority, PEM. "
            "Default: Caddy's internal authority on the node signs one.",
            check=_file,
        ),
        Key("edge_key_file", str, "A file on the controller with that certificate's private key, PEM.", check=_file),
        Key(
            "edge_client_keys_file",
            str,
            "A file on the controller with the keys of clients, a line `key` or `name key` each. "
            "Default: one key is made on the node, in /etc/kimi-nodes/keys.",
            check=_file,
        ),
        Key("toolkits_beside", list, "CUDA toolkits to have beside the release's own.", default=[], check=_versions),
        Key(
            "cuda_repository",
            str,
            "NVIDIA's apt repository, or a mirror of it with the same folders.",
            default=toolkits.DEFAULT_REPOSITORY,
            check=_https,
        ),
        Key(
            "cuda_repository_key",
            str,
            "Name of the key's file in that repository. Default: NVIDIA's for the system.",
            check=_name,
        ),
        Key(
            "cuda_repository_fingerprint",
            str,
            "Fingerprint of that key. Default: NVIDIA's for the system.",
            check=_fingerprint,
        ),
    )
}


# pyinfra's own that are used most, for who misspells them: all of them are known to kit.inventory only.
_PYINFRAS = (
    "ssh_hostname", "ssh_user", "ssh_port", "ssh_key", "ssh_key_password", "ssh_password", "ssh_known_hosts_file",
    "ssh_strict_host_key_checking", "ssh_config_file", "_sudo", "_sudo_user", "_sudo_password",
)  # fmt: skip


def read(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Check inventory data against the table: (value of every key, defaults filled in; problems).

    Every problem is found in one pass, so that an owner mends them in one edit.
    """
    problems = []
    for name in sorted(data.keys() - KEYS.keys()):
        near = get_close_matches(name.lower(), [*KEYS, *_PYINFRAS], n=1)
        problems.append(
            Problem(
                f"inventory key {name}",
                f"{data[name]!r}, under a name that means nothing",
                "only keys of docs/inventory.md",
                f"rename it to {near[0]}"
                if near
                else "remove it; pyinfra leaves alone what begins with two underscores",
            )
        )
    values: dict[str, Any] = {}
    for key in KEYS.values():
        value = data.get(key.name)
        values[key.name] = key.default if value is None else value
        if value is None:
            if key.required:
                problems.append(
                    Problem(f"inventory key {key.name}", "nothing", _wanted(key), f"set {key.name} in the group data")
                )
            continue
        if not _is(value, key.type):
            found = f"{value!r} ({type(value).__name__})"
            problems.append(
                Problem(f"inventory key {key.name}", found, _wanted(key), f"write {key.name} as {_form(key)}")
            )
            continue
        wanted = key.problem(value)
        if wanted:
            asked = str(value).lower()
            near = get_close_matches(asked, key.choices, n=1) or [name for name in key.choices if asked in name]
            fix = f"change {key.name} in the group data" + (f", perhaps to {near[0]}" if near else "")
            problems.append(Problem(f"inventory key {key.name}", repr(value), wanted, fix))
    return values, problems


def _is(value: Any, wanted: type) -> bool:
    if isinstance(value, bool) and wanted is not bool:
        return False
    if wanted is float:
        return isinstance(value, (int, float))
    if wanted is list:
        return isinstance(value, (list, tuple))
    return isinstance(value, wanted)


def _form(key: Key) -> str:
    return {str: "text in quotes", int: "a whole number", float: "a number", list: "a list in brackets"}[key.type]


# What no check takes, so that it says what it wants.
_NEVER: Mapping[type, Any] = {str: "\0", int: -1, float: -1.0, list: [None]}


def _wanted(key: Key) -> str:
    unit = f" ({key.unit})" if key.unit else ""
    return f"{_form(key)}{unit}: {key.problem(_NEVER[key.type])}"


def table() -> str:
    """The keys as the table of docs/inventory.md."""
    lines = ["| key | type | default | unit | what it decides |", "| --- | --- | --- | --- | --- |"]
    for key in KEYS.values():
        default = "**required**" if key.required else f"`{key.default!r}`" if key.default is not None else ""
        lines.append(f"| `{key.name}` | {key.type.__name__} | {default} | {key.unit} | {key.doc} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
