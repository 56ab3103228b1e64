"""Fetch, before the server starts, kernels that NVIDIA ships compiled and FlashInfer would fetch in front of a user.

    PYTHON cubins.py CONFIGURATION            fetch what is not there; noop where the receipt holds
    PYTHON cubins.py CONFIGURATION --check    say why it is not all there (exit 3), change nothing

PYTHON is the release's own. CONFIGURATION is JSON:

    {"release": digest, "flashinfer": version, "groups": ["TRTLLM_GEN_FMHA", ...], "repository": address or "",
     "directory": FLASHINFER_CUBIN_DIR, "receipt": path, "problem": path, "lock": path, "bytes": to keep free for it}

Where from, which files and which SHA-256 is FlashInfer's to say (flashinfer/artifacts.py): it pins, for each group, a
folder of the repository and the digest of the folder's checksums.txt, which lists every file with its own. We fetch
that list, hold it against its pin, then fetch what it lists with FlashInfer's own get_artifact, which loads what lies
there, fetches what does not, and gives nothing back whose digest is another. `flashinfer download-cubin` is not used,
because of what it does in 0.6.15.post1 (0.7.2 has mended the first two), each shown in the tests:

- it takes what index pages list for the whole: a page that cannot be fetched counts as an empty folder, and the
  download ends well without its files;
- it fetches all of the 1.5 GB again, whatever lies there;
- it uses a checksums.txt before it has held it against its pin, and leaves a file of another digest in place.

This program runs as a user that may reach the network, and that is not the server's: that one may not, and cannot
change what is fetched here. It reads the results (modes 755 and 644).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

FORMAT = 1
NOT_THERE = 3
THREADS = 8
TRIES = 2  # of a file that arrives whole with another digest; FlashInfer itself tries a failed transfer four times
SAY_SECONDS = 2.0


class Problem(Exception):
    """What was found and wanted; the text ends with `Fix: ...`."""


def main(arguments: list[str]) -> int:
    """0: all there. 1: could not be fetched, the reason is the last line. 3: --check, and something is missing."""
    if len(arguments) not in (1, 2) or arguments[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    asked = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    if arguments[1:]:
        reasons = why_not_there(asked)
        print("\n".join(reasons) or "all there")
        return NOT_THERE if reasons else 0
    os.umask(0o022)
    lock = Path(asked["lock"])
    try:
        with locked(lock):
            told = Path(asked["problem"])
            told.unlink(missing_ok=True)
            try:
                fetch(asked)
            except Exception as error:  # whatever it is, the warm-up waits for these files and must know
                more = (
                    "" if isinstance(error, Problem) else f" {type(error).__name__}. Fix: see the journal of this unit"
                )
                beside = told.with_name(f".{told.name}.new")
                beside.write_text(f"{error}{more}\n", encoding="utf-8")
                beside.rename(told)
                raise
            finally:
                remove_locks(Path(asked["directory"]), but=lock)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def fetch(asked: Mapping[str, Any]) -> None:
    """Fetch unless the receipt holds, and write the receipt. Raises Problem."""
    reasons = why_not_there(asked)
    if not reasons:
        print(f"all there: {asked['receipt']} holds, nothing to fetch", flush=True)
        return
    for reason in reasons:
        print(f"not there: {reason}", flush=True)
    receipt = Path(asked["receipt"])
    receipt.unlink(missing_ok=True)
    check_space(asked)
    began = time.monotonic()
    groups = fetch_groups(asked)
    seconds = round(time.monotonic() - began, 1)
    write_json(
        receipt,
        {
            "format": FORMAT,
            "asked": dict(asked),
            "groups": groups,
            "seconds": seconds,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
    )
    files, size = sum(group["files"] for group in groups), sum(group["bytes"] for group in groups)
    print(f"fetched: {files} files, {size / 1e9:.2f} GB in {seconds:.0f} s", flush=True)


def why_not_there(asked: Mapping[str, Any]) -> list[str]:
    """What of the receipt does not hold any more, [] if all does. Fetches nothing and imports nothing.

    Of each file its presence is looked at and of all their size, not their content: FlashInfer holds each against its
    digest when it loads it.
    """
    path = Path(asked["receipt"])
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
        reasons = []
        if receipt["format"] != FORMAT:
            reasons.append(f"receipt has format {receipt['format']}, this program writes {FORMAT}")
        reasons += [
            f"{name} was {receipt['asked'].get(name)!r}, now {value!r}"
            for name, value in asked.items()
            if receipt["asked"].get(name) != value
        ]
        for group in receipt["groups"]:
            folder = Path(asked["directory"], group["path"])
            content = (folder / "checksums.txt").read_bytes()
            if hashlib.sha256(content).hexdigest() != group["checksums"]:
                reasons.append(f"{folder}/checksums.txt: other content")
                continue
            found = [(folder / name).stat().st_size for name in listed(content, str(folder))]
            if sum(found) != group["bytes"]:
                reasons.append(f"{folder}: found {sum(found)} bytes, wanted {group['bytes']}")
    except FileNotFoundError as error:
        return [f"{error.filename}: missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, Problem) as error:
        return [f"{path}: does not hold ({error!r})"]
    return reasons


def check_space(asked: Mapping[str, Any]) -> None:
    """Room for all of it, less what lies there. Raises Problem."""
    directory = Path(asked["directory"])
    there = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    free, wanted = shutil.disk_usage(directory).free, asked["bytes"] - there
    if free < wanted:
        raise Problem(
            f"{directory}: found {free / 1e9:.1f} GB free, wanted {wanted / 1e9:.1f} GB for the kernels that NVIDIA "
            "ships compiled. Fix: make room on that file system, then deploy again"
        )


def fetch_groups(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every file of every group, each with its digest. Raises Problem."""
    directory = Path(asked["directory"])
    artifacts, loader = flashinfer_modules(asked)
    if directory != loader.FLASHINFER_CUBIN_DIR:
        raise Problem(
            f"FLASHINFER_CUBIN_DIR: found that FlashInfer reads {loader.FLASHINFER_CUBIN_DIR}, wanted {directory}. "
            "Fix: report this: a package of the release seems to bring these kernels"
        )
    groups: list[dict[str, Any]] = []
    files: list[tuple[str, str]] = []
    for group in asked["groups"]:
        path: str = getattr(artifacts.ArtifactPath, group)
        pin: str = getattr(artifacts.CheckSumHash, group)
        say(phase=f"fetching the list of {group}")
        content = Artifact(loader, f"{path}checksums.txt", pin).bytes()
        names = listed(content, f"{loader.FLASHINFER_CUBINS_REPOSITORY}{path}checksums.txt")
        files += [(path + name, digest) for name, digest in names.items()]
        groups.append({"name": group, "path": path, "checksums": pin, "files": len(names)})
    fetch_files(loader, files)
    for group in groups:
        folder = directory / group["path"]
        names = listed((folder / "checksums.txt").read_bytes(), str(folder))
        group["bytes"] = sum((folder / name).stat().st_size for name in names)
    return groups


def fetch_files(loader: Any, files: list[tuple[str, str]]) -> None:
    """Several at a time; the first that cannot be had ends it. Raises Problem."""
    began = said = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        artifacts = [Artifact(loader, name, digest) for name, digest in files]
        waiting: set[Future[None]] = {pool.submit(artifact.have) for artifact in artifacts}
        total = len(waiting)
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=SAY_SECONDS, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if time.monotonic() - said > SAY_SECONDS or not waiting:
                    said = time.monotonic()
                    rate = (total - len(waiting)) / max(said - began, 0.1)
                    say(
                        phase="fetching kernels that NVIDIA ships compiled",
                        done=total - len(waiting),
                        total=total,
                        unit="files",
                        rate=round(rate, 1),
                    )
        finally:
            for future in waiting:
                future.cancel()


class Artifact:
    """One file of the repository, as FlashInfer names it."""

    connections = threading.local()  # a session of requests is not for several threads

    def __init__(self, loader: Any, name: str, digest: str):
        self.loader, self.name, self.digest = loader, name, digest
        self.path = Path(loader.FLASHINFER_CUBIN_DIR, name)
        self.address: str = loader.safe_urljoin(loader.FLASHINFER_CUBINS_REPOSITORY, name)

    def bytes(self) -> bytes:
        """Its content, from the disk or else the repository. Nothing of another digest stays. Raises Problem."""
        for _ in range(TRIES):
            content: bytes = self.loader.get_artifact(self.name, self.digest, session=self.session())
            if content:
                return content
            found = digest(self.path)
            self.path.unlink(missing_ok=True)
            if found is None:
                raise Problem(
                    f"{self.address}: found {self.refusal()}, wanted the file. Fix: see that this host reaches that "
                    "address, or set cubins_repository in the inventory to a mirror that it reaches; a proxy is named "
                    "in /etc/environment"
                )
        raise Problem(
            f"{self.address}: found SHA-256 {found} in {TRIES} tries, wanted {self.digest}. Fix: a proxy or mirror on "
            "the way gives another file: mend it, or set cubins_repository in the inventory to another one"
        )

    def have(self) -> None:
        """As `bytes`, for whom it is enough that the file is there."""
        self.bytes()

    def session(self) -> Any:
        import requests

        if not hasattr(self.connections, "session"):
            self.connections.session = requests.Session()
        return self.connections.session

    def refusal(self) -> str:
        """What the address says when it is asked once more: FlashInfer keeps its own words to its log."""
        import requests

        try:
            with self.session().get(self.address, timeout=10) as answer:
                return f"status {answer.status_code}" if answer.status_code != 200 else "a transfer that breaks off"
        except requests.exceptions.RequestException as error:
            return f"no answer ({str(error)[:300]})"


def flashinfer_modules(asked: Mapping[str, Any]) -> tuple[Any, Any]:
    """flashinfer.artifacts and flashinfer.jit.cubin_loader, which read their folder and address at import."""
    os.environ["FLASHINFER_CUBIN_DIR"] = asked["directory"]
    os.environ["FLASHINFER_LOGGING_LEVEL"] = "error"  # else three lines for each of ten thousand files
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("FLASHINFER_NO_DOWNLOAD", "FLASHINFER_CUBIN_CHECKSUM_DISABLED"):
        os.environ.pop(name, None)
    if asked["repository"]:
        os.environ["FLASHINFER_CUBINS_REPOSITORY"] = asked["repository"].rstrip("/") + "/"
    say(phase="importing FlashInfer")
    from flashinfer import __version__, artifacts
    from flashinfer.jit import cubin_loader

    if __version__ != asked["flashinfer"]:
        raise Problem(
            f"flashinfer: found {__version__}, wanted {asked['flashinfer']}. Fix: start this program by its unit"
        )
    return artifacts, cubin_loader


def listed(checksums: bytes, where: str) -> dict[str, str]:
    """Name below the list's folder -> SHA-256. Raises Problem for what is no such list."""
    files = {}
    for line in checksums.decode("utf-8", errors="replace").splitlines():
        words = line.split()
        if len(words) != 2 or not re.fullmatch(r"[0-9a-f]{64}", words[0]) or not stays_below(words[1]):
            raise Problem(f"{where}: found the line {line[:200]!r}, wanted a SHA-256 and a file name. Fix: report this")
        files[words[1]] = words[0]
    if not files:
        raise Problem(f"{where}: found no line, wanted a SHA-256 and a file name on each. Fix: report this")
    return files


def stays_below(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.+/-]+", name)) and not name.startswith("/") and ".." not in name.split("/")


def remove_locks(directory: Path, but: Path) -> None:
    """FlashInfer leaves a lock file beside each file that it fetched. The server's own stay: they are not ours."""
    for path in directory.rglob("*.lock"):
        if path != but and path.stat().st_uid == os.geteuid():
            path.unlink()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One at a time; others see by the lock that it is at work."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def say(**status: Any) -> None:
    """Status for whoever waits: status.json in the unit's runtime directory, if it has one."""
    folder = os.environ.get("RUNTIME_DIRECTORY")
    if folder:
        write_json(Path(folder) / "status.json", status)


def write_json(path: Path, value: Any) -> None:
    """The file appears whole, by a rename."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def digest(path: Path) -> str | None:
    """SHA-256, 64 hex digits; None where there is no such file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
