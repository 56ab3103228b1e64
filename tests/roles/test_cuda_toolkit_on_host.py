"""The programs that cuda_toolkit runs on a host, on small trees, with the real apt-get, update-alternatives and g++."""

from __future__ import annotations

import email.utils
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.on_host import Problem
from roles.cuda_toolkit import apt_on_host, judgement, probe, proof_on_host

PROJECT = Path(__file__).resolve().parents[2]
PROOF = PROJECT / "files" / "tools" / "toolkit_proof.py"
ADDRESS = "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64"


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


# --- probe: sources --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "signed_by", "trusted"),
    [
        ("a.list", f"deb [signed-by=/k.gpg] {ADDRESS}/ /", ["/k.gpg"], False),
        ("a.list", f"  deb [ arch=amd64 Signed-By=/k.gpg,/l.gpg ] {ADDRESS} / # ours", ["/k.gpg", "/l.gpg"], False),
        ("a.list", f"deb {ADDRESS}/ /", [], False),
        ("a.list", f"deb [trusted=yes] {ADDRESS}/ /", [], True),
        ("a.sources", f"Types: deb\nURIs: {ADDRESS}/\nSuites: /\nSigned-By: /k.gpg\n", ["/k.gpg"], False),
        ("a.sources", f"# c\nX: y\n\nTypes: deb deb-src\nURIs:\n http://other\n {ADDRESS}\nSuites: /\n", [], False),
        ("a.sources", f"types: deb\nuris: {ADDRESS}\nsuites: /\nTrusted: yes\n", [], True),
        (
            "a.sources",
            f"Types: deb\nURIs: {ADDRESS}\nSuites: /\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n AAAA\n",
            ["the key inside it"],
            False,
        ),
    ],
)
def test_every_form_of_a_source_for_the_repository_is_seen(
    tmp_path: Path, name: str, text: str, signed_by: list[str], trusted: bool
) -> None:
    (tmp_path / "sources.list.d").mkdir()
    file = tmp_path / "sources.list.d" / name
    file.write_text(text)
    (found,) = probe.sources(ADDRESS, str(tmp_path))
    assert (found["file"], found["signed_by"], found["trusted"]) == (str(file), signed_by, trusted)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.list", f"# deb {ADDRESS}/ /\ndeb-src {ADDRESS}/ /\ndeb {ADDRESS}-other/ /"),
        ("a.sources", f"Enabled: no\nTypes: deb\nURIs: {ADDRESS}\nSuites: /\n"),
        ("a.sources.save", f"Types: deb\nURIs: {ADDRESS}\nSuites: /\n"),
    ],
)
def test_what_apt_does_not_use_is_no_source(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / name).write_text(text)
    assert probe.sources(ADDRESS, str(tmp_path)) == []


def test_the_keys_of_a_source_are_those_of_its_keyring(tmp_path: Path) -> None:
    (tmp_path / "k.gpg").write_bytes(b"no key")
    (tmp_path / "sources.list").write_text("")
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "a.list").write_text(f"deb [signed-by={tmp_path}/k.gpg] {ADDRESS} /")
    (source,) = probe.sources(ADDRESS, str(tmp_path))
    (told,) = judgement.keys_of(source)
    assert "no public key block" in told


# --- probe: a toolkit's files ----------------------------------------------------------------------------------------


class Tree:
    """/usr/local with toolkits in it, and dpkg's lists of their files."""

    def __init__(self, folder: Path) -> None:
        self.local, self.info = folder / "local", folder / "info"
        self.info.mkdir(parents=True)
        for version in ("13.0", "12.8"):
            self.toolkit(version)

    def toolkit(self, version: str) -> None:
        tree = self.local / f"cuda-{version}"
        for path in ("targets/t/include/curand.h", "targets/t/lib/libcudart.so.1", "bin/nvcc"):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(f"{path} of {version}\n")
        (tree / "bin/nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.88'\n")
        (tree / "bin/nvcc").chmod(0o755)
        (tree / "targets/t/lib/libcudart.so").symlink_to("libcudart.so.1")
        (tree / "include").symlink_to("targets/t/include")
        (tree / "lib64").symlink_to("targets/t/lib")
        suffix = version.replace(".", "-")
        self.package(f"libcurand-dev-{suffix}", tree, ["targets/t/include/curand.h"])
        libraries = ["targets/t/lib/libcudart.so.1", "targets/t/lib/libcudart.so", "include", "lib64"]
        self.package(f"cuda-cudart-{suffix}", tree, libraries)
        self.package(f"cuda-nvcc-{suffix}", tree, ["bin/nvcc"])

    def package(self, name: str, tree: Path, paths: list[str]) -> None:
        lines = ["/.", str(tree.parent), str(tree), *(f"{tree}/{path}" for path in paths)]
        (self.info / f"{name}.list").write_text("\n".join(lines) + "\n")
        sums = [
            f"{hashlib.md5((tree / path).read_bytes()).hexdigest()}  {str(tree / path)[1:]}"
            for path in paths
            if (tree / path).is_file() and not (tree / path).is_symlink()
        ]
        (self.info / f"{name}.md5sums").write_text("\n".join(sums) + "\n")

    def look(self, version: str = "13.0", seals: dict[str, Any] | None = None) -> dict[str, Any]:
        kit = {
            "version": version,
            "prefix": f"{self.local}/cuda-{version}",
            "suffix": version.replace(".", "-"),
            "headers": ["curand.h"],
            "libraries": ["libcudart.so"],
        }
        installed = {path.stem: {"version": "1-1", "installed": True} for path in self.info.glob("*.list")}
        elsewhere = {link["target"] for link in self.links()}
        return probe.toolkit_state(kit, installed, seals or {}, elsewhere, str(self.info))

    def links(self, *versions: str) -> list[dict[str, str]]:
        prefixes = [f"{self.local}/cuda-{version}" for version in versions or ("13.0",)]
        return probe.links_across(prefixes, str(self.local))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_whole_toolkit_has_nothing_to_tell(tree: Tree) -> None:
    found = tree.look()
    assert found["nvcc"] == "13.0"
    for nothing in ("headers", "libraries", "missing", "changed", "unowned"):
        assert not found[nothing], nothing
    assert set(found["packages"]) == {"libcurand-dev-13-0", "cuda-cudart-13-0", "cuda-nvcc-13-0"}
    assert not found["device_compiler"]
    assert tree.links("13.0", "12.8") == []


def test_a_missing_header_is_told_with_its_package(tree: Tree) -> None:
    header = tree.local / "cuda-13.0/targets/t/include/curand.h"
    header.unlink()
    found = tree.look()
    assert found["headers"] == [f"{tree.local}/cuda-13.0/include/curand.h"]
    assert found["missing"] == {"libcurand-dev-13-0": [str(header)]}


def test_a_changed_header_is_told_with_its_package(tree: Tree) -> None:
    (tree.local / "cuda-13.0/targets/t/include/curand.h").write_text("other\n")
    assert tree.look()["changed"] == {"libcurand-dev-13-0": [f"{tree.local}/cuda-13.0/include/curand.h"]}


def test_a_file_is_read_again_only_when_its_seal_is_broken(tree: Tree) -> None:
    nvcc = f"{tree.local}/cuda-13.0/bin/nvcc"
    seals = tree.look()["seals"]
    seals[nvcc][2] = "of the seal"
    assert tree.look(seals=seals)["files"][nvcc] == "of the seal"
    os.chmod(nvcc, 0o700)  # moves ctime, as a write would
    assert tree.look(seals=seals)["files"][nvcc] != "of the seal"


def test_files_of_no_package_are_told(tree: Tree) -> None:
    (tree.info / "libcurand-dev-13-0.list").unlink()
    assert tree.look()["unowned"] == [f"{tree.local}/cuda-13.0/include/curand.h"]


def test_links_across_toolkits_are_found_in_both_directions(tree: Tree) -> None:
    ours, theirs = tree.local / "cuda-13.0", tree.local / "cuda-12.8"
    header = ours / "targets/t/include/curand.h"
    header.unlink()
    header.symlink_to("../../../../cuda-12.8/include/curand.h")
    (theirs / "nvvm").symlink_to(ours / "bin")
    assert sorted(tree.links(), key=lambda link: link["path"]) == [
        {"path": str(theirs / "nvvm"), "target": str(ours / "bin")},
        {"path": str(header), "target": str(theirs / "targets/t/include/curand.h")},
    ]
    assert tree.look()["unowned"] == [], "told of as a link, not as a stray file"


def test_a_prefix_that_is_another_toolkit_is_found(tree: Tree) -> None:
    shutil.rmtree(tree.local / "cuda-13.0")
    (tree.local / "cuda-13.0").symlink_to("cuda-12.8")
    assert tree.links() == [{"path": f"{tree.local}/cuda-13.0", "target": f"{tree.local}/cuda-12.8"}]


def test_a_link_to_a_toolkit_that_is_gone_is_found(tree: Tree) -> None:
    (tree.local / "cuda-13.0/include/x.h").symlink_to(tree.local / "cuda-12.4/include/x.h")
    assert [link["target"] for link in tree.links()] == [f"{tree.local}/cuda-12.4/include/x.h"]


def test_a_toolkit_on_another_disk_is_no_link_across(tree: Tree) -> None:
    elsewhere = tree.local.parent / "disk"
    elsewhere.mkdir()
    shutil.move(str(tree.local / "cuda-13.0"), str(elsewhere / "cuda"))
    (tree.local / "cuda-13.0").symlink_to(elsewhere / "cuda")
    assert tree.links() == []
    found = tree.look()
    assert found["unowned"] == [] and found["changed"] == {} and found["nvcc"] == "13.0"
    (tree.local / "cuda-12.8/x.h").symlink_to(tree.local / "cuda-13.0/include/curand.h")
    assert [link["path"] for link in tree.links()] == [f"{tree.local}/cuda-12.8/x.h"]


def test_links_among_other_peoples_toolkits_are_theirs(tree: Tree) -> None:
    tree.toolkit("12.4")
    (tree.local / "cuda-12.4/x.h").symlink_to(tree.local / "cuda-12.8/include/curand.h")
    assert tree.links("13.0") == []
    assert len(tree.links("13.0", "12.8")) == 1


# --- apt -------------------------------------------------------------------------------------------------------------


class Signers:
    """Two keys, "ours" and "other", in a home of gpg's own."""

    def __init__(self, keys: Path) -> None:
        self.keys = keys
        self.home = Path("/tmp") / f"kimi-gpg-{os.getpid()}-signers"  # gpg's sockets want a short path
        self.home.mkdir(mode=0o700)
        self.environment = {**os.environ, "GNUPGHOME": str(self.home)}
        for name in ("ours", "other"):
            self.gpg("--quick-generate-key", name, "rsa2048", "sign", "never")
            self.gpg("--output", str(keys / f"{name}.gpg"), "--export", name)

    def gpg(self, *arguments: str) -> None:
        command = ["gpg", "--batch", "--quiet", "--yes", "--pinentry-mode", "loopback", "--passphrase", "", *arguments]
        subprocess.run(command, env=self.environment, check=True, capture_output=True)

    def close(self) -> None:
        subprocess.run(["gpgconf", "--kill", "all"], env=self.environment, check=False)
        shutil.rmtree(self.home, ignore_errors=True)


@pytest.fixture(scope="module")
def signers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signers]:
    made = Signers(tmp_path_factory.mktemp("keys"))
    yield made
    made.close()


class Repository:
    """A flat repository in a folder, and an apt that knows no other."""

    def __init__(self, folder: Path, signers: Signers, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.signers = folder / "repository", signers
        for made in (self.folder, folder / "lists/partial", folder / "cache/partial"):
            made.mkdir(parents=True)
        self.source = folder / "test.sources"
        self.source.write_text(
            f"Types: deb\nURIs: file:{self.folder}/\nSuites: /\nSigned-By: {signers.keys}/ours.gpg\n"
        )
        configuration = folder / "apt.conf"
        configuration.write_text(
            f'Dir::State::lists "{folder}/lists";\nDir::Cache "{folder}/cache";\nDir::Etc::parts "-";\n'
            f'APT::Sandbox::User "{"root" if os.geteuid() == 0 else ""}";\nDebug::NoLocking "true";\n'
        )
        monkeypatch.setenv("APT_CONFIG", str(configuration))

    def publish(self, signer: str | None, age: int) -> None:
        """Write the lists anew, dated `age` seconds ago; signer None leaves them unsigned."""
        index = b"Package: nothing\nVersion: 1\nArchitecture: all\nFilename: ./nothing.deb\nSize: 1\nSHA256: 00\n"
        for name, content in (("Packages", index), ("Packages.gz", gzip.compress(index, mtime=0))):
            (self.folder / name).write_bytes(content)
        sums = ""
        for name in ("Packages", "Packages.gz"):
            content = (self.folder / name).read_bytes()
            sums += f" {hashlib.sha256(content).hexdigest()} {len(content)} {name}\n"
        date = email.utils.formatdate(time.time() - age, usegmt=True)
        release = self.folder / "Release"
        release.write_text(f"Origin: NVIDIA\nLabel: NVIDIA CUDA\nDate: {date}\nSHA256:\n{sums}")
        for name in ("InRelease", "Release.gpg"):
            (self.folder / name).unlink(missing_ok=True)
        if signer:
            self.signers.gpg(
                "--local-user", signer, "--clearsign", "--output", str(self.folder / "InRelease"), str(release)
            )


@pytest.fixture
def repository(tmp_path: Path, signers: Signers, monkeypatch: pytest.MonkeyPatch) -> Repository:
    return Repository(tmp_path, signers, monkeypatch)


@needs("apt-get", "gpg")
def test_lists_signed_by_another_key_are_an_error_also_where_apt_goes_on_with_the_old_ones(
    repository: Repository, tmp_path: Path
) -> None:
    written = tmp_path / "written"
    written.write_text("by this run")
    repository.publish("ours", 3600)
    apt_on_host._update(ADDRESS, str(repository.source), [str(written)])
    assert written.exists()

    repository.publish("other", 1800)
    plain = ["apt-get", "update", "-o", f"Dir::Etc::sourcelist={repository.source}", "-o", "Dir::Etc::sourceparts=-"]
    assert subprocess.run(plain, capture_output=True, check=False).returncode == 0, "what this test is about"
    with pytest.raises(Problem, match=r"NO_PUBKEY|[Ss]ignature") as told:
        apt_on_host._update(ADDRESS, str(repository.source), [str(written)])
    assert f"rm {repository.signers.keys}/ours.gpg" in str(told.value)
    assert not written.exists(), "what this run wrote to trust it is taken back"


@needs("apt-get", "gpg")
@pytest.mark.parametrize("signer", ["other", None])
def test_lists_that_were_never_trusted_are_an_error(repository: Repository, signer: str | None) -> None:
    repository.publish(signer, 60)
    with pytest.raises(Problem, match="wanted lists signed by the pinned key"):
        apt_on_host._update(ADDRESS, str(repository.source), [])


EXPIRED = "W: GPG error: https://x  InRelease: The following signatures were invalid: EXPKEYSIG A4B469963BF863CC x"
SQV = "W: OpenPGP signature verification failed: https://x  InRelease: Sub-process /usr/bin/sqv returned an error (1)"
WEAK = "W: https://x/InRelease: Policy will reject signature within a year, see --audit for details"
LEGACY = "W: https://x/InRelease: Key is stored in legacy trusted.gpg keyring (/etc/apt/trusted.gpg)"


@pytest.mark.parametrize(
    ("code", "said", "refused"),
    [(0, EXPIRED, True), (0, SQV, True), (0, WEAK, False), (0, LEGACY, False), (100, WEAK, True), (0, "", False)],
)
def test_what_apt_says_of_signatures_is_weighed(
    monkeypatch: pytest.MonkeyPatch, code: int, said: str, refused: bool
) -> None:
    """apt's words for a bad signature stop the host whatever its exit code; those for a distant day do not."""
    monkeypatch.setattr(apt_on_host, "_patiently", lambda argv: (code, f"Hit:1 https://x InRelease\n{said}\n"))
    try:
        apt_on_host._update(ADDRESS, "/no/source", [])
    except Problem as told:
        assert refused and said in str(told)
    else:
        assert not refused


@needs("apt-get", "gpg")
def test_a_repository_that_cannot_be_reached_is_told_as_that(repository: Repository) -> None:
    shutil.rmtree(repository.folder)
    with pytest.raises(Problem, match=r"wanted its package lists. Fix: ") as told:
        apt_on_host._update(ADDRESS, str(repository.source), [])
    assert "signed by the pinned key" not in str(told.value)


def test_the_disk_is_compared_with_what_apt_says(tmp_path: Path) -> None:
    said = (
        "Need to get 3,659 MB/3,700 MB of archives.\n"
        "After this operation, 8,539 MB of additional disk space will be used.\n"
    )

    def require(text: str, free: float) -> None:
        apt_on_host.require_disk(text, str(tmp_path), str(tmp_path), lambda folder: int(free * 10**9))

    require(said, 12.8)
    with pytest.raises(Problem, match=r"found 12.6 GB free, wanted 12.7 GB for the toolkits. Fix: "):
        require(said, 12.6)
    require("After this operation, 0 B of additional disk space will be used.\n", 0)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("E: Version '13.0.9-1' for 'cuda-toolkit-13-0' was not found", "apt-cache madison"),
        ("E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 1", "fuser"),
        ("E: Packages were downgraded and -y was used without --allow-downgrades.", "a newer one is installed"),
        ("E: Conflicting values set for option Signed-By regarding source x", "keep one of the sources"),
        ("E: Packages need to be removed but remove is disabled.", "remove packages of yours"),
        ("something else", "read what it says"),
    ],
)
def test_apts_words_lead_to_a_remedy(said: str, remedy: str) -> None:
    assert remedy in apt_on_host.fix(said, "x")


# --- alternatives ----------------------------------------------------------------------------------------------------


class Alternatives:
    """A folder of toolkits and links, with the real update-alternatives keeping its books beside it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.local = folder / "local"
        for name in ("local/cuda-12.8", "local/cuda-13.0", "bin", "books", "links"):
            (folder / name).mkdir(parents=True)
        real = shutil.which("update-alternatives")
        program = folder / "bin" / "update-alternatives"
        options = f"--altdir {folder}/links --admindir {folder}/books --log {folder}/log"
        program.write_text(f'#!/bin/sh\nexec {real} {options} "$@"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
        self.program = str(program)

    def __call__(self, *arguments: str) -> None:
        subprocess.run([self.program, *arguments], check=True, capture_output=True)

    def package(self, version: str) -> None:
        """What NVIDIA's cuda-toolkit-X-Y-config-common does when it is installed."""
        self("--install", f"{self.local}/cuda", "cuda", f"{self.local}/cuda-{version}", version.replace(".", ""))

    def install(self, version: str) -> None:
        """What `act` does around an installation."""
        held = apt_on_host.hold("cuda", str(self.local))
        self.package(version)
        if held:
            apt_on_host.give_back(held)

    @property
    def target(self) -> str:
        return Path(os.path.realpath(self.local / "cuda")).name

    @property
    def mode(self) -> str:
        found = apt_on_host.query("cuda")
        assert found
        return str(found["mode"])


@pytest.fixture
def alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Alternatives:
    return Alternatives(tmp_path, monkeypatch)


@needs("update-alternatives")
def test_a_link_in_automatic_mode_stays_and_is_held(alternatives: Alternatives) -> None:
    alternatives.package("12.8")
    alternatives.install("13.0")
    assert (alternatives.target, alternatives.mode) == ("cuda-12.8", "manual")


@needs("update-alternatives")
def test_the_links_own_choice_is_given_back_where_it_does_not_move_it(alternatives: Alternatives) -> None:
    (alternatives.local / "cuda-13.3").mkdir()
    alternatives.package("13.3")
    alternatives.install("13.0")
    assert (alternatives.target, alternatives.mode) == ("cuda-13.3", "auto")


@needs("update-alternatives")
def test_the_owners_manual_choice_stays(alternatives: Alternatives) -> None:
    alternatives.package("12.8")
    alternatives("--set", "cuda", f"{alternatives.local}/cuda-12.8")
    alternatives.install("13.0")
    assert (alternatives.target, alternatives.mode) == ("cuda-12.8", "manual")


@needs("update-alternatives")
@pytest.mark.parametrize("managed", [False, True])
def test_a_plain_link_stays_where_it_leads(alternatives: Alternatives, managed: bool) -> None:
    """update-alternatives replaces a plain link without a word."""
    if managed:
        alternatives.package("13.0")
        (alternatives.local / "cuda").unlink()
    (alternatives.local / "cuda").symlink_to("cuda-12.8")
    alternatives.install("13.0")
    assert (alternatives.target, alternatives.mode) == ("cuda-12.8", "manual")


@needs("update-alternatives")
def test_where_there_was_no_link_the_package_makes_it(alternatives: Alternatives) -> None:
    alternatives.install("13.0")
    assert (alternatives.target, alternatives.mode) == ("cuda-13.0", "auto")
    assert apt_on_host.hold("other", str(alternatives.local)) is None


# --- the proof -------------------------------------------------------------------------------------------------------

HEADER = """
#define CUDART_VERSION {version}
enum cudaError {{ cudaSuccess }};
extern "C" cudaError cudaRuntimeGetVersion(int *version);
"""
Toolkit = Callable[..., dict[str, Any]]


@pytest.fixture
def toolkit(tmp_path: Path) -> Toolkit:
    """A toolkit without a device compiler: its headers and libraries are a few lines, g++ and the linker are real."""

    def make(nvcc: str = "12.8", header: int = 12080, runtime: int = 12080) -> dict[str, Any]:
        prefix = tmp_path / "cuda"
        for folder in ("bin", "include", "lib64/stubs", "scratch"):
            (prefix / folder).mkdir(parents=True)
        (prefix / "bin/nvcc").write_text(
            '#!/bin/sh\n[ "$1" = --version ] || { echo "sh: 1: cicc: not found"; exit 127; }\n'
            f"echo 'Cuda compilation tools, release {nvcc}, V{nvcc}.93'\n"
        )
        (prefix / "bin/nvcc").chmod(0o755)
        (prefix / "include/cuda_runtime.h").write_text(HEADER.format(version=header))
        library = f'extern "C" int cudaRuntimeGetVersion(int *version) {{ *version = {runtime}; return 0; }}\n'
        for path, source in (("libcudart.so", library), ("stubs/libcuda.so", "")):
            command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(prefix / "lib64" / path)]
            subprocess.run(command, input=source, text=True, check=True)
        return {
            "version": "12.8",
            "prefix": str(prefix),
            "includes": ["cuda_runtime.h"],
            "architecture": None,
            "needs_nvcc": False,
            "scratch": str(prefix / "scratch"),
        }

    return make


def prove(asked: dict[str, Any]) -> dict[str, Any]:
    answer = proof_on_host.probe(str(PROOF), [asked])[asked["version"]]
    assert not os.listdir(asked["scratch"]), "nothing is left behind"
    return answer


@needs("g++")
def test_a_program_is_compiled_linked_and_run(toolkit: Toolkit) -> None:
    answer = prove(toolkit())
    assert answer == {
        "proved": True,
        "version": "12.8",
        "nvcc": "12.8.93",
        "compiled_by": "g++",
        "architecture": None,
        "runtime": 12080,
        "headers": 12080,
    }


@needs("g++")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nvcc": "12.4"}, "found release 12.4.93, wanted 12.8"),
        ({"header": 12040}, "found runtime 12080 and headers 12040, wanted 12080 of both"),
        ({"runtime": 13000}, "found runtime 13000 and headers 12080, wanted 12080 of both"),
    ],
)
def test_a_mixture_of_toolkits_is_no_proof(toolkit: Toolkit, changes: dict[str, Any], said: str) -> None:
    answer = prove(toolkit(**changes))
    assert not answer["proved"] and said in answer["problem"] and "Fix: " in answer["problem"]


@needs("g++")
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("include/cuda_runtime.h", "found no {prefix}/include/cuda_runtime.h"),
        ("lib64/libcudart.so", "cannot find -lcudart"),
        ("lib64/stubs/libcuda.so", "cannot find -lcuda"),
        ("bin/nvcc", "{prefix}/bin/nvcc: found {prefix}/bin/nvcc: No such file or directory"),
    ],
)
def test_what_is_missing_is_named(toolkit: Toolkit, path: str, said: str) -> None:
    asked = toolkit()
    (Path(asked["prefix"]) / path).unlink()
    answer = prove(asked)
    assert not answer["proved"] and said.format(**asked) in answer["problem"] and "Fix: " in answer["problem"]


@needs("g++")
def test_the_hosts_compiler_does_not_stand_in_where_nvcc_is_needed(toolkit: Toolkit) -> None:
    answer = prove({**toolkit(), "needs_nvcc": True})
    assert not answer["proved"]
    assert "bin/nvcc with " in answer["problem"] and "cicc: not found" in answer["problem"]


@needs("g++")
def test_variables_of_the_caller_do_not_help(toolkit: Toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPATH of an interactive shell makes a missing header compile there, and nowhere else."""
    asked = toolkit()
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "curand.h").write_text("")
    monkeypatch.setenv("CPATH", str(tmp_path / "extra"))
    asked["includes"].append("curand.h")
    assert "found no " in prove(asked)["problem"]
    header = Path(asked["prefix"]) / "include" / "curand.h"
    header.write_text("#include <only_there.h>\n")
    (tmp_path / "extra" / "only_there.h").write_text("")
    assert "only_there.h" in prove(asked)["problem"]


def test_the_proof_says_how_it_wants_to_be_called() -> None:
    for arguments in ([], ["{}"], ["no json"]):
        done = subprocess.run([sys.executable, str(PROOF), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "Fix: " in done.stderr, arguments


def test_a_missing_program_is_no_proof(tmp_path: Path) -> None:
    answer = proof_on_host.probe(str(tmp_path / "none.py"), [{"version": "13.0"}])["13.0"]
    assert not answer["proved"] and json.dumps(answer) and "Fix: " in answer["problem"]
