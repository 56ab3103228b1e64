"""Runs on the host: apt's sources, the toolkits as packages and as files, links across them. Reads only."""

from __future__ import annotations

import base64
import glob
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from typing import Any

from kit import on_host

COMPILERS = ("bin/nvcc", "bin/cudafe++", "bin/ptxas", "bin/fatbinary", "bin/nvlink", "nvvm/bin/cicc")
SHOWN = 5  # paths of each kind that are named; the rest is counted by the owner's own eyes
PREFIX_NAME = re.compile(r"cuda-\d+\.\d+")
INFO = "/var/lib/dpkg/info"
ALTERNATIVES = "/var/lib/dpkg/alternatives"


def probe(
    paths: list[str],
    address: str,
    keyring: str,
    receipt: str,
    toolkits: list[dict[str, Any]],
    local: str = "/usr/local",
) -> dict[str, Any]:
    """{"files": states of `paths`, "keyring": base64 | None, "sources": see `sources`, "packages": {name: {"version",
    "installed"}}, "unfinished": [package], "toolkits": {version: see `toolkit_state`}, "links": see `links_across`,
    each with its "package" or None, "alternatives": {link: see `alternative`}, "receipt": dict | None,
    "host": {"compiler": version of g++ | None, "libc": str}}

    toolkits: [{"version", "prefix", "suffix", "headers", "libraries"}]. local: the folder that toolkits lie in.
    """
    installed, unfinished = packages(tuple(kit["suffix"] for kit in toolkits))
    found = on_host.json_object(receipt)
    seals = (found or {}).get("seals", {})
    majors = sorted({kit["version"].split(".")[0] for kit in toolkits})
    links = links_across([kit["prefix"] for kit in toolkits], local)
    elsewhere = {link["target"] for link in links}
    return {
        "files": on_host.files(paths),
        "keyring": _base64(keyring),
        "sources": sources(address),
        "packages": installed,
        "unfinished": unfinished,
        "toolkits": {kit["version"]: toolkit_state(kit, installed, seals, elsewhere) for kit in toolkits},
        "links": [{**link, "package": owner_of(link["path"], installed)} for link in links],
        "alternatives": {name: alternative(name, local) for name in ("cuda", *(f"cuda-{major}" for major in majors))},
        "receipt": found,
        "host": {
            "compiler": on_host.run(["g++", "-dumpfullversion"])["out"].strip() or None,
            "libc": os.confstr("CS_GNU_LIBC_VERSION"),
        },
    }


def _base64(path: str, up_to: int = 1 << 16) -> str | None:
    try:
        with open(path, "rb") as file:
            return base64.b64encode(file.read(up_to)).decode()
    except OSError:
        return None


# --- apt's sources ---------------------------------------------------------------------------------------------------


def sources(address: str, folder: str = "/etc/apt") -> list[dict[str, Any]]:
    """Enabled sources for the repository at this address (a slash at its end or not):
    [{"file", "signed_by": [path or fingerprint], "keys": [base64], "trusted": bool}]
    """
    wanted = address.rstrip("/")
    found = []
    for file in [f"{folder}/sources.list", *sorted(glob.glob(f"{folder}/sources.list.d/*"))]:
        text = on_host.text(file) or ""
        if file.endswith(".list"):
            entries = list(_one_line(text))
        elif file.endswith(".sources"):
            entries = list(_stanzas(text))
        else:
            continue
        for addresses, signed_by, trusted in entries:
            if wanted in (each.rstrip("/") for each in addresses):
                found.append({"file": file, "trusted": trusted, **_signers(signed_by)})
    return found


def _one_line(text: str) -> Iterator[tuple[list[str], str, bool]]:
    """(addresses, Signed-By, trusted) of each line: deb [option=value ...] address suite ..."""
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[(?P<options>[^]]*)\]\s*)?(?P<address>\S+)", line)
        if match:
            options = dict(word.split("=", 1) for word in (match["options"] or "").split() if "=" in word)
            options = {name.lower(): value for name, value in options.items()}
            yield [match["address"]], options.get("signed-by", "").replace(",", " "), options.get("trusted") == "yes"


def _stanzas(text: str) -> Iterator[tuple[list[str], str, bool]]:
    """The same of each stanza in the deb822 form."""
    for stanza in re.split(r"\n\s*\n", "\n".join(line for line in text.splitlines() if not line.startswith("#"))):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1] in (" ", "\t"):
                fields[name] = fields.get(name, "") + "\n" + line.strip()
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        enabled = fields.get("enabled", "yes").lower() not in ("no", "false", "0")
        if enabled and "deb" in fields.get("types", "").split():
            yield fields.get("uris", "").split(), fields.get("signed-by", ""), fields.get("trusted", "") == "yes"


def _signers(signed_by: str) -> dict[str, Any]:
    if "BEGIN PGP" in signed_by:  # the key itself, with "." for its empty lines
        text = "\n".join("" if line == "." else line for line in signed_by.strip().splitlines()) + "\n"
        return {"signed_by": ["the key inside it"], "keys": [base64.b64encode(text.encode()).decode()]}
    names = signed_by.split()
    return {"signed_by": names, "keys": [_base64(name) or "" for name in names if name.startswith("/")]}


# --- packages --------------------------------------------------------------------------------------------------------


def packages(suffixes: tuple[str, ...]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """({name: {"version", "installed"}} of the toolkits' packages, whatever dpkg left unfinished), by one dpkg-query.

    A toolkit's packages are those named cuda-nvcc-13-0, libcurand-dev-13-0, cuda-toolkit-13-0-config-common.
    """
    shown = on_host.run(["dpkg-query", "--show", "--showformat=${Package}\t${db:Status-Abbrev}\t${Version}\n"])
    if shown["code"] != 0:
        words = shown["err"].strip()[-300:]
        raise on_host.Problem(f"dpkg-query: found {words}, wanted a list of packages. Fix: dpkg --audit, on that host")
    ends = tuple(f"-{suffix}{more}" for suffix in suffixes for more in ("", "-config-common"))
    found: dict[str, dict[str, Any]] = {}
    unfinished = []
    for line in shown["out"].splitlines():
        name, status, version = line.split("\t")
        if status[1:2] not in "inc" or status[2:3].strip():
            unfinished.append(name)
        if name.endswith(ends) and status[1:2] not in "nc":
            found[name] = {"version": version, "installed": status[1:2] == "i" and not status[2:3].strip()}
    if any(name.isdigit() for name in _listed("/var/lib/dpkg/updates")):
        unfinished.append("(journal)")
    return found, unfinished


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def owner_of(path: str, installed: dict[str, dict[str, Any]], info: str = INFO) -> str | None:
    """The package among these that a path belongs to."""
    return next((name for name in installed if path in _package_files(name, "list", info).splitlines()), None)


def _package_files(name: str, ending: str, info: str) -> str:
    text = on_host.text(f"{info}/{name}.{ending}", 1 << 26)
    if text is None:  # a package of Multi-Arch: same has its architecture in the name
        text = next((on_host.text(path, 1 << 26) for path in glob.glob(f"{info}/{name}:*.{ending}")), None)
    return text or ""


# --- a toolkit -------------------------------------------------------------------------------------------------------


def toolkit_state(
    kit: dict[str, Any],
    installed: dict[str, dict[str, Any]],
    seals: dict[str, Any],
    elsewhere: set[str] | frozenset[str] = frozenset(),
    info: str = INFO,
) -> dict[str, Any]:
    """One toolkit as it lies there.

    {"nvcc": "13.0" | None, "headers": [paths that are missing], "libraries": [the same],
    "missing": {package: [paths]}, "changed": {package: [paths]}, "unowned": [paths that belong to no package],
    "device_compiler": bool (cicc is there, or some package says that it should be), "files": {path: md5},
    "seals": {path: [bytes, ctime in ns, md5]}, "packages": {name: version}}

    Files in `missing` are all of the packages' files; checksums are taken of what is needed only, and not again while a
    seal of the last receipt holds. elsewhere: targets of links into other toolkits, which are told of as such.
    """
    prefix = kit["prefix"]
    ends = (f"-{kit['suffix']}", f"-{kit['suffix']}-config-common")
    own = {name: entry["version"] for name, entry in installed.items() if name.endswith(ends)}
    owner: dict[str, str] = {}
    missing: dict[str, list[str]] = {}
    for name in own:
        for path in _package_files(name, "list", info).splitlines():
            if path.startswith(prefix + "/"):
                try:
                    if not stat.S_ISDIR(os.lstat(path).st_mode):
                        owner[path] = name
                except (FileNotFoundError, NotADirectoryError):
                    missing.setdefault(name, []).append(path)

    headers = [f"{prefix}/include/{name}" for name in kit["headers"]]
    libraries = [f"{prefix}/lib64/{name}" for name in kit["libraries"]]
    compilers = [f"{prefix}/{name}" for name in COMPILERS]
    changed: dict[str, list[str]] = {}
    unowned: list[str] = []
    digests, new_seals = {}, {}
    sums: dict[str, dict[str, str]] = {}
    for path in (*headers, *libraries, *compilers):
        if not os.path.isfile(path) or os.path.realpath(path) in elsewhere:
            continue
        digests[path], new_seals[path] = _digest(path, seals.get(path))
        inside = _inside(path, prefix)
        package = owner.get(inside)
        if package is None:
            unowned.append(path)
            continue
        if package not in sums:
            lines = _package_files(package, "md5sums", info).splitlines()
            sums[package] = {"/" + file.strip(): digest for digest, _, file in (line.partition(" ") for line in lines)}
        if sums[package].get(inside, digests[path]) != digests[path]:
            changed.setdefault(package, []).append(path)
    shipped = any(path == f"{prefix}/nvvm/bin/cicc" for paths in missing.values() for path in paths)
    return {
        "nvcc": _release(f"{prefix}/bin/nvcc"),
        "headers": [path for path in headers if not os.access(path, os.R_OK)],
        "libraries": [path for path in libraries if not os.access(path, os.R_OK)],
        "missing": {name: sorted(paths)[:SHOWN] for name, paths in sorted(missing.items())},
        "changed": changed,
        "unowned": unowned,
        "device_compiler": f"{prefix}/nvvm/bin/cicc" in digests or shipped,
        "files": digests,
        "seals": new_seals,
        "packages": own,
    }


def _inside(path: str, prefix: str) -> str:
    """The path with links below the prefix resolved, as packages name it, wherever the prefix itself really lies."""
    real, root = os.path.realpath(path), os.path.realpath(prefix)
    return prefix + real[len(root) :] if real.startswith(root + "/") else real


def _digest(path: str, seal: list[Any] | None) -> tuple[str, list[Any]]:
    """(md5, as dpkg keeps it; the seal that spares reading the file next time)."""
    found = os.stat(path)
    if seal and seal[:2] == [found.st_size, found.st_ctime_ns]:
        return str(seal[2]), seal
    digest = hashlib.md5()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest(), [found.st_size, found.st_ctime_ns, digest.hexdigest()]


def _release(nvcc: str) -> str | None:
    match = re.search(r"release (\d+\.\d+)", on_host.run([nvcc, "--version"])["out"])
    return match[1] if match else None


# --- links -----------------------------------------------------------------------------------------------------------


def links_across(prefixes: list[str], local: str) -> list[dict[str, str]]:
    """Links that lead from one toolkit into another, where one of the two is in `prefixes`: [{"path", "target"}]

    All toolkits named cuda-X.Y in the folder are looked at. A prefix that is itself a link counts when it leads into
    the tree of another version; a link to another disk does not.
    """
    prefixes_there = [f"{local}/{name}" for name in _listed(local) if PREFIX_NAME.fullmatch(name)]
    tree_of: dict[str, str] = {}
    for prefix in sorted(prefixes_there, key=os.path.islink):  # a tree is its own prefix's before it is a link's
        tree_of.setdefault(os.path.realpath(prefix), prefix)
    found = []
    for prefix in prefixes_there:
        root = os.path.realpath(prefix)
        if tree_of[root] != prefix:
            if {prefix, tree_of[root]} & set(prefixes):
                found.append({"path": prefix, "target": root})
            continue
        for folder, folders, files in os.walk(root):
            for name in (*folders, *files):
                path = os.path.join(folder, name)
                if not os.path.islink(path):
                    continue
                target = os.path.realpath(path)
                other = _toolkit_of(target, tree_of, local)
                if other and other != prefix and {prefix, other} & set(prefixes):
                    found.append({"path": prefix + path[len(root) :], "target": target})
    return found


def _toolkit_of(target: str, tree_of: dict[str, str], local: str) -> str | None:
    """The prefix of the toolkit that a resolved path lies in, or would lie in if that toolkit were still there."""
    for root, prefix in tree_of.items():
        if target == root or target.startswith(root + "/"):
            return prefix
    match = re.match(rf"{re.escape(os.path.realpath(local))}/({PREFIX_NAME.pattern})(/|$)", target)
    return f"{local}/{match[1]}" if match else None


def alternative(name: str, local: str, folder: str = ALTERNATIVES) -> dict[str, str | None]:
    """Where a link such as /usr/local/cuda leads: {"target": path | None, "mode": "auto", "manual" or None}"""
    link = f"{local}/{name}"
    state = on_host.text(f"{folder}/{name}")
    return {
        "target": os.path.realpath(link) if os.path.exists(link) else None,
        "mode": state.splitlines()[0] if state else None,
    }
