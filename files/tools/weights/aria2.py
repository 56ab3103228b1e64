"""aria2c, the transport that resumes: one process, told what to fetch over its RPC on loopback.

It is given addresses and file names, never a token. Its own checksum option stays off: it hashes in the event loop
and takes 2.8 times the wall time. Its control files (`NAME.aria2`) say what of a file is there. It brings the bytes to
disk before it says so, so that they hold after kill -9 and after a loss of power.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import disk
from .errors import Misconfigured, TransportFailed

CONTROL = ".aria2"
PIECE = 1 << 20  # bytes, of which a control file says whether they are there
KEPT_SECONDS = 10.0  # of a connection without a call; aria2 closes it after 30
NO_SPACE = 9
RESOURCE_NOT_FOUND = 3
_PR_SET_PDEATHSIG = 1
_KEYS = ["gid", "status", "completedLength", "totalLength", "downloadSpeed", "errorCode", "errorMessage"]


@dataclass
class Control:
    """What a control file says: which pieces of a file of `total` bytes are there. bits: the first piece is the highest
    bit of the first byte. aria2's manual has the form of the file ("Control File Format" in its technical notes)."""

    piece: int
    total: int
    bits: bytearray

    @classmethod
    def nothing(cls, total: int) -> Control:
        return cls(PIECE, total, bytearray(-(-pieces(total) // 8)))

    @classmethod
    def parse(cls, text: bytes) -> Control:
        """Of a control file's content. Raises ValueError."""
        try:
            version, _, named = struct.unpack_from(">HII", text)
            piece, total, _, length = struct.unpack_from(">IQQI", text, 10 + named)
        except struct.error:
            raise ValueError("a control file that ends too soon") from None
        start = 34 + named
        bits = bytearray(text[start : start + length])
        if version != 1 or piece != PIECE or length != -(-pieces(total) // 8) or len(bits) != length:
            raise ValueError(
                f"a control file of version {version} with pieces of {piece} bytes, {len(bits)} bytes of bits"
            )
        return cls(piece, total, bits)

    def content(self) -> bytes:
        """As a control file from which aria2 goes on; pieces that are there in part count as missing."""
        head = struct.pack(">HIIIQQI", 1, 0, 0, self.piece, self.total, 0, len(self.bits))
        return head + bytes(self.bits) + struct.pack(">I", 0)

    def has(self, piece: int) -> bool:
        return bool(self.bits[piece >> 3] & (0x80 >> (piece & 7)))

    def add(self, piece: int) -> None:
        self.bits[piece >> 3] |= 0x80 >> (piece & 7)

    def length(self, piece: int) -> int:
        """Bytes of one piece: the last may be shorter."""
        return min(self.piece, self.total - piece * self.piece)

    @property
    def done(self) -> int:
        return sum(self.length(piece) for piece in range(pieces(self.total)) if self.has(piece))


def pieces(total: int) -> int:
    """Into how many pieces aria2 divides a file."""
    return -(-total // PIECE)


def begun(path: str, total: int) -> Control:
    """What is there of a file that was on its way; what nobody can go on with is removed."""
    try:
        with open(path + CONTROL, "rb") as source:
            found = Control.parse(source.read())
        if os.path.getsize(path) <= total == found.total:
            return found
    except (OSError, ValueError):
        pass
    disk.forget(path)
    disk.forget(path + CONTROL)
    return Control.nothing(total)


@dataclass(frozen=True)
class Transfer:
    """state: active, waiting, paused, error, complete or removed (aria2's words). total: 0 while unknown."""

    state: str
    done: int
    total: int
    error: int
    message: str


def options(folder: str, allocate: bool, files_at_once: int, connections: int, stall: int) -> dict[str, str]:
    """What is decided about aria2, by its manual's names."""
    return {
        "dir": folder,
        "enable-rpc": "true",
        "rpc-listen-all": "false",
        "max-concurrent-downloads": str(files_at_once + 1),
        "max-connection-per-server": str(connections),
        "split": str(connections),
        "min-split-size": "8M",
        "piece-length": str(PIECE),
        "continue": "true",
        "always-resume": "false",
        "allow-overwrite": "false",
        "auto-file-renaming": "false",
        "file-allocation": "falloc" if allocate else "none",
        "auto-save-interval": "1",
        "async-dns": "false",  # c-ares passes nsswitch.conf by, and fails where the system's resolver works
        "connect-timeout": str(min(15, stall)),
        "timeout": str(stall),  # of a stalled connection; --lowest-speed-limit would end the file instead (code 5)
        "max-tries": "4",
        "retry-wait": "2",
        "disk-cache": "16M",
        "http-accept-gzip": "false",
        "follow-metalink": "false",
        "follow-torrent": "false",
        "no-netrc": "true",
        "user-agent": "kimi-nodes",
        "quiet": "true",
        "stop-with-process": str(os.getpid()),
    }


class Aria2:
    """A context manager around one aria2c. held: descriptors that it keeps open (the lock of the staging folder)."""

    def __init__(self, settings: dict[str, str], held: Sequence[int] = ()):
        self._settings, self._held = settings, held
        self._secret = secrets.token_hex(16)
        self._port = 0
        self._connection: http.client.HTTPConnection | None = None
        self._called = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Aria2:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        told = {**self._settings, "rpc-listen-port": str(self._port), "rpc-secret": self._secret}
        parent = os.getpid()
        library = ctypes.CDLL(None)

        def die_with_parent() -> None:
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        # A file only we may read, because arguments stand in the process list.
        descriptor, path = tempfile.mkstemp(prefix="kimi-nodes-aria2-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as target:
                target.writelines(f"{name}={value}\n" for name, value in told.items())
            self._process = subprocess.Popen(
                ["aria2c", f"--conf-path={path}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=self._held,
                preexec_fn=die_with_parent,
            )
            self._await_answer()
        except FileNotFoundError:
            raise Misconfigured(
                "there is no aria2c on this node, wanted package aria2. Fix: run deploy.py again"
            ) from None
        except BaseException:
            self.__exit__()
            raise
        finally:
            os.unlink(path)
        return self

    def _await_answer(self) -> None:
        until = time.monotonic() + 15
        while True:
            try:
                self.call("aria2.getVersion")
                return
            except TransportFailed:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        idle = self._idle()
        if self._connection is not None:
            self._connection.close()
        process = self._process
        if process is None or process.poll() is not None:
            return
        if idle:
            process.kill()  # it takes a second to end by itself
        else:
            process.terminate()  # it saves its control files
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()

    def _idle(self) -> bool:
        """Whether nothing is on its way, so that there is nothing to save."""
        try:
            told = self.call("aria2.getGlobalStat")
        except TransportFailed:
            return False
        return bool(told["numActive"] == told["numWaiting"] == "0")

    def call(self, method: str, *parameters: Any) -> Any:
        """One RPC call. Raises TransportFailed where aria2 is gone or refuses."""
        if self._process is not None and self._process.poll() is not None:
            raise TransportFailed(
                f"aria2c ended with code {self._process.returncode}. Fix: none here, it is started again"
            )
        if not method.startswith("system."):
            parameters = (f"token:{self._secret}", *parameters)
        body = json.dumps({"jsonrpc": "2.0", "id": "1", "method": method, "params": parameters})
        try:
            if self._connection is not None and time.monotonic() - self._called > KEPT_SECONDS:
                self._connection.close()
                self._connection = None
            self._called = time.monotonic()
            if self._connection is None:
                self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            self._connection.request("POST", "/jsonrpc", body, {"Content-Type": "application/json"})
            answer = json.loads(self._connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            raise TransportFailed(f"aria2c does not answer ({error}). Fix: none here, it is started again") from None
        if "error" in answer:
            raise TransportFailed(f"aria2c: {answer['error'].get('message')} to {method}. Fix: report this")
        return answer["result"]

    def add(self, url: str, name: str) -> str:
        """Fetch an address into the file `name` of the folder; the transfer's id."""
        return str(self.call("aria2.addUri", [url], {"out": name}))

    def look(self, ids: Iterable[str]) -> dict[str, Transfer]:
        """How transfers are, by one call."""
        asked = list(ids)
        if not asked:
            return {}
        secret = f"token:{self._secret}"
        calls = [{"methodName": "aria2.tellStatus", "params": [secret, transfer, _KEYS]} for transfer in asked]
        found = {}
        for transfer, answer in zip(asked, self.call("system.multicall", calls), strict=True):
            if not isinstance(answer, list):
                raise TransportFailed(
                    f"aria2c does not know transfer {transfer}: {answer}. Fix: none here, it is started again"
                )
            state = answer[0]
            found[transfer] = Transfer(
                state["status"],
                int(state["completedLength"]),
                int(state["totalLength"]),
                int(state.get("errorCode") or 0),
                str(state.get("errorMessage") or ""),
            )
        return found

    def drop(self, transfer: str) -> None:
        """Stop a transfer and forget it; its files stay."""
        with contextlib.suppress(TransportFailed):
            self.call("aria2.forceRemove", transfer)
        for _ in range(50):  # removal takes a turn of its event loop
            with contextlib.suppress(TransportFailed):
                self.call("aria2.removeDownloadResult", transfer)
                return
            time.sleep(0.05)
