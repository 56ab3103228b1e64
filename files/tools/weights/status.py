"""What the agent is doing: for the operator who waits, for `status`, and for systemd's watchdog.

The watchdog is told only while bytes move, so that any stall, of whatever transport, ends in a restart.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import deque
from typing import Any

from . import disk

RATE_SECONDS = 15.0


class Status:
    """A JSON file replaced once a second: {"phase", "done", "total", "unit": "bytes", "rate", "eta", "error", ...}.

    phase: one of starting, preflight, fetching, hashing, publishing, repairing, waiting, waiting for a peer, complete,
    failed, stopped.
    rate: bytes a second over the last 15 s. eta: seconds. error: what keeps it from going on, None while it goes on;
    error_since: when that began, on the clock of the machine's boot; trouble_seconds: how long ago that is, by a clock
    that nobody sets. systemd's tries one after the other are one trouble. time: of this writing, wall clock.
    """

    def __init__(self, path: str, repository: str, revision: str):
        self._path = path
        self._lock = threading.Lock()
        self._moved = self._told = self._worked = 0
        self._samples: deque[tuple[float, int]] = deque()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.fields: dict[str, Any] = {
            "repository": repository,
            "revision": revision,
            "phase": "starting",
            "done": 0,
            "total": 0,
            "unit": "bytes",
            "files_done": 0,
            "files_total": 0,
            "error": None,
            "error_since": self._trouble_before(path),
            "pid": os.getpid(),
        }

    @staticmethod
    def _trouble_before(path: str) -> float | None:
        """Since when it has not gone on, by what an earlier run of this boot wrote last."""
        try:
            with open(path, encoding="utf-8") as source:
                before = json.load(source)
            since = float(before["error_since"])
            return since if before["phase"] == "failed" and since <= boot_clock() else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True, name="status")
        self._thread.start()

    def worked(self, count: int) -> None:
        """Bytes of the phase's own work were done: they make the rate."""
        with self._lock:
            self._worked += count
        self.moved(count)

    def moved(self, count: int) -> None:
        """Bytes were fetched or hashed: there is life."""
        with self._lock:
            self._moved += count

    def set(self, **fields: Any) -> None:
        with self._lock:
            if fields.get("phase") not in (None, self.fields["phase"]):
                self._samples.clear()
            self.fields.update(fields)

    def trouble(self, error: str | None) -> None:
        """What keeps the work from going on; None when it goes on again."""
        with self._lock:
            if error is None:
                self.fields.update(error=None, error_since=None)
            else:
                if error != self.fields["error"]:
                    print(error, file=sys.stderr, flush=True)
                self.fields["error"] = error
                self.fields["error_since"] = self.fields["error_since"] or boot_clock()

    def write(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._samples.append((now, self._worked))
            while len(self._samples) > 2 and now - self._samples[0][0] > RATE_SECONDS:
                self._samples.popleft()
            (then, before), elapsed = self._samples[0], now - self._samples[0][0]
            rate = (self._worked - before) / elapsed if elapsed > 0 and then < now else 0.0
            left = self.fields["total"] - self.fields["done"]
            since = self.fields["error_since"]
            snapshot = {
                **self.fields,
                "rate": round(rate),
                "eta": round(left / rate) if rate > 0 and left > 0 else None,
                "trouble_seconds": round(boot_clock() - since, 1) if since is not None else None,
                "time": time.time(),
            }
            alive, self._told = self._moved != self._told, self._moved
        try:
            disk.write_json(self._path, snapshot, durable=False)
        except OSError as error:
            print(f"{self._path}: cannot be written ({error.strerror})", file=sys.stderr, flush=True)
        line = f"{snapshot['phase']} {snapshot['done']}/{snapshot['total']} bytes"
        notify(f"STATUS={line}" + ("\nWATCHDOG=1" if alive else ""))

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            self.write()

    def end(self, phase: str, error: str | None = None) -> None:
        """The last word."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if error is not None:
            self.fields["error_since"] = self.fields["error_since"] or boot_clock()
        else:
            self.fields["error_since"] = None
        self.fields["error"] = error
        self.fields["phase"] = phase
        self.write()


def boot_clock() -> float:
    """Seconds since the machine's boot: the same for every process, and moved by nobody."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def notify(text: str) -> None:
    """Tell systemd, where it listens (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        try:
            told.sendto(text.encode(), address)
        except OSError as error:
            print(f"systemd does not listen at {address!r}: {error.strerror}", file=sys.stderr, flush=True)
