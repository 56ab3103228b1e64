"""The hub, or a mirror that answers like it: where a file is to be had, and whether we may have it.

The token goes to the hub's own address and nowhere else: not to aria2, which would send it along every redirection
(aria2 issue 1176), and not to the content network that the hub redirects to.
"""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from threading import Event
from typing import IO, Any
from urllib.parse import quote, urljoin, urlsplit

from .errors import AgentError, HubUnreachable, NotOnHub, Refused, Stopped

TIMEOUT = 30  # seconds without an answer, or without a byte
BLOCK = 1 << 18
COPY_BLOCK = 4 << 20
_REDIRECTIONS = (301, 302, 303, 307, 308)


def origin(url: str) -> tuple[str, str, int]:
    """(scheme, host, port): what must be the same for a token to be sent."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"https": 443, "http": 80}.get(parts.scheme, 0)


PATH = "{path}"


def fill(pattern: str, repository: str, revision: str, path: str) -> str:
    """A pattern with what stands for its three names."""
    filled = pattern.replace("{repository}", repository).replace("{revision}", revision)
    return filled.replace(PATH, path)  # last: a path may hold anything


class _Stay(urllib.request.HTTPRedirectHandler):
    """Hands redirections back, so that each is judged before anything is sent there."""

    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        return None


_opener = urllib.request.build_opener(_Stay)


class Hub:
    """address: of a hub, with scheme, no slash at its end; or a pattern of addresses, with {path} and, where wanted,
    {repository} and {revision} in it. token: None for public repositories; token_path: its file, for the hub's client.
    """

    serves_aria2 = True

    def __init__(self, address: str, token: str | None = None, timeout: float = TIMEOUT, token_path: str | None = None):
        self.address, self._token, self._timeout = address.rstrip("/"), token, timeout
        self.token_path = token_path if token is not None else None

    @property
    def speaks_to_client(self) -> bool:
        """Whether the hub's own client understands what answers there."""
        return PATH not in self.address

    @property
    def has_token(self) -> bool:
        return self._token is not None

    def url(self, repository: str, revision: str, path: str) -> str:
        if PATH in self.address:
            return fill(self.address, repository, revision, quote(path))
        return f"{self.address}/{repository}/resolve/{revision}/{quote(path)}"

    def open(self, url: str, method: str = "GET", headers: dict[str, str] | None = None, follow: bool = True) -> Any:
        """The answer to one request; redirections within the hub are followed with the token, others without.

        follow: False to get a redirection to another host back as the answer, not followed. Raises urllib's errors.
        """
        for _ in range(8):
            sent = {"User-Agent": "kimi-nodes", "Accept-Encoding": "identity", **(headers or {})}
            at_home = origin(url) == origin(self.address)
            if self._token is not None and at_home:
                sent["Authorization"] = f"Bearer {self._token}"
            request = urllib.request.Request(url, method=method, headers=sent)
            try:
                return _opener.open(request, timeout=self._timeout)
            except urllib.error.HTTPError as error:
                target = error.headers.get("Location") if error.code in _REDIRECTIONS else None
                if target is None:
                    raise
                url = urljoin(url, target)
                if not follow and origin(url) != origin(self.address):
                    return error
                error.close()
        raise urllib.error.URLError("redirected more than 8 times")

    def locate(self, repository: str, revision: str, path: str) -> str | None:
        """Where the content of a file is: a signed address on another host, or None where the hub itself serves it.

        Raises NotOnHub, Refused or HubUnreachable: so it is also the question whether a file can be had at all.
        """
        url = self.url(repository, revision, path)
        try:
            with self.open(url, "HEAD", follow=False) as answer:
                target = answer.headers.get("Location")
                return urljoin(url, target) if target else None
        except (OSError, http.client.HTTPException) as error:
            raise self.explain(error, repository, revision, path) from None

    def explain(self, error: Exception, repository: str, revision: str, path: str) -> AgentError:
        """The error of one file as one of ours."""
        if not isinstance(error, urllib.error.HTTPError):
            reason = getattr(error, "reason", None) or error
            return HubUnreachable(
                f"{self.address}: no answer ({reason}), wanted {repository}. Fix: see whether this node reaches it "
                f"(curl -I {self.address}); for a site without the hub set the inventory key hub to a mirror"
            )
        what = error.headers.get("X-Error-Code") or f"HTTP {error.code}"
        token = "its token" if self._token is not None else "no token"
        if error.code in (401, 403) and what != "RepoNotFound":
            return Refused(
                f"{self.address}: answers {error.code} ({what}) for {repository} with {token}, wanted to be let in. "
                "Fix: ask for access on the repository's page, then set the inventory key hub_token_file"
            )
        if error.code in (401, 403, 404, 410):
            missing = {
                "RepoNotFound": f"repository {repository} (or {token} may see it)",
                "RevisionNotFound": f"revision {revision} of {repository}",
            }.get(what, f"{path} in {repository} at {revision}")
            return NotOnHub(
                f"{self.address}: has no {missing}: {error.code} ({what}). Fix: bin/pin --compare shows what is there; "
                "a repository that is gone can be served from a mirror by the inventory key hub"
            )
        return HubUnreachable(
            f"{self.address}: answers {error.code} ({what}) for {path}, wanted its content. "
            "Fix: none here, it is tried again; see the hub's or the mirror's own state"
        )

    def download(
        self,
        repository: str,
        revision: str,
        path: str,
        target: str,
        size: int,
        moved: Callable[[int], None],
        stopping: Event,
    ) -> None:
        """Write a file's content to `target`, by one plain connection: the transport that shares nothing with aria2.

        A cut or stalled connection goes on at the byte where it was. Raises AgentError kinds, and OSError of the disk.
        """
        url = self.url(repository, revision, path)
        fruitless = 0
        with open(target, "wb") as written:
            while True:
                before = written.tell()
                try:
                    for block in self._blocks(url, before, written, size):
                        written.write(block)
                        moved(len(block))
                        if stopping.is_set():
                            raise Stopped("stopped while fetching")
                    return
                except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
                    fruitless = 0 if written.tell() > before else fruitless + 1
                    explained = self.explain(error, repository, revision, path)
                    if explained.permanent or fruitless >= 5:
                        raise explained from None
                if stopping.wait(2**fruitless):
                    raise Stopped("stopped while fetching")

    def _blocks(self, url: str, start: int, target: IO[bytes], size: int) -> Iterator[bytes]:
        headers = {"Cache-Control": "no-cache"}  # wrong bytes may come from a cache on the way
        if start:
            headers["Range"] = f"bytes={start}-"
        with self.open(url, headers=headers) as answer:
            if start and answer.status != 206:
                target.seek(0)
                target.truncate()
                start = 0
            while block := answer.read(BLOCK):
                start += len(block)
                yield block
                if start > size:
                    return  # too long already: its size will tell that it is not the manifest's
            if start < size and answer.length:
                raise ConnectionError(f"cut after {start} of {size} bytes")


class Folder:
    """A folder of this node instead of a hub: a disk that was carried here, or a mount. Its files are copied.

    address: file:// and an absolute path with {path} and, where wanted, {repository} and {revision} in it.
    """

    serves_aria2 = speaks_to_client = has_token = False
    token_path = None

    def __init__(self, address: str):
        self.address = address

    def _source(self, repository: str, revision: str, path: str) -> str:
        return fill(self.address.removeprefix("file://"), repository, revision, path)

    def locate(self, repository: str, revision: str, path: str) -> None:
        """Raises NotOnHub where there is no such file."""
        source = self._source(repository, revision, path)
        if not os.path.isfile(source):
            raise NotOnHub(f"{source}: found no file, wanted {path} of {repository}. Fix: mend the inventory key hub")

    def url(self, repository: str, revision: str, path: str) -> str:
        return "file://" + self._source(repository, revision, path)

    def download(
        self,
        repository: str,
        revision: str,
        path: str,
        target: str,
        size: int,
        moved: Callable[[int], None],
        stopping: Event,
    ) -> None:
        """Copy a file. Raises NotOnHub, Stopped, and OSError of the disk."""
        self.locate(repository, revision, path)
        with open(self._source(repository, revision, path), "rb") as source, open(target, "wb") as written:
            while block := source.read(COPY_BLOCK):
                written.write(block)
                moved(len(block))
                if stopping.is_set():
                    raise Stopped("stopped while copying")
                if written.tell() > size:
                    return


def source(address: str, token: str | None, timeout: float, token_path: str | None = None) -> Hub | Folder:
    """Where files come from, by the scheme of the address."""
    return Folder(address) if address.startswith("file://") else Hub(address, token, timeout, token_path)
