"""A manifest is read, written and compared; what could not be trusted is refused, on controller and node alike."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from files.tools.weights import manifest as on_node
from node.inventory import KEYS
from node.manifest import File, Manifest, compare, loads
from node.problems import Malformed

REVISION = "b5aabbfb20227ed42becbf5541dbffd213942c58"
SHA256, GIT_SHA1 = "ab" * 32, "cd" * 20
GOOD = {
    "repository": "moonshotai/Kimi-K2.6",
    "revision": REVISION,
    "files": [
        {"path": "config.json", "bytes": 3, "sha256": SHA256},
        {"path": "a/b.py", "bytes": 0, "git_sha1": GIT_SHA1},
    ],
}


def with_file(**changes: object) -> dict[str, object]:
    entry = {"path": "config.json", "bytes": 3, "sha256": SHA256, **changes}
    return {**GOOD, "files": [{name: value for name, value in entry.items() if value is not None}]}


BAD = {
    "a list": [],
    "another key": {**GOOD, "extra": 1},
    "no files": {**GOOD, "files": []},
    "files that are none": {**GOOD, "files": [1]},
    "a branch name": {**GOOD, "revision": "main"},
    "a short revision": {**GOOD, "revision": REVISION[:12]},
    "capitals": {**GOOD, "revision": REVISION.upper()},
    "a repository without owner": {**GOOD, "repository": "Kimi-K2.6"},
    "a repository that climbs": {**GOOD, "repository": "../Kimi-K2.6"},
    "a path that climbs": with_file(path="../outside"),
    "a path that climbs later": with_file(path="a/../../outside"),
    "an absolute path": with_file(path="/etc/passwd"),
    "an empty path": with_file(path=""),
    "a path with a dot in it": with_file(path="./config.json"),
    "a path with two slashes": with_file(path="a//b"),
    "a path with a zero byte": with_file(path="a\0b"),
    "our own receipt": with_file(path=".kimi-nodes-receipt.json"),
    "no bytes": with_file(bytes=None),
    "negative bytes": with_file(bytes=-1),
    "bytes that are true": with_file(bytes=True),
    "bytes in text": with_file(bytes="3"),
    "no digest": with_file(sha256=None),
    "two digests": with_file(git_sha1=GIT_SHA1),
    "a short digest": with_file(sha256=SHA256[1:]),
    "a digest in capitals": with_file(sha256=SHA256.upper()),
    "an unknown field": with_file(mode=0o755),
    "a path twice": {**GOOD, "files": [GOOD["files"][0], GOOD["files"][0]]},
    "a file that is a folder too": {
        **GOOD,
        "files": [
            {"path": "a", "bytes": 1, "sha256": SHA256},
            {"path": "a/b", "bytes": 1, "sha256": SHA256},
        ],
    },
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_what_cannot_be_trusted_is_refused_by_both(data: object) -> None:
    text = json.dumps(data).encode()
    with pytest.raises(Malformed):
        loads(text)
    with pytest.raises(ValueError):
        on_node.parse(text)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"null"])
def test_what_is_no_manifest_is_refused_by_both(text: bytes) -> None:
    with pytest.raises(Malformed):
        loads(text)
    with pytest.raises(ValueError):
        on_node.parse(text)


names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..") and not name.startswith(".kimi-nodes")
)
files = st.dictionaries(
    names,
    st.builds(
        lambda size, digest: (size, digest),
        st.integers(0, 10**12),
        st.sampled_from([("sha256", SHA256), ("git_sha1", GIT_SHA1)]),
    ),
    min_size=1,
    max_size=8,
)


@given(files)
def test_written_and_read_again_it_is_the_same_on_controller_and_node(
    entries: dict[str, tuple[int, tuple[str, str]]],
) -> None:
    made = Manifest(
        "owner/name",
        REVISION,
        tuple(
            File(path, size, digest if kind == "sha256" else None, digest if kind == "git_sha1" else None)
            for path, (size, (kind, digest)) in sorted(entries.items())
        ),
    )
    text = made.dumps()
    assert loads(text) == made
    read = on_node.parse(text.encode())
    assert read.sha256 == made.sha256
    assert read.bytes == made.bytes
    assert [(file.path, file.bytes, file.sha256, file.git_sha1) for file in read.files] == [
        (file.path, file.bytes, file.sha256, file.git_sha1) for file in made.files
    ]


def test_one_file_a_line_sorted_so_that_two_diff_well() -> None:
    made = loads(json.dumps(GOOD))
    lines = made.dumps().splitlines()
    assert [json.loads(line.rstrip(","))["path"] for line in lines[1:-1]] == ["a/b.py", "config.json"]
    assert made.bytes == 3


def test_comparing_names_every_file_that_differs_and_no_other() -> None:
    same, gone, grown = File("same", 1, SHA256), File("gone", 2, SHA256), File("changed", 3, SHA256)
    old = Manifest("a/b", REVISION, (same, gone, grown))
    new = Manifest("a/b", REVISION, (same, File("changed", 4, "ef" * 32), File("new", 5, SHA256)))
    assert compare(old, new) == ["~ changed (3 -> 4 bytes)", "- gone (2 bytes)", "+ new (5 bytes)"]
    assert compare(old, old) == []


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ("https://huggingface.co", True),
        ("http://10.0.0.1:8080/mirror", True),
        ("https://mirror.example/kimi/{path}", True),
        ("https://mirror.example/{repository}/{revision}/{path}", True),
        ("file:///mnt/usb/{repository}/{path}", True),
        ("file:///mnt/usb", False),
        ("file://mnt/{path}", False),
        ("file:///mnt/../{path}", False),
        ("https://mirror.example/{repository}", False),
        ("https://mirror.example/{name}/{path}", False),
        ("https://user:secret@mirror.example/{path}", False),
        ("ftp://mirror.example/{path}", False),
        ("huggingface.co", False),
    ],
)
def test_where_weights_may_come_from(value: str, good: bool) -> None:
    check = KEYS["hub"].check
    assert (check(value) is None) is good
