"""Runs on the host for test_inference_service: all that the tests judge, in one command. The key never leaves the
host."""

from __future__ import annotations

import json
import os
import pwd
import re
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from kit import on_host


def probe(
    unit: str,
    units: list[str],
    paths: list[str],
    keys: str,
    key: str,
    configuration: str,
    searched: list[str],
    receipt: str,
    ninja: str,
    table: str,
    user: str,
    address: str,
    question: dict[str, Any],
    seconds: int,
    readiness: list[str],
    modules: str,
    cubins: list[str] | None,
) -> dict[str, Any]:
    """Everything is None or empty where it is not there: the tests say what that means."""
    secret = (on_host.text(key) or "").strip()
    shown = on_host.run(["systemctl", "show", "--property=MainPID,Conflicts,InvocationID", "--", unit])["out"]
    properties = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    main = int(properties.get("MainPID") or 0)
    processes = [process(pid) for pid in family(main)] if main else []
    return {
        "units": on_host.units(units),
        "conflicts": properties.get("Conflicts", "").split(),
        "files": on_host.files(paths),
        "main": main,
        "processes": processes,
        "modules": {each["pid"]: loaded(modules, each) for each in processes},
        "listening": listening({each["pid"] for each in processes}),
        "firewall": firewall(table),
        "service_user": user_number(user),
        "keys": on_host.files([keys, key, configuration]),
        "key_is_configured": bool(secret) and secret in (on_host.text(configuration) or ""),
        "key_found_in": leaks(secret, main, searched, properties.get("InvocationID", "")) if secret else [],
        "answers": {
            "with the key": ask(address, question, secret, seconds),
            "with no key": ask(address, question, None, seconds),
            "with another key": ask(address, question, "sk-" + "0" * 40, seconds),
        },
        "readiness": on_host.run(readiness, timeout=seconds),
        "warm": warm(receipt, ninja),
        "cubins": on_host.run(cubins) if cubins else None,
    }


def family(main: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [main] if main in parents else []
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def process(pid: int) -> dict[str, Any]:
    """What it was started with, and the files that it has mapped. setproctitle overwrites both in SGLang's children."""
    folder = Path("/proc", str(pid))
    try:
        arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        mapped = {line.split(maxsplit=5)[5] for line in (folder / "maps").read_text().splitlines() if line.count("/")}
        user, started = on_host.user_name(os.stat(folder).st_uid), start_time(folder)
    except (OSError, IndexError):
        return {"pid": pid, "arguments": [], "environment": {}, "mapped": [], "user": "", "started": 0.0}
    return {
        "pid": pid,
        "arguments": arguments,
        "environment": dict(entry.split("=", 1) for entry in environment if "=" in entry),
        "mapped": sorted(mapped),
        "user": user,
        "started": started,
    }


def start_time(folder: Path) -> float:
    """Unix time at which a process started. folder: /proc/PID, whose own times are those of the first look at it."""
    after_boot = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    running = float(Path("/proc/uptime").read_text().split()[0]) - after_boot / os.sysconf("SC_CLK_TCK")
    return time.time() - running


def loaded(folder: str, seen: dict[str, Any]) -> dict[str, Any] | None:
    """What a process has written of the modules it has loaded, None where it has written nothing since it started."""
    path = Path(folder, f"{seen['pid']}.json")
    try:
        if path.stat().st_mtime < seen["started"] - 1:
            return None
        found: dict[str, Any] = json.loads(path.read_text())["modules"]
    except (OSError, ValueError, LookupError):
        return None
    return found


def listening(pids: set[int]) -> list[dict[str, Any]]:
    """TCP sockets on which these processes listen: {"address": text, "port": int, "pid": int}."""
    owners: dict[str, int] = {}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
            except OSError:
                continue
            if found:
                owners[found[1]] = pid
    sockets = []
    for name, family_ in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in owners:  # 0A: listening
                address, port = fields[1].split(":")
                words = [struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8)]
                text = socket.inet_ntop(family_, b"".join(words))
                sockets.append({"address": text, "port": int(port, 16), "pid": owners[fields[9]]})
    return sockets


def firewall(table: str) -> dict[str, Any] | None:
    """The table as nft's JSON, None where it is not there."""
    shown = on_host.run(["/usr/sbin/nft", "--json", "list", "table", *table.split()])
    return json.loads(shown["out"]) if shown["code"] == 0 else None


def user_number(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def leaks(secret: str, main: int, searched: list[str], invocation: str) -> list[str]:
    """Where the key can be read: files below `searched`, arguments and environment of any process, the service's
    log."""
    needle = secret.encode()
    found = []
    for top in searched:
        for folder, _, names in os.walk(top):
            for name in names:
                path = Path(folder, name)
                try:
                    if path.is_file() and path.stat().st_size < 1 << 22 and needle in path.read_bytes():
                        found.append(str(path))
                except OSError:
                    continue
    for path in (*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")):
        try:
            if needle in path.read_bytes():
                found.append(str(path))
        except OSError:
            continue
    if invocation:
        command = ["journalctl", "--no-pager", "--output=cat", f"_SYSTEMD_INVOCATION_ID={invocation}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as journal:
            assert journal.stdout is not None
            if any(needle in line for line in journal.stdout):
                found.append("the journal of the service")
    return found


def ask(address: str, question: dict[str, Any], key: str | None, seconds: int) -> dict[str, Any]:
    """{"status": int, "answer": text}; status 0 where nobody answers."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    url = address + "/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(question).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=seconds) as response:
            reply = json.load(response)
            return {"status": response.status, "answer": reply["choices"][0]["message"]["content"] or ""}
    except urllib.error.HTTPError as error:
        return {"status": error.code, "answer": ""}
    except (OSError, ValueError, LookupError) as error:
        return {"status": 0, "answer": repr(error)}


def warm(receipt: str, ninja: str) -> dict[str, Any] | None:
    """The receipt, digests of its files now, what ninja would still do, and the architectures in the libraries."""
    text = on_host.text(receipt)
    if text is None:
        return None
    content = json.loads(text)
    files = [file["path"] for module in content["modules"] for file in module["files"]]
    found: dict[str, Any] = {"receipt": content, "files": on_host.files(files), "ninja": {}, "flags": {}, "code": {}}
    for path in files:
        if path.endswith(".ninja"):
            done = on_host.run([ninja, "-n", "-C", os.path.dirname(path), "-f", path])
            found["ninja"][path] = done["out"] + done["err"]
            found["flags"][path] = sorted(set(re.findall(r"-gencode=\S+", on_host.text(path) or "")))
        elif os.path.exists(path):
            found["code"][path] = code(Path(path).read_bytes())
    return found


def code(library: bytes) -> list[int]:
    """Architecture of the first entry of every fat binary in a library: at offset 28 of it, after 16 bytes of
    header."""
    heads = re.finditer(re.escape(struct.pack("<IHH", 0xBA55ED50, 1, 16)), library)
    return sorted({struct.unpack_from("<I", library, head.start() + 16 + 28)[0] for head in heads})
