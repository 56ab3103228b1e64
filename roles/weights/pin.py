"""Write the manifest of a model's or drafter's weights from the hub: the one moment at which the hub is believed.

    bin/pin kimi-k2.6                             at the revision that node/models.py pins
    bin/pin kimi-k2.6 --latest                    at what main is now, which is shown; the manifest holds the commit
    bin/pin kimi-k2.6 --latest --compare          what would change; nothing is written
    bin/pin kimi-k2.6-dflash --token-file FILE    a gated repository; without --token-file, the file of HF_TOKEN_PATH

The manifest goes to files/manifests/MODEL.json: look through it, and commit it. Exit codes: 0 done, or nothing differs;
1 with --compare: it differs; 2 an error.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import re
import sys
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

from files.tools.weights.hub import Hub, origin
from node.inventory import KEYS
from node.manifest import REVISION, File, Manifest, compare, loads
from node.models import DRAFTERS, MODELS, Drafter, Model
from node.problems import Malformed, Problem

ROOT = Path(__file__).resolve().parents[2]
MOST_TO_HASH = 256 << 20  # bytes of a file that the hub has no sha256 of; such files are small by the hub's own rules


class PinError(Exception):
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


def fail(subject: str, found: str, wanted: str, fix: str) -> PinError:
    return PinError(Problem(subject, found, wanted, fix))


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Run bin/pin; its exit code."""
    parser = argparse.ArgumentParser(
        prog="bin/pin", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help=", ".join([*MODELS, *DRAFTERS]))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--revision", help="a commit of 40 hex digits, or a name on the hub that is resolved to one now")
    which.add_argument("--latest", action="store_true", help="what main is now")
    parser.add_argument("--hub", default=KEYS["hub"].default, metavar="URL", help="default: %(default)s")
    parser.add_argument("--token-file", type=Path, help="a file with a hub token; never give a token itself")
    parser.add_argument("--output", type=Path, help="default: files/manifests/MODEL.json")
    parser.add_argument("--compare", action="store_true", help="show what would change, write nothing")
    given = parser.parse_args(arguments)
    try:
        return pin(given, environment)
    except PinError as error:
        print(error, file=sys.stderr)
        return 2


def pin(given: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Raises PinError."""
    entry = model(given.model)
    output = given.output or ROOT / "files" / "manifests" / f"{entry.key}.json"
    old = existing(output)
    source = Repository(Hub(given.hub, token(given.token_file, environment)), entry.repository)
    named = "main" if given.latest else given.revision or entry.revision or "main"
    revision = source.commit(named)
    if named != revision:
        print(f"{entry.repository}: {named} is {revision} now")
    new = Manifest(entry.repository, revision, tuple(source.files(revision)))
    lines = changes(old, new)
    print("\n".join(lines) or f"{output}: is so already")
    if given.compare:
        return 1 if lines else 0
    if lines:
        write(output, new.dumps())
    print(f"{output}: {len(new.files)} files, {new.bytes} bytes, {new.repository} at {new.revision}")
    if revision != entry.revision:
        prefix = "drafter_" if isinstance(entry, Drafter) else ""
        print(
            f'To serve it, set {prefix}revision = "{revision}" in the group data: node/models.py has {entry.revision}.'
        )
    return 0


def model(key: str) -> Model | Drafter:
    """Raises PinError for a name that no entry has."""
    known: dict[str, Model | Drafter] = {**MODELS, **DRAFTERS}
    if key not in known:
        near = get_close_matches(key, known, n=1)
        raise fail("model", key, "one of " + ", ".join(known), f"bin/pin {near[0] if near else next(iter(known))}")
    return known[key]


def existing(path: Path) -> Manifest | None:
    """The manifest that is there now. Raises PinError where something else is."""
    try:
        return loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, Malformed) as error:
        raise fail(f"manifest {path}", str(error), "a manifest, or nothing", f"look at it, then: rm {path}") from None


def token(path: Path | None, environment: Mapping[str, str]) -> str | None:
    """The hub token from a file. Raises PinError where the file holds none."""
    if path is None and environment.get("HF_TOKEN_PATH"):
        path = Path(environment["HF_TOKEN_PATH"])
    if path is None:
        return None
    try:
        text = path.expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise fail(f"token file {path}", str(error), "a file with a hub token", "mend --token-file") from None
    if not text or any(character.isspace() for character in text):
        raise fail(f"token file {path}", "no single word", "the token and nothing else", "mend that file")
    return text


def changes(old: Manifest | None, new: Manifest) -> list[str]:
    """What the new manifest changes; every file where there was none."""
    if old is None:
        return [f"+ {file.path} ({file.bytes} bytes)" for file in sorted(new.files, key=lambda file: file.path)]
    head = []
    for name in ("repository", "revision"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            head.append(f"~ {name} ({before} -> {after})")
    return head + compare(old, new)


def write(path: Path, text: str) -> None:
    """By one rename. Raises PinError."""
    beside = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.rename(path)
    except OSError as error:
        raise fail(str(path), str(error.strerror), "to write the manifest there", "give another --output") from None


class Repository:
    """A repository on a hub, by the hub's API."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.hub, self.name = hub, name

    def commit(self, revision: str) -> str:
        """The commit that a revision is now. Raises PinError: no such thing, gated, renamed, no answer."""
        answer, _ = self.ask(f"{self.hub.address}/api/models/{self.name}/revision/{quote(revision, safe='')}", revision)
        name = answer.get("id") if isinstance(answer, dict) else None
        if name != self.name:
            raise fail(
                f"repository {self.name}",
                f"{name or 'no name'}: it has been renamed, or the address is not a hub's",
                "the name that node/models.py has",
                "see who owns the new name, then change repository in node/models.py",
            )
        commit = str(answer.get("sha"))
        if not REVISION.fullmatch(commit):
            raise fail(
                f"revision {revision} of {self.name}", repr(commit), "a commit of 40 hex digits", "use another hub"
            )
        if REVISION.fullmatch(revision) and commit != revision:
            raise fail(f"revision {revision} of {self.name}", commit, "the same commit", "use another hub")
        return commit

    def files(self, commit: str) -> Iterator[File]:
        """Every file with its sha256. Raises PinError for any that cannot be had or is not what the hub lists."""
        for entry in self.tree(commit):
            if entry.get("type") == "directory":
                continue
            try:
                path, size, lfs = str(entry["path"]), int(entry["size"]), entry.get("lfs")
                if lfs:
                    yield File(path, int(lfs["size"]), str(lfs["oid"]))
                    continue
                oid = str(entry["oid"])
            except (KeyError, TypeError, ValueError):
                raise fail(f"listing of {self.name}", repr(entry), "path, size and oid", "use another hub") from None
            yield File(path, size, self.hash(commit, path, size, oid))

    def tree(self, commit: str) -> Iterator[dict[str, Any]]:
        """The hub's listing, all pages of it."""
        url: str | None = f"{self.hub.address}/api/models/{self.name}/tree/{commit}?recursive=true"
        while url:
            page, following = self.ask(url, commit)
            if not isinstance(page, list) or not all(isinstance(entry, dict) for entry in page):
                raise fail(f"listing of {self.name}", repr(page)[:120], "a list of files", "use another hub")
            yield from page
            url = following

    def ask(self, url: str, revision: str) -> tuple[Any, str | None]:
        """(answer, address of the next page | None). Raises PinError."""
        try:
            with self.hub.open(url) as answer:
                found = json.load(answer)
                link = re.search(r'<([^>]+)>;\s*rel="next"', answer.headers.get("Link") or "")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self.explain(error, revision) from None
        following = urljoin(url, link[1]) if link else None
        if following and origin(following) != origin(self.hub.address):
            raise fail(f"listing of {self.name}", following, f"its next page at {self.hub.address}", "use another hub")
        return found, following

    def hash(self, commit: str, path: str, size: int, oid: str) -> str:
        """sha256 of a file that the hub knows by its git object id only: fetched, and checked against that id."""
        if size > MOST_TO_HASH:
            raise fail(f"{path} of {self.name}", f"{size} bytes without a sha256", "an LFS file", "use another hub")
        try:
            with self.hub.open(self.hub.url(self.name, commit, path)) as answer:
                content = answer.read(size + 1)
        except (OSError, http.client.HTTPException) as error:
            raise self.explain(error, commit) from None
        found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        if found != oid or len(content) != size:
            raise fail(
                f"{path} of {self.name}",
                f"{len(content)} bytes, git object {found}",
                f"{size} bytes, git object {oid}, as the hub lists it",
                "try again; a proxy or mirror on the way changes files",
            )
        return hashlib.sha256(content).hexdigest()

    def explain(self, error: Exception, revision: str) -> PinError:
        """An error of one request, in the owner's terms."""
        if not isinstance(error, urllib.error.HTTPError):
            reason = getattr(error, "reason", None) or error
            return fail(
                f"hub {self.hub.address}",
                f"no answer ({reason})",
                f"that of {self.name}",
                f"curl -I {self.hub.address}",
            )
        code = error.headers.get("X-Error-Code") or f"HTTP {error.code}"
        given = "with the given token" if self.hub.has_token else "without a token"
        if code == "RevisionNotFound":
            return fail(f"revision {revision} of {self.name}", code, "a commit of it", "bin/pin ... --latest shows one")
        if error.code in (401, 403) and code != "RepoNotFound":
            return fail(
                f"repository {self.name}",
                f"{error.code} ({code}) {given}: it is gated",
                "to be let in",
                f"ask for access at {self.hub.address}/{self.name}, then give --token-file",
            )
        if error.code in (401, 403, 404, 410):
            return fail(
                f"repository {self.name}",
                f"{error.code} ({code}) {given}: it does not exist there, or is private",
                "a repository to pin",
                "look it up on the hub; a copy on a mirror can be pinned with --hub",
            )
        return fail(f"hub {self.hub.address}", f"{error.code} ({code})", f"that of {self.name}", "try again later")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
