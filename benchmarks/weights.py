"""Weights over the loopback, all ways in one run: python benchmarks/weights.py [--rounds 3] [--mib 256] [--files 8]

A repository of random files is served by nginx as a hub serves it. Each way fetches it to the same disk; the order
changes from round to round, and the median counts. Seconds are of this machine and this moment: compare the ratios.

    ours        weights_agent.py fetch: every byte hashed, published by rename
    hf          hf download, without Xet: nothing is hashed
    hf+verify   hf download, then hf cache verify
    cat         reading the files and writing them, with sync: what the disk alone takes
    ... again   the same once more: nothing is to be fetched
    deep        weights_agent.py verify --deep        openssl   openssl dgst -sha256, one file after another

With --fan-out, instead: four nodes on loopback addresses, and the hub in a network namespace behind a shaped uplink.

    alone       each node fetches from the hub by itself
    shared      one fetches, and they spread it among themselves, with the times that nodes are deployed with

Wants aria2c, nginx and openssl, and the tools' environment (huggingface_hub, libtorrent), which it makes in the cache
folder; --fan-out also root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from node import sharing  # noqa: E402
from node.manifest import File, Manifest  # noqa: E402
from roles.weights import lay  # noqa: E402

PYTHON = "/usr/bin/python3"
AGENT = PROJECT / "files" / "tools" / "weights_agent.py"
REPOSITORY, REVISION = "lab/large", "ab" * 20
MIB = 1 << 20

BARS = {"ours / hf": 1.0, "ours again / hf again": 0.1, "shared / alone": 0.35}
"""What the project holds itself to: ours may take at most so much of the other's time."""


def tools(cache: Path) -> Path:
    """The `bin` folder of the tools' environment, from its lock."""
    lock = PROJECT / "files" / "locks" / "tools.txt"
    folder = cache / "tests" / f"tools-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([PYTHON, "-m", "venv", str(folder)], check=True)
        pip = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "-q",
            "--require-hashes",
            "--no-deps",
            "-r",
            str(lock),
        ]
        subprocess.run(pip, check=True)
        (folder / "complete").touch()
    return folder / "bin"


def repository(folder: Path, files: int, size: int) -> Manifest:
    """Random files that no file system can make smaller."""
    folder.mkdir(parents=True)
    source = random.Random(7)
    entries = []
    for number in range(1, files + 1):
        path = folder / f"model-{number:05}-of-{files:06}.safetensors"
        digest = hashlib.sha256()
        with path.open("wb") as target:
            for _ in range(size // MIB):
                block = source.randbytes(MIB)
                digest.update(block)
                target.write(block)
        entries.append(File(path.name, size, digest.hexdigest()))
    return Manifest(REPOSITORY, REVISION, tuple(entries))


def nginx_configuration(state: Path, folder: Path, manifest: Manifest, address: str) -> str:
    """The hub's addresses, answered from files."""
    tree = [
        {"type": "file", "path": f.path, "size": f.bytes, "oid": "0" * 40, "lfs": {"oid": f.sha256, "size": f.bytes}}
        for f in manifest.files
    ]
    for entry in tree:
        entry["lfs"]["pointerSize"] = 135  # type: ignore[index]
    (state / "tree.json").write_text(json.dumps(tree))
    siblings = [{"rfilename": file.path} for file in manifest.files]
    (state / "info.json").write_text(json.dumps({"id": REPOSITORY, "sha": REVISION, "siblings": siblings}))
    tags = "\n".join(f'    "~/{REVISION}/{re.escape(file.path)}$" \'"{file.sha256}"\';' for file in manifest.files)
    kind = "default_type application/json;"
    headers = f"add_header X-Repo-Commit {REVISION}; add_header ETag $tag; add_header X-Linked-Etag $tag;"
    return f"""worker_processes 2; daemon off; pid {state}/nginx.pid; error_log {state}/error.log; user root;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; etag off; default_type application/octet-stream; map_hash_bucket_size 256;
  client_body_temp_path {state}/tmp; proxy_temp_path {state}/tmp; fastcgi_temp_path {state}/tmp;
  uwsgi_temp_path {state}/tmp; scgi_temp_path {state}/tmp;
  map $uri $tag {{
{tags}
  }}
  server {{
    listen {address};
    location ~ ^/api/models/{REPOSITORY}(/revision/{REVISION})?$ {{ alias {state}/info.json; {kind} }}
    location ~ ^/api/models/{REPOSITORY}/tree/{REVISION} {{ alias {state}/tree.json; {kind} }}
    location ~ ^/{REPOSITORY}/resolve/{REVISION}/(.+)$ {{ alias {folder}/$1; {headers} }}
  }}
}}
"""


@contextlib.contextmanager
def hub(
    state: Path, folder: Path, manifest: Manifest, host: str = "127.0.0.1", inside: tuple[str, ...] = ()
) -> Iterator[str]:
    """The address of an nginx that answers as a hub; it ends with the block. inside: words that start it elsewhere."""
    state.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (state / "nginx.conf").write_text(nginx_configuration(state, folder, manifest, f"{host}:{port}"))
    process = subprocess.Popen([*inside, "nginx", "-p", str(state), "-c", str(state / "nginx.conf")])
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
                break
            time.sleep(0.05)
        yield f"http://{host}:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


class Ways:
    """Each way as a function; `fresh` forgets what one of them brought."""

    def __init__(self, folder: Path, source: Path, manifest: Manifest, address: str, bin_folder: Path) -> None:
        self.folder, self.source, self.manifest, self.address, self.bin = folder, source, manifest, address, bin_folder
        weights = folder / "weights"
        self.snapshot = weights / REPOSITORY / REVISION
        (folder / "manifest.json").write_text(manifest.dumps())
        configuration = {
            "repository": REPOSITORY, "revision": REVISION, "hub": address, "directory": str(weights),
            "snapshot": str(self.snapshot), "staging": str(weights / ".staging" / f"large-{REVISION}"),
            "manifest": str(folder / "manifest.json"), "status": str(folder / "status.json"), "user": "nobody",
            "token_file": "", "client": "", "sharing": "", "files_at_once": lay.FILES_AT_ONCE,
            "connections_per_file": lay.CONNECTIONS_PER_FILE, "stall_seconds": lay.STALL_SECONDS,
        }  # fmt: skip
        (folder / "configuration.json").write_text(json.dumps(configuration))
        self.environment = {
            **os.environ,
            "HF_ENDPOINT": address,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def call(self, *command: object) -> None:
        done = subprocess.run([str(part) for part in command], env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")

    def agent(self, *command: str) -> None:
        self.call(PYTHON, "-sE", AGENT, *command, self.folder / "configuration.json")

    def ours(self) -> None:
        self.agent("fetch")

    def hf(self) -> None:
        self.call(self.bin / "hf", "download", REPOSITORY, "--revision", REVISION, "--local-dir", self.folder / "local")

    def hf_verify(self) -> None:
        self.hf()
        verify = ("cache", "verify", REPOSITORY, "--revision", REVISION, "--fail-on-missing-files")
        self.call(self.bin / "hf", *verify, "--local-dir", self.folder / "local")

    def cat(self) -> None:
        target = self.folder / "copy"
        target.mkdir()
        for file in self.manifest.files:
            self.call("cp", "--reflink=never", self.source / file.path, target / file.path)

    def deep(self) -> None:
        self.agent("verify", "--deep")

    def openssl(self) -> None:
        self.call("openssl", "dgst", "-sha256", *(self.snapshot / file.path for file in self.manifest.files))

    def fresh(self) -> None:
        for name in ("weights", "local", "hf", "copy"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        os.sync()


def measure(ways: Ways, rounds: int) -> dict[str, float]:
    """Median seconds by way; those that write end with their data on disk."""
    plan: list[tuple[str, Callable[[], None], list[tuple[str, Callable[[], None]]]]] = [
        ("ours", ways.ours, [("ours again", ways.ours), ("deep", ways.deep), ("openssl", ways.openssl)]),
        ("hf", ways.hf, [("hf again", ways.hf)]),
        ("hf+verify", ways.hf_verify, []),
        ("cat", ways.cat, []),
    ]
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        for name, first, then in plan[number % len(plan) :] + plan[: number % len(plan)]:
            ways.fresh()
            seconds.setdefault(name, []).append(timed(first, sync=True))
            for other, way in then:
                seconds.setdefault(other, []).append(timed(way))
    ways.fresh()
    return {name: statistics.median(taken) for name, taken in seconds.items()}


NODES = 4
NETWORK = "10.213.30"


@contextlib.contextmanager
def uplink(rate: str) -> Iterator[tuple[str, tuple[str, ...], Callable[[], int]]]:
    """(address, words that start a program behind it, bytes that have come from there) of a shaped cable."""
    name = f"kimi-bench-{os.getpid()}"
    inside = ("ip", "netns", "exec", name)

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    ip("netns", "add", name)
    try:
        ip("link", "add", "kimi-bench", "type", "veth", "peer", "name", "uplink", "netns", name)
        ip("address", "add", f"{NETWORK}.1/30", "dev", "kimi-bench")
        ip("link", "set", "kimi-bench", "up")
        ip("-n", name, "address", "add", f"{NETWORK}.2/30", "dev", "uplink")
        ip("-n", name, "link", "set", "uplink", "up")
        shape = ("tc", "qdisc", "add", "dev", "uplink", "root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
        subprocess.run([*inside, *shape], check=True)
        yield f"{NETWORK}.2", inside, lambda: int(Path("/sys/class/net/kimi-bench/statistics/rx_bytes").read_text())
    finally:
        ip("netns", "delete", name)


def node(folder: Path, number: int, manifest: Manifest, address: str, shared: bool) -> Path:
    """Lay a node's files; the path of its configuration."""
    folder.mkdir(parents=True)
    weights = folder / "weights"
    (folder / "manifest.json").write_text(manifest.dumps())
    told = {
        "repository": REPOSITORY, "revision": REVISION, "hub": address, "directory": str(weights),
        "snapshot": str(weights / REPOSITORY / REVISION), "staging": str(weights / ".staging" / f"large-{REVISION}"),
        "manifest": str(folder / "manifest.json"), "status": str(folder / "status.json"), "user": "nobody",
        "token_file": "", "client": "", "sharing": str(folder / "sharing.json") if shared else "",
        "files_at_once": lay.SHARED_FILES_AT_ONCE if shared else lay.FILES_AT_ONCE,
        "connections_per_file": lay.SHARED_CONNECTIONS_PER_FILE if shared else lay.CONNECTIONS_PER_FILE,
        "stall_seconds": lay.STALL_SECONDS,
    }  # fmt: skip
    (folder / "configuration.json").write_text(json.dumps(told))
    among = {
        "name": f"n{number}", "port": 30200, "members": [[f"n{n}", f"127.78.0.{n}"] for n in range(1, NODES + 1)],
        "socket": str(folder / "s"), "tables": str(folder / "tables"), "weights": [str(folder / "configuration.json")],
        "poll": sharing.POLL_SECONDS, "silence": sharing.SILENCE_SECONDS, "settle": sharing.SETTLE_SECONDS,
        "stuck": sharing.STUCK_SECONDS, "takeover": sharing.TAKEOVER_SECONDS,
    }  # fmt: skip
    (folder / "sharing.json").write_text(json.dumps(among))
    return folder / "configuration.json"


def fan_out(folder: Path, manifest: Manifest, address: str, python: Path, shared: bool) -> float:
    """Seconds until the last of four nodes has its snapshot. Raises SystemExit where one has not."""
    configurations = [node(folder / f"n{n}", n, manifest, address, shared) for n in range(1, NODES + 1)]
    sharers = []
    try:
        for path in configurations if shared else []:
            sharers.append(subprocess.Popen([python, "-sE", AGENT, "share", path.with_name("sharing.json")]))
        time.sleep(2)  # sharers are up long before there is something to fetch
        began = time.perf_counter()
        command = [PYTHON, "-sE", str(AGENT), "fetch"]
        agents = [
            subprocess.Popen([*command, path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for path in configurations
        ]
        codes = [agent.wait(3600) for agent in agents]
        if any(codes):
            raise SystemExit(f"agents of {folder.name}: exit codes {codes}")
        os.sync()
        return time.perf_counter() - began
    finally:
        for sharer in sharers:
            sharer.terminate()
            sharer.wait(30)


def measure_fan_out(folder: Path, manifest: Manifest, rate: str, rounds: int, python: Path) -> dict[str, list[float]]:
    """Seconds and bytes over the uplink by way, a list of rounds each."""
    found: dict[str, list[float]] = {"shared": [], "alone": [], "shared bytes": [], "alone bytes": []}
    with contextlib.ExitStack() as stack:
        host, inside, crossed = stack.enter_context(uplink(rate))
        address = stack.enter_context(hub(folder / "nginx", folder / "source", manifest, host, inside))
        for number in range(rounds):
            for way in ("shared", "alone"):
                before = crossed()
                place = folder / f"{way}-{number}"
                found[way].append(fan_out(place, manifest, address, python, way == "shared"))
                found[f"{way} bytes"].append(crossed() - before)
                shutil.rmtree(place)
    return found


def timed(way: Callable[[], None], sync: bool = False) -> float:
    began = time.perf_counter()
    way()
    if sync:
        os.sync()
    return time.perf_counter() - began


def tell_fan_out(found: dict[str, list[float]], size: int, given: argparse.Namespace) -> int:
    """Print it; 1 where the bar does not hold."""
    median = {name: statistics.median(values) for name, values in found.items()}
    ratio, bar = median["shared"] / median["alone"], BARS["shared / alone"]
    print(f"{NODES} nodes, {size} bytes in {given.files} files, uplink {given.uplink}, {given.rounds} rounds")
    for way in ("shared", "alone"):
        print(f"  {way:12} {median[way]:8.2f} s  {median[f'{way} bytes'] / size:5.2f} x the size over the uplink")
    print(f"  {'shared / alone':24} {ratio:6.2f}  (at most {bar}: {'holds' if ratio <= bar else 'DOES NOT HOLD'})")
    if given.json:
        figures: dict[str, Any] = {"bytes": size, "rounds": given.rounds, "medians": median, "ratio": ratio}
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if ratio > bar else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=256, help="of one file")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--fan-out", action="store_true", help="four nodes behind one uplink, instead")
    parser.add_argument("--uplink", default="200mbit", help="its rate, as tc writes it (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    cache = Path(os.environ.get("KIMI_NODES_CACHE") or Path.home() / ".cache" / "kimi-nodes")
    bin_folder = tools(cache)
    with tempfile.TemporaryDirectory(prefix="benchmark-weights-", dir=cache) as scratch:
        folder = Path(scratch)
        source = folder / "source"
        manifest = repository(source, given.files, given.mib * MIB)
        if given.fan_out:
            found = measure_fan_out(folder, manifest, given.uplink, given.rounds, bin_folder / "python")
            return tell_fan_out(found, manifest.bytes, given)
        with hub(folder / "nginx", source, manifest) as address:
            seconds = measure(Ways(folder, source, manifest, address, bin_folder), given.rounds)
    ratios = {
        "ours / hf": seconds["ours"] / seconds["hf"],
        "ours / hf+verify": seconds["ours"] / seconds["hf+verify"],
        "ours / cat": seconds["ours"] / seconds["cat"],
        "ours again / hf again": seconds["ours again"] / seconds["hf again"],
        "deep / openssl": seconds["deep"] / seconds["openssl"],
    }
    size = manifest.bytes
    print(f"{given.files} files of {given.mib} MiB, {given.rounds} rounds, {os.cpu_count()} cores")
    for name, taken in seconds.items():
        rate = "" if name.endswith("again") else f"  {size / taken / 1e6:7.0f} MB/s"
        print(f"  {name:12} {taken:8.2f} s{rate}")
    failed = False
    for name, ratio in ratios.items():
        bar = BARS.get(name)
        verdict = "" if bar is None else f"  (at most {bar}: {'holds' if ratio <= bar else 'DOES NOT HOLD'})"
        failed = failed or (bar is not None and ratio > bar)
        print(f"  {name:24} {ratio:6.2f}{verdict}")
    if given.json:
        figures: dict[str, Any] = {"bytes": size, "rounds": given.rounds, "seconds": seconds, "ratios": ratios}
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
