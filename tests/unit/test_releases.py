"""Releases: the data is whole and true to the releases' own argument parsers, and the digest covers what it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.patches import PATCHES, bears_load
from node.profiles import PROFILES
from node.releases import DEFAULT_RELEASE, RELEASES, Release, UnknownOption, digest
from node.toolkits import TOOLKITS

PROJECT = Path(__file__).resolve().parents[2]
each_release = pytest.mark.parametrize("release", RELEASES.values(), ids=lambda release: release.name)


def options(release: Release) -> set[str]:
    return set((PROJECT / release.options_file).read_text().split())


def test_the_default_is_one_of_them() -> None:
    assert DEFAULT_RELEASE in RELEASES


@each_release
def test_every_flag_of_a_dialect_is_one_that_the_release_takes(release: Release) -> None:
    assert set(release.dialect.values()) - options(release) == set()


@each_release
def test_no_flag_of_a_dialect_stands_for_two_options(release: Release) -> None:
    assert len(set(release.dialect.values())) == len(release.dialect)


def test_releases_share_one_vocabulary_so_that_a_profile_serves_them_all() -> None:
    vocabularies = {frozenset(release.dialect) for release in RELEASES.values()}
    assert len(vocabularies) == 1


@each_release
def test_every_option_of_every_profile_has_a_flag(release: Release) -> None:
    for profile in PROFILES.values():
        flags = [word for word in release.arguments(profile.options) if word.startswith("--")]
        assert len(flags) == sum(value not in (None, False) for value in profile.options.values())
        assert set(flags) <= options(release)


def test_the_decode_graph_limit_has_the_name_that_each_release_knows() -> None:
    flags = {name: release.flag("cuda_graph_max_bs") for name, release in RELEASES.items()}
    assert flags["sglang-0.5.17"] == "--cuda-graph-max-bs"
    assert flags["sglang-0.5.23"] == "--cuda-graph-max-bs-decode"
    assert "--cuda-graph-max-bs" not in options(RELEASES["sglang-0.5.23"])


def test_arguments_are_written_as_an_argument_parser_reads_them() -> None:
    written = RELEASES[DEFAULT_RELEASE].arguments(
        {
            "tensor_parallel": 8,
            "trust_remote_code": True,
            "disable_cuda_graph": False,
            "context_length": None,
            "memory_fraction": 0.9,
            "cuda_graph_bs": [1, 2, 4],
            "host": "127.0.0.1",
        }
    )
    assert written == [
        *("--tp-size", "8", "--trust-remote-code", "--mem-fraction-static", "0.9"),
        *("--cuda-graph-bs", "1", "2", "4", "--host", "127.0.0.1"),
    ]


def test_an_option_without_a_flag_is_named_with_its_release_and_a_fix() -> None:
    with pytest.raises(
        UnknownOption, match=r"option tensor_paralel: found no flag .* sglang-0\.5\.17.* Fix: "
    ) as caught:
        RELEASES["sglang-0.5.17"].arguments({"tensor_paralel": 8})
    assert str(caught.value).startswith("option tensor_paralel:")


@each_release
def test_its_toolkit_and_its_patches_are_known_and_its_toolkit_is_new_enough(release: Release) -> None:
    assert release.toolkit is TOOLKITS[release.cuda_toolkit]
    assert set(release.patches) <= set(PATCHES)
    assert tuple(map(int, release.toolkit.nvcc.split("."))) >= tuple(map(int, release.minimum_nvcc.split(".")))


@each_release
def test_the_pipeline_fault_is_said_where_its_patch_bears_load_and_nowhere_else(release: Release) -> None:
    patch = PATCHES["sglang-pipeline-first-layer"]
    assert release.pipeline_fault == bears_load(patch, release.sglang, release.toolkit.nvcc)[0]


@each_release
def test_every_patch_knows_the_file_of_every_release_it_is_considered_for(release: Release) -> None:
    for name in release.patches:
        patch = PATCHES[name]
        assert release.pins[patch.package] in {**patch.digests, **patch.upstream}


@each_release
def test_caches_are_folders_of_their_own_below_the_release_s(release: Release) -> None:
    folders = list(release.cache_environment.values())
    assert len(set(folders)) == len(folders)
    assert all(folder and not folder.startswith("/") and ".." not in folder for folder in folders)


def test_the_compiler_of_the_wheels_is_found_by_the_python_of_the_environment() -> None:
    assert RELEASES["sglang-0.5.17"].wheel_nvcc("3.12") == ("lib/python3.12/site-packages/nvidia/cu13/bin/nvcc",)


class TestDigest:
    release = RELEASES[DEFAULT_RELEASE]
    patched = (("one", "a" * 64), ("two", "b" * 64))

    def of(self, **changes: object) -> str:
        given = {
            "release": self.release,
            "lock_bytes": b"lock",
            "patched": self.patched,
            "toolkit": "13.0",
            "python": "3.12",
        }
        return digest(**{**given, **changes})  # type: ignore[arg-type]

    def test_is_sixteen_hex_digits_and_the_same_for_the_same(self) -> None:
        assert self.of() == self.of()
        assert len(self.of()) == 16
        int(self.of(), 16)

    def test_does_not_depend_on_the_order_of_patches(self) -> None:
        assert self.of(patched=tuple(reversed(self.patched))) == self.of()

    @pytest.mark.parametrize(
        "change",
        [
            {"lock_bytes": b"lock "},
            {"patched": patched[:1]},
            {"patched": (("one", "c" * 64), ("two", "b" * 64))},
            {"toolkit": "12.8"},
            {"python": "3.13"},
            {"release": RELEASES["sglang-0.5.23"]},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_changes_with_everything_that_goes_in(self, change: dict[str, object]) -> None:
        assert self.of(**change) != self.of()
