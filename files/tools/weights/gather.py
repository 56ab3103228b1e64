"""Bring files into a staging folder, each hashed and right: aria2 first, another transport for what it gets wrong.

What another node gives comes from there, and the hub is asked only by the one node whose turn that is. A file is hashed
in a thread as soon as it is complete, while others are on their way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any

from . import aria2, client, disk, hashing
from .configuration import Configuration
from .errors import AgentError, HubUnreachable, NoRoom, Stopped, WrongContent
from .hashing import Hashed
from .hub import Folder, Hub
from .journal import Journal
from .manifest import File
from .sharing import Alone, Unshared
from .status import Status

SPARE = 1.02  # of the bytes still missing, for the file system's own needs
TURN = 0.1  # seconds between two looks at the transfers
PATIENCE = 60.0  # seconds without a byte, while everything fails, until the agent ends and systemd starts it again
PEERS_AT_ONCE = 4  # files on their way from other nodes
PEERS_TRIES = 3  # times that a file does not come from them, until they are not asked for it any more
FOLLOWED_AT_ONCE = 4  # files that are copied from the node that fetches them
NEARLY = 8  # a file of which less than this part is missing leaves room for the next: the line is never idle
PARTIAL = ".kimi-nodes-pieces"  # at the end of a name: what has come from other nodes of that file
ARIA2_TRIES = 3  # failures of one file in a row, without a byte between them, until the plain transport takes it


def say(text: str) -> None:
    """A line for the journal."""
    print(text, file=sys.stderr, flush=True)


def threads() -> int:
    """How many files are hashed at once; beyond 16 threads disks decide."""
    return min(16, os.cpu_count() or 1)


@dataclass
class Fetch:
    """One file on its way.

    done: bytes. plain, client: the transport to take instead of aria2. leftover: whole by its size when this run began.
    seen: aria2 has told of it. wrong: what the first transport brought, where it was not the manifest's content.
    table: of pieces, by which it comes or came from other nodes, or "". unshared: how often it did not come.
    damaged: a file with most of its pieces, or "". followed: some of it was copied from the node that fetched it.
    """

    file: File
    done: int = 0
    setbacks: int = 0
    not_before: float = 0.0
    plain: bool = False
    client: bool = False
    leftover: bool = False
    seen: bool = False
    wrong: str = ""
    table: str = ""
    unshared: int = 0
    damaged: str = ""
    followed: bool = False


class Gather:
    """held: descriptors that aria2 keeps open too."""

    def __init__(
        self,
        configuration: Configuration,
        revision: str,
        staging: str,
        hub: Hub | Folder,
        status: Status,
        stopping: Event,
        held: Sequence[int] = (),
        company: Alone | None = None,
    ):
        self._configuration, self._revision, self._staging = configuration, revision, staging
        self._hub, self._status, self._stopping, self._held = hub, status, stopping, held
        self._company = company or Alone()
        self._hub_tried = False
        self.has_already = 0  # bytes of the snapshot that are right and not this run's to bring
        self.journal = Journal(staging)
        self._waiting: list[Fetch] = []
        self._transfers: dict[str, Fetch] = {}
        self._futures: dict[Future[Any], tuple[Fetch, Callable[[Fetch, Future[Any]], None]]] = {}
        self._others_moved = 0
        self._arrived = 0  # bytes of files that are complete
        self._right: set[str] = set()  # digests of files that this run has found right
        self._last_byte = time.monotonic()

    def path(self, file: File) -> str:
        return os.path.join(self._staging, file.path)

    def run(self, files: Iterable[File], damaged: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
        """Bring them; their records for a receipt. Raises AgentError kinds; what has arrived is kept.

        damaged: file's path -> a file with most of its content, of which other nodes need bring only the wrong pieces.
        Nothing is asked of the hub when everything is here already.
        """
        wanted = sorted(files, key=lambda file: file.path)
        disk.make_folder(self._staging)
        self._remove_strangers(wanted)
        ready = [file for file in wanted if self.journal.holds(file)]
        held = {file.path for file in ready}
        damaged = damaged or {}
        todo = [Fetch(file, damaged=damaged.get(file.path, "")) for file in wanted if file.path not in held]
        self._arrived = sum(file.bytes for file in ready)
        total = sum(file.bytes for file in wanted)
        self._status.set(phase="preflight", total=total, done=self._arrived)
        self._status.set(files_done=len(ready), files_total=len(wanted))
        for fetch in todo:
            fetch.leftover = self._complete(fetch.file)
        self._preflight([fetch.file for fetch in todo if not fetch.leftover])
        if todo:
            self._work(todo)
        return self.journal.records(wanted)

    def _remove_strangers(self, wanted: Iterable[File]) -> None:
        """What dead runs left that no file here can use."""
        known = {file.path + suffix for file in wanted for suffix in ("", aria2.CONTROL, PARTIAL)}
        for folder, _, names in os.walk(self._staging):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.relpath(path, self._staging) not in known:
                    disk.forget(path)

    def _complete(self, file: File) -> bool:
        """Whether the file is here whole by its size. What could not be gone on with is removed."""
        path = self.path(file)
        control = path + aria2.CONTROL
        if os.path.lexists(control):
            if not os.path.lexists(path):
                disk.forget(control)
            return False
        if not os.path.lexists(path):
            return False
        if os.path.getsize(path) == file.bytes and not os.path.islink(path):
            return True
        disk.forget(path)  # without its control file nobody knows which of its bytes are there
        return False

    def _preflight(self, missing: Sequence[File]) -> None:
        """Everything that would end the transfer later, before its first byte."""
        if not missing:
            return
        kind = disk.file_system(self._staging)
        if kind.startswith(disk.NETWORK):
            raise NoRoom(
                f"{self._staging}: found a {kind} file system, wanted a local disk. "
                "Fix: set weights_directory to a folder on a local disk"
            )
        parent = os.path.dirname(self._configuration.snapshot)
        disk.make_folder(parent)
        if os.stat(parent).st_dev != os.stat(self._staging).st_dev:
            raise NoRoom(
                f"{parent}: found another file system than that of {self._staging}, wanted one for both, because the "
                "snapshot appears by a rename. "
                "Fix: mount the file system at the weights_directory itself"
            )
        needed = int(SPARE * sum(max(0, file.bytes - self._allocated(file)) for file in missing))
        free = disk.room(self._staging)
        if free < needed:
            raise NoRoom(
                f"{self._configuration.directory}: found {free} bytes free, wanted {needed} for what is still missing "
                f"of {self._configuration.repository}. Fix: free {needed - free} bytes "
                "(weights_agent.py gc shows old snapshots), or choose another weights_directory"
            )
        if not self._company.has_peers:
            self._try_hub(missing[0])

    def _try_hub(self, file: File) -> None:
        """Raises what would end a transfer from there, once, before the first byte."""
        if not self._hub_tried:
            self._hub.locate(self._configuration.repository, self._revision, file.path)
            self._hub_tried = True

    def _allocated(self, file: File) -> int:
        return max(disk.allocated(self.path(file)), disk.allocated(self.path(file) + PARTIAL))

    # The work: one thread decides, others hash and ask, aria2 fetches.

    def _work(self, todo: Sequence[Fetch]) -> None:
        settings = aria2.options(
            self._staging,
            disk.file_system(self._staging) in disk.CAN_ALLOCATE,
            self._configuration.files_at_once,
            self._configuration.connections_per_file,
            self._configuration.stall_seconds,
        )
        self._status.set(phase="fetching")
        self._last_byte = time.monotonic()
        with contextlib.ExitStack() as stack:
            self._hashers = stack.enter_context(_pool(threads(), "hash"))
            self._askers = stack.enter_context(_pool(4, "hub"))
            self._takers = stack.enter_context(_pool(PEERS_AT_ONCE, "peers"))
            self._followers = stack.enter_context(_pool(FOLLOWED_AT_ONCE, "follow"))
            self._aria2 = stack.enter_context(aria2.Aria2(settings, self._held))
            stack.callback(self._cancel)
            stack.callback(self._company.stop)
            self._company.start()
            for fetch in todo:
                if fetch.leftover:
                    self._hash(fetch)
                else:
                    self._waiting.append(fetch)
            while self._waiting or self._transfers or self._futures:
                self._begin()
                self._look()
                self._collect()
                self._tell()
                self._confer()
                if self._stopping.wait(TURN):
                    raise Stopped("asked to stop; what has arrived is kept")

    def _forget(self, file: File) -> None:
        """What has arrived of it in its place."""
        for suffix in ("", aria2.CONTROL):
            disk.forget(self.path(file) + suffix)

    def _cancel(self) -> None:
        """Threads end soon: those at work see `stopping`, the others never begin."""
        for future in self._futures:
            future.cancel()
        if self._futures:
            self._stopping.set()

    def _begin(self) -> None:
        now = time.monotonic()
        thens = [then for _, then in self._futures.values()]
        from_peers = sum(1 for then in thens if then == self._fetched_from_peers)
        by_hand = sum(1 for then in thens if then not in (self._hashed, self._fetched_from_peers, self._followed))
        nearly = sum(1 for fetch in self._transfers.values() if fetch.done > fetch.file.bytes * (1 - 1 / NEARLY))
        from_hub = by_hand + len(self._transfers) - min(1, nearly)
        for fetch in list(self._waiting):
            if fetch.not_before > now:
                continue
            if fetch.file.bytes == 0:
                self._waiting.remove(fetch)
                os.makedirs(os.path.dirname(self.path(fetch.file)), exist_ok=True)
                with open(self.path(fetch.file), "wb"):
                    pass
                self._hash(fetch)
                continue
            if table := self._company.offer(fetch.file):
                if from_peers < PEERS_AT_ONCE:
                    self._waiting.remove(fetch)
                    from_peers += 1
                    self._fetch_from_peers(fetch, table)
                continue
            if self._company.follows(fetch.file):
                if sum(1 for then in thens if then == self._followed) < FOLLOWED_AT_ONCE:
                    self._waiting.remove(fetch)
                    thens.append(self._followed)
                    self._follow(fetch)
                continue
            if self._company.coming(fetch.file):
                continue
            if from_hub >= self._configuration.files_at_once or not self._company.hub_allowed:
                continue
            self._waiting.remove(fetch)
            from_hub += 1
            fetch.table = ""
            disk.forget(self.path(fetch.file) + PARTIAL)
            self._try_hub(fetch.file)
            if fetch.client:
                self._fetch_by_client(fetch)
            elif fetch.plain or not self._hub.serves_aria2:
                self._fetch_plainly(fetch)
            elif self._hub.has_token or fetch.setbacks:
                self._submit(self._askers, fetch, self._located, self._locate, fetch.file)
            else:
                # aria2 follows the redirection itself and comes back for a new one when a signed address expires.
                self._transfer(fetch, self._hub.url(self._configuration.repository, self._revision, fetch.file.path))

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        fetch: Fetch,
        then: Callable[[Fetch, Future[Any]], None],
        work: Any,
        *arguments: Any,
    ) -> None:
        self._futures[pool.submit(work, *arguments)] = (fetch, then)

    def _locate(self, file: File) -> str | None:
        return self._hub.locate(self._configuration.repository, self._revision, file.path)

    def _located(self, fetch: Fetch, future: Future[str | None]) -> None:
        try:
            elsewhere = future.result()
        except HubUnreachable as error:
            self._set_back(fetch, error)
            return
        if elsewhere:
            self._transfer(fetch, elsewhere)
        elif self._hub.has_token:
            fetch.plain = True  # the hub itself serves it, and only with the token, which aria2 must not have
            self._fetch_plainly(fetch)
        else:
            self._transfer(fetch, self._hub.url(self._configuration.repository, self._revision, fetch.file.path))

    def _transfer(self, fetch: Fetch, url: str) -> None:
        self._transfers[self._aria2.add(url, fetch.file.path)] = fetch

    def _fetch_plainly(self, fetch: Fetch) -> None:
        self._forget(fetch.file)
        os.makedirs(os.path.dirname(self.path(fetch.file)), exist_ok=True)
        fetch.done = 0

        def moved(count: int) -> None:
            fetch.done += count
            self._byte(count)

        self._submit(
            self._askers,
            fetch,
            self._fetched_plainly,
            self._hub.download,
            self._configuration.repository,
            self._revision,
            fetch.file.path,
            self.path(fetch.file),
            fetch.file.bytes,
            moved,
            self._stopping,
        )

    def _fetch_by_client(self, fetch: Fetch) -> None:
        fetch.done = 0

        def moved(count: int) -> None:
            fetch.done = min(fetch.file.bytes, fetch.done + count)
            self._byte(count)

        self._submit(
            self._askers,
            fetch,
            self._fetched_by_client,
            client.download,
            self._configuration.client,
            self._hub.address,
            self._hub.token_path,
            self._configuration.repository,
            self._revision,
            fetch.file.path,
            self._staging,
            moved,
            self._stopping,
        )

    def _fetched_by_client(self, fetch: Fetch, future: Future[None]) -> None:
        try:
            future.result()
        except client.ClientFailed as error:
            say(f"{fetch.file.path}: the hub's client brought nothing ({error}); a plain connection is left")
            fetch.client, fetch.plain = False, True
            self._waiting.insert(0, fetch)
        except OSError as error:
            raise self._disk_trouble(error, fetch.file) from None
        else:
            self._hash(fetch)

    def _fetched_plainly(self, fetch: Fetch, future: Future[None]) -> None:
        try:
            future.result()
        except HubUnreachable as error:
            self._set_back(fetch, error)
        except OSError as error:
            raise self._disk_trouble(error, fetch.file) from None
        else:
            self._hash(fetch)

    def _fetch_from_peers(self, fetch: Fetch, table: str) -> None:
        fetch.table, fetch.done = table, 0

        def moved(count: int) -> None:
            fetch.done = min(fetch.file.bytes, fetch.done + count)
            self._byte(count)

        self._submit(self._takers, fetch, self._fetched_from_peers, self._take, fetch, moved)

    def _take(self, fetch: Fetch, moved: Callable[[int], None]) -> None:
        """Bring a file from other nodes to its place; only the pieces that are not here already. Raises Unshared."""
        path = self.path(fetch.file)
        partial = path + PARTIAL
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if fetch.damaged and not os.path.lexists(partial):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(fetch.damaged, partial)
        self._company.download(fetch.file, fetch.table, partial, moved, self._stopping)
        self._forget(fetch.file)
        os.rename(partial, path)

    def _fetched_from_peers(self, fetch: Fetch, future: Future[None]) -> None:
        try:
            future.result()
        except Unshared as error:
            fetch.done, fetch.unshared = 0, fetch.unshared + 1
            fetch.not_before = time.monotonic() + 1
            say(f"{fetch.file.path}: does not come from other nodes ({error})")
            if fetch.unshared % PEERS_TRIES == 0:
                self._company.refuse(fetch.file, fetch.table)
            self._waiting.insert(0, fetch)
        except OSError as error:
            raise self._disk_trouble(error, fetch.file) from None
        else:
            self._hash(fetch)

    def _follow(self, fetch: Fetch) -> None:
        path = self.path(fetch.file)
        fetch.followed, fetch.table = True, ""
        fetch.done = aria2.begun(path, fetch.file.bytes).done

        def moved(count: int) -> None:
            fetch.done = min(fetch.file.bytes, fetch.done + count)
            self._byte(count)

        self._submit(
            self._followers, fetch, self._followed, self._company.follow, fetch.file, path, moved, self._stopping
        )

    def _followed(self, fetch: Fetch, future: Future[None]) -> None:
        try:
            future.result()
        except Unshared as error:
            say(f"{fetch.file.path}: {fetch.done} bytes copied from the node that fetches it ({error})")
            self._waiting.insert(0, fetch)
        except OSError as error:
            raise self._disk_trouble(error, fetch.file) from None
        else:
            self._hash(fetch)

    def _confer(self) -> None:
        """Tell the other nodes, and stop what another has taken over."""
        company = self._company
        others = (self._fetched_from_peers, self._followed)
        hub = any(then not in others and not fetch.table for fetch, then in self._futures.values())
        copying = [fetch for fetch, then in self._futures.values() if then == self._followed]
        missing = any(  # also of what is being copied: the node that fetches it may be gone
            fetch.file.bytes and not company.offer(fetch.file) and not company.coming(fetch.file)
            for fetch in [*self._waiting, *copying]
        )
        done = self.has_already + int(self._status.fields["done"])
        copied = [*copying, *(fetch for fetch in self._waiting if fetch.followed)]
        company.say(
            bool(self._transfers) or hub or missing,
            self.has_already + self._arrived + sum(fetch.done for fetch in copied),
            done,
            sorted(fetch.file.digest for fetch in self._transfers.values()),
            sorted(self._right | {fetch.file.digest for fetch, then in self._futures.values() if then == self._hashed}),
            len(self._right),
        )
        for transfer, fetch in list(self._transfers.items()):
            if not company.hub_allowed or company.offer(fetch.file):
                self._waiting.append(self._transfers.pop(transfer))
                self._aria2.drop(transfer)
        if company.moved != self._others_moved:
            self._others_moved = company.moved
            self._status.moved(1)  # what this node waits for goes on

    def _byte(self, count: int) -> None:
        self._last_byte = time.monotonic()
        self._status.worked(count)
        self._status.trouble(None)

    def _look(self) -> None:
        for transfer, state in self._aria2.look(self._transfers).items():
            fetch = self._transfers[transfer]
            if fetch.seen and state.done > fetch.done:
                self._byte(state.done - fetch.done)
                fetch.setbacks = 0
            fetch.done = state.done
            fetch.seen = True  # the first look also tells what an earlier run brought: no progress of this one
            if state.state in ("active", "waiting") and state.total in (0, fetch.file.bytes):
                continue
            del self._transfers[transfer]
            self._aria2.drop(transfer)
            if state.state == "complete" or (state.total not in (0, fetch.file.bytes) and state.state == "active"):
                self._hash(fetch)
            elif state.error == aria2.NO_SPACE:
                raise self._disk_trouble(OSError(28, "No space left on device"), fetch.file)
            else:
                reason = state.message.split("URI=")[0].strip() or state.state
                self._set_back(
                    fetch,
                    HubUnreachable(
                        f"{self._configuration.hub}: {fetch.file.path} breaks off at {state.done} of "
                        f"{fetch.file.bytes} bytes (aria2 error {state.error}: {reason}), wanted all of it. "
                        "Fix: none here, it is tried again; see whether the hub and the network are well"
                    ),
                )

    def _set_back(self, fetch: Fetch, error: HubUnreachable) -> None:
        """Try a file again, later and later; give up where nothing at all has moved for long."""
        fetch.setbacks += 1
        fetch.not_before = time.monotonic() + min(30, 2**fetch.setbacks)
        if fetch.setbacks >= ARIA2_TRIES:
            fetch.plain = True
        self._waiting.append(fetch)
        self._status.trouble(str(error))
        if time.monotonic() - self._last_byte > PATIENCE:
            raise error

    def _hash(self, fetch: Fetch) -> None:
        fetch.done = fetch.file.bytes
        self._submit(
            self._hashers,
            fetch,
            self._hashed,
            hashing.digest,
            self.path(fetch.file),
            fetch.file,
            self._status.moved,
            self._stopping,
            True,
        )

    def _hashed(self, fetch: Fetch, future: Future[Hashed]) -> None:
        try:
            hashed = future.result()
        except OSError as error:
            raise self._disk_trouble(error, fetch.file) from None
        self._last_byte = time.monotonic()
        if hashed.right:
            disk.forget(self.path(fetch.file) + PARTIAL)
            self.journal.add(hashed)
            self._right.add(fetch.file.digest)
            self._arrived += fetch.file.bytes
            self._status.set(files_done=self._status.fields["files_done"] + 1)
            return
        self._forget(fetch.file)
        fetch.done = 0
        if fetch.table:
            self._company.refuse(fetch.file, fetch.table)
            fetch.damaged = ""
            say(f"{fetch.file.path}: found {hashed.found} from other nodes, wanted {fetch.file.digest}; deleted")
        elif fetch.leftover or fetch.followed:
            fetch.leftover = False  # a dead run's file only looked whole: that is no fault of the hub
            if fetch.followed:
                fetch.followed = False
                self._company.distrust(fetch.file)
                say(
                    f"{fetch.file.path}: found {hashed.found}, copied in part from another node, wanted "
                    f"{fetch.file.digest}; deleted"
                )
        elif fetch.wrong:
            raise WrongContent(
                f"{fetch.file.path} of {self._configuration.repository} at {self._revision}: found {fetch.wrong} and "
                f"{hashed.found} by {self._way(fetch)}, wanted {fetch.file.digest} ({fetch.file.bytes} bytes). "
                "Fix: see whether hub or mirror serve this revision (bin/pin --compare), and what lies between "
                "(a proxy, a cache)"
            )
        else:
            fetch.wrong = f"{hashed.found} by {self._way(fetch)}"
            fetch.client = bool(self._configuration.client) and self._hub.speaks_to_client
            fetch.plain = not fetch.client
            say(
                f"{fetch.file.path}: found {fetch.wrong}, wanted {fetch.file.digest}; "
                f"deleted, fetched again by {self._way(fetch)}"
            )
        self._waiting.insert(0, fetch)

    def _way(self, fetch: Fetch) -> str:
        """The transport that a file takes, in words."""
        if fetch.client:
            return "the hub's client"
        return "a plain connection" if fetch.plain or not self._hub.serves_aria2 else "aria2"

    def _disk_trouble(self, error: OSError, file: File) -> AgentError:
        fix = "free space there" if disk.full(error) else "see what is wrong with that file system (dmesg)"
        return NoRoom(
            f"{self._staging}: {error.strerror} while {file.path} was written or read, wanted its {file.bytes} bytes. "
            f"Fix: {fix}, then systemctl start the unit or run deploy.py again; what has arrived is kept"
        )

    def _collect(self) -> None:
        for future in [future for future in self._futures if future.done()]:
            fetch, then = self._futures.pop(future)
            then(fetch, future)

    def _tell(self) -> None:
        on_the_way = {id(fetch): fetch for fetch in self._transfers.values()}
        on_the_way |= {id(fetch): fetch for fetch in self._waiting}
        on_the_way |= {id(fetch): fetch for fetch, _ in self._futures.values()}
        hashing_only = not self._transfers and not self._waiting
        hashing_only = hashing_only and all(then == self._hashed for _, then in self._futures.values())
        idle = not self._transfers and not self._futures and not self._company.hub_allowed
        phase = "hashing" if hashing_only else "waiting" if self._status.fields["error"] else "fetching"
        phase = "waiting for a peer" if idle and self._waiting else phase
        done = sum(min(fetch.done, fetch.file.bytes) for fetch in on_the_way.values())
        self._status.set(phase=phase, done=self._arrived + done)


@contextlib.contextmanager
def _pool(workers: int, name: str) -> Any:
    pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
