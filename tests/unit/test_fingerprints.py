"""Each symptom leads to its own cause and to no other; healthy logs to none; no secret is ever shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node import fingerprints
from node.fingerprints import ANYTHING, BY_ID, FINGERPRINTS, HIDDEN, Fingerprint, Line, causes, match, redact

PROJECT = Path(__file__).resolve().parents[2]
SAMPLES = Path(__file__).parent / "log_samples"
REAL = PROJECT.parent / "shared/spikes/cuda/errors"

LOGGED = [fingerprint for fingerprint in FINGERPRINTS if fingerprint.patterns]


def ids(text: str) -> list[str]:
    return [found.fingerprint.id for found in match(Line(line) for line in text.splitlines())]


def shows(fingerprint: Fingerprint, text: str) -> bool:
    return any(re.search(pattern, text) for pattern in fingerprint.patterns)


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_fingerprint_is_complete_and_named_once() -> None:
    assert len(FINGERPRINTS) == len(BY_ID)
    for fingerprint in FINGERPRINTS:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", fingerprint.id)
        for text in (fingerprint.cause, fingerprint.fix, fingerprint.source):
            assert text and "\n" not in text and not text.endswith((".", ";", " ")), fingerprint.id
        assert fingerprint.seen, fingerprint.id
        if fingerprint.explained_by != ANYTHING:
            assert set(fingerprint.explained_by) <= BY_ID.keys() - {fingerprint.id}, fingerprint.id


@pytest.mark.parametrize("fingerprint", LOGGED, ids=lambda fingerprint: fingerprint.id)
def test_what_is_shown_on_the_page_is_found_and_nothing_else_is(fingerprint: Fingerprint) -> None:
    logged = [text for text in fingerprint.seen if shows(fingerprint, text)]
    assert logged, f"{fingerprint.id} has patterns and shows no line that they match"
    for text in logged:
        assert ids(text) == [fingerprint.id]


# A line for every pattern that no text of the page shows.
MORE_LINES = (
    ("nvcc-too-old", "RuntimeError: SM 12.1+ requires CUDA >= 12.9"),
    ("nvcc-too-old", "RuntimeError: SM 120 requires CUDA >= 12.8"),
    ("nvcc-too-old", "nvrtc: error: invalid value for --gpu-architecture (-arch)"),
    ("no-gpu-to-compile-for", "RuntimeError: No supported CUDA architectures found for major versions [12]."),
    ("host-compiler-missing", "/bin/sh: 1: c++: not found"),
    ("host-compiler-missing", "FileNotFoundError: [Errno 2] No such file or directory: 'gcc'"),
    ("toolkit-not-linkable", "/usr/bin/ld: cannot find -lcublasLt: No such file or directory"),
    ("nvcc-missing", "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"),
    ("nvcc-missing", "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda-13.0/bin/nvcc'"),
    ("ninja-missing", "/bin/sh: 1: ninja: not found"),
    ("ninja-missing", "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)"),
    ("compiler-out-of-memory", "c++: fatal error: Killed signal terminated program cc1plus"),
    ("apt-key", "W: Failed to fetch x  The following signatures were invalid: EXPKEYSIG A4B469963BF863CC cudatools"),
    ("apt-key", "W: GPG error: https://mirror.example InRelease: Clearsigned file isn't valid"),
    ("apt-version-gone", "E: Unable to locate package cuda-toolkit-13-0"),
    ("apt-version-gone", "E: The repository 'https://m/compute/cuda/repos/x Release' no longer has a Release file."),
    ("gpu-fell-off", "NVRM: GPU 0000:41:00.0: GPU has fallen off the bus."),
    ("gpu-fell-off", "Unable to determine the device handle for GPU0000:41:00.0: Unknown Error"),
    ("driver-not-loaded", "NVML: Driver Not Loaded"),
    (
        "driver-not-loaded",
        "NVRM: nouveau, nvidiafb or rivatv was loaded and obtained ownership of the NVIDIA device(s).",
    ),
    ("driver-missing", "RuntimeError: Failed to open libcuda.so.1"),
    ("driver-missing", "no program nvidia-smi"),
    ("driver-too-old", "CUDA driver version is insufficient for CUDA runtime version"),
    ("gpus-missing", "RuntimeError: No CUDA GPUs are available"),
    (
        "pcie-errors",
        "pcieport 0000:40:01.1: AER: Multiple Uncorrectable (Fatal) error message received from 0000:41:00.0",
    ),
    ("pcie-errors", "pcieport 0000:40:01.1: Surprise Link Down"),
    ("pcie-errors", "pcieport 0000:40:01.1: pciehp: Slot(3): Link Down"),
    ("fabric-not-up", "RuntimeError: CUDA_ERROR_SYSTEM_NOT_READY"),
    ("fabric-not-up", "cudaErrorSystemNotReady"),
    ("shm-full", "misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-UbzKZ9 to 9637892 bytes"),
    ("shm-full", "OSError: /dev/shm/torch_4711: No space left on device"),
    ("gpu-out-of-memory", "RuntimeError: CUDA error: out of memory"),
    ("gpu-out-of-memory", "cudaErrorMemoryAllocation"),
    ("gpu-out-of-memory", "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ("port-taken", "Error: listen EADDRINUSE"),
    ("port-taken", "port 30000 is in use. Waiting for 15 seconds for port to be available."),
    ("port-taken", "ValueError: Port is already in use. dist_init_port=30001"),
    ("weights-not-local", "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach it"),
    ("weights-not-local", "Cannot reach https://huggingface.co/api/models: offline mode is enabled."),
    ("weights-not-local", "OSError: We couldn't connect to 'https://huggingface.co' to load the files"),
    ("weights-damaged", "safetensors_rust.SafetensorError: MetadataIncompleteBuffer"),
    ("algorithm-unknown", "launch_server.py: error: argument --speculative-algorithm: invalid choice: 'DDTREE'"),
    ("host-out-of-memory", "sglang-tp8.service: Failed with result 'oom-kill'."),
    ("disk-full", "write failed: ENOSPC"),
    ("disk-full", "OSError: [Errno 122] Disk quota exceeded"),
    ("disk-fails", "critical medium error, dev nvme1n1, sector 12345"),
    ("disk-fails", "EXT4-fs error (device md0): ext4_lookup:1855: inode #2: comm python"),
    ("disk-fails", "XFS (nvme1n1p1): Metadata corruption detected at xfs_agi_verify"),
    ("hub-refuses", "huggingface_hub.errors.GatedRepoError: Access to model x is restricted"),
    ("hub-refuses", "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url"),
    ("credentials-missing", "sglang-tp8.service: Main process exited, code=exited, status=243/CREDENTIALS"),
    ("mount-missing", "sglang-tp8.service: Main process exited, code=exited, status=226/NAMESPACE"),
    ("program-missing", "sglang-tp8.service: Failed to locate executable /opt/kimi-nodes/current/bin/python"),
    ("program-missing", "sglang-tp8.service: Main process exited, code=exited, status=203/EXEC"),
    ("ssh-refuses", "Received disconnect: Too many authentication failures"),
    ("host-unreachable", "ssh: Could not resolve hostname gpu-9: Name or service not known"),
    ("host-unreachable", "Connection reset by 10.0.0.1 port 22"),
    ("host-unreachable", "kex_exchange_identification: read: Connection reset by peer"),
    ("sudo-asks", "owner is not in the sudoers file."),
    ("sudo-asks", "Sorry, user owner is not allowed to execute '/bin/sh' as root on gpu-1."),
    ("sharing-firewall", "netlink: Error: cache initialization failed: Protocol not supported"),
    ("illegal-access", "CUDA error: device-side assert triggered"),
    ("collective-failed", "ncclSystemError: System call (e.g. socket, malloc) or external library call failed"),
    ("compile-failed", "ninja: build stopped: subcommand failed."),
    ("start-timed-out", "sglang-tp8.service: Failed with result 'timeout'."),
    ("scheduler-died", "SIGQUIT received. signum=3, frame=None. It usually means one child failed."),
    ("start-limit", "sglang-tp8.service: Failed with result 'start-limit-hit'."),
)


@pytest.mark.parametrize(("name", "text"), MORE_LINES)
def test_each_of_these_lines_is_found(name: str, text: str) -> None:
    assert ids(text) == [name]


def test_no_pattern_goes_unproved() -> None:
    lines = [line for fingerprint in FINGERPRINTS for text in fingerprint.seen for line in text.splitlines()]
    lines += [text for _, text in MORE_LINES]
    idle = [
        (fingerprint.id, pattern)
        for fingerprint in FINGERPRINTS
        for pattern in fingerprint.patterns
        if not any(re.search(pattern, line) for line in lines)
    ]
    assert idle == []


# --- whole logs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample", "wanted"),
    [
        ("healthy-tp8.log", []),
        ("healthy-lab.log", []),  # a lab machine's own journal, its start to its first answer
        ("healthy-warmup.log", []),
        ("healthy-kernel.log", []),
        ("nvcc-too-old.log", ["nvcc-too-old"]),
        ("no-gpu.log", ["no-gpu-to-compile-for"]),
        ("header-missing.log", ["toolkit-header-missing"]),
        ("pipeline.log", ["pipeline-layer-zero"]),
        ("other-index-error.log", ["scheduler-died"]),
        ("graph-out-of-memory.log", ["gpu-out-of-memory"]),
        ("held-memory.log", ["gpu-memory-held"]),
        ("compiler-killed.log", ["compiler-out-of-memory"]),
        ("fabric.log", ["fabric-manager-version"]),
        ("gpu-lost.log", ["gpu-fell-off"]),
        ("crash-loop.log", ["scheduler-died"]),
    ],
)
def test_a_log_leads_to_its_cause_alone(sample: str, wanted: list[str]) -> None:
    assert ids((SAMPLES / sample).read_text()) == wanted


def test_every_sample_is_used() -> None:
    source = Path(__file__).read_text()
    assert [path.name for path in SAMPLES.iterdir() if path.name not in source] == []


@pytest.mark.skipif(not REAL.is_dir(), reason="the recorded compiler errors are not part of the project")
@pytest.mark.parametrize(
    ("log", "wanted"),
    [
        ("curand-missing.log", "toolkit-header-missing"),
        ("mixed-wheel-toolkit.log", "toolkit-mixed"),
        ("no-gpu-no-arch-list.log", "no-gpu-to-compile-for"),
        ("no-lib64-cudart.log", "toolkit-not-linkable"),
        ("no-nvcc-cpu-torch.log", "nvcc-missing"),
        ("nvcc12.4-real-arch-12.0f.log", "nvcc-too-old"),
        ("nvcc12.8-arch-12.0.log", "nvcc-too-old"),
        ("nvcc12.8-arch-12.0f.STANDIN-nvcc.log", "nvcc-too-old"),
        ("nvcc12.8-sm120-gpu-detected.log", "nvcc-too-old"),
    ],
)
def test_real_logs_of_failed_compilations(log: str, wanted: str) -> None:
    """Recorded with FlashInfer 0.6.12 and each fault in turn."""
    assert ids((REAL / log).read_text()) == [wanted]


def test_a_cause_is_told_once_with_its_count_and_last_time() -> None:
    (found,) = match(
        [
            Line("a.cuh:1:1: fatal error: curand.h: No such file or directory", 10.0),
            Line("[TP3] b.cuh:1:1: fatal error: cuda_runtime.h: No such file or directory", 20.0),
        ]
    )
    assert (found.times, found.last) == (2, 20.0)
    assert "cuda_runtime.h" in found.text


def test_a_long_line_is_shown_around_what_was_found() -> None:
    (found,) = match([Line("nvcc " + "-I/a " * 500 + "fatal error: curand.h: No such file or directory " + "x " * 300)])
    assert "curand.h" in found.text and len(found.text) <= fingerprints.SEEN_CHARACTERS + 3


def test_what_the_toolkits_programs_say_themselves_is_passed_on() -> None:
    text = "Nov 29 22:12:18 h5 python3[1405]: /srv/weights: found 1 GB free, wanted 600 GB. Fix: free 599 GB there"
    (found,) = match([Line(text)])
    assert (found.fingerprint.id, found.cause, found.fix) == (
        "own-words",
        "/srv/weights: found 1 GB free, wanted 600 GB",
        "free 599 GB there",
    )


def test_what_is_tried_again_by_itself_is_no_finding() -> None:
    assert ids("hub: no answer, wanted x. Fix: none here, it is tried again") == []


def test_a_traceback_of_long_ago_does_not_explain_an_index_error() -> None:
    lines = ["triton_backend.py, line 208", *["a line"] * fingerprints.WINDOW, "IndexError: list index out of range"]
    assert ids("\n".join(lines)) == []
    assert ids("\n".join(lines[:1] + lines[2:])) == ["pipeline-layer-zero"]


def test_what_concerns_the_whole_host_explains_another_logs_consequence() -> None:
    died = BY_ID["scheduler-died"]
    assert causes([died]) == [died]
    assert causes([died], ["gpu-fell-off"]) == []
    assert causes([died], ["port-taken"]) == [died], "another unit's own fault explains nothing here"
    assert causes([died], ["iommu-faults"]) == [died], "a warning explains nothing by itself"
    assert causes([BY_ID["fabric-not-up"]], ["ib-umad-missing"]) == []


# --- secrets ---------------------------------------------------------------------------------------------------------

PLACES = (
    "--api-key {}",
    "--admin-api-key={} --host 127.0.0.1",
    "server_args=ServerArgs(model_path='/srv/x', api_key='{}', port=30000)",
    '{{"api_key": "{}"}}',
    "api-key: {}",
    "Authorization: Bearer {}",
    "HF_TOKEN={}",
    "hub_token='{}'",
    "https://cdn.example/x?X-Amz-Signature={}&part=1",
    "https://owner:{}@mirror.example/simple",
    "password={}",
)


@given(place=st.sampled_from(PLACES), key=st.from_regex(r"\A[A-Za-z0-9_-]{16,64}\Z"))
def test_no_key_is_shown_wherever_it_stands(place: str, key: str) -> None:
    shown = redact(place.format(key))
    assert key not in shown and HIDDEN in shown
    assert redact(shown) == shown


@pytest.mark.parametrize("key", ["hf_abcdefghijklmnopqrst", "sk-abcdefgh12345678", "nvapi-abcdefgh12345678"])
def test_known_kinds_of_keys_are_hidden_where_nothing_names_them(key: str) -> None:
    assert redact(f"said {key} to the hub") == f"said {HIDDEN} to the hub"


@pytest.mark.parametrize(
    "text",
    [
        "Decode batch, #running-req: 1, #token: 37, token usage: 0.01, cpu graph: False",
        "max_total_num_tokens=4096, admin_api_key=None, context_len=2048",
        "wanted the API key. Fix: deploy again, which makes it",
        "sglang-tp8.service: Failed to set up credentials: No such file or directory",
        "https://huggingface.co: answers 401 (GatedRepo) for a/b with no token, wanted to be let in",
        "E: GPG error: NO_PUBKEY A4B469963BF863CC",
    ],
)
def test_what_is_no_secret_stays_readable(text: str) -> None:
    assert redact(text) == text


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_shows_the_table() -> None:
    page = (PROJECT / "docs/troubleshooting.md").read_text()
    for heading, table in fingerprints.sections().items():
        assert f"## {heading}\n\n{table}\n" in page, (
            f"{heading}: the page and node/fingerprints.py disagree. Fix: python -m node.fingerprints, and put its "
            "tables into docs/troubleshooting.md"
        )
    assert {fingerprint.section for fingerprint in FINGERPRINTS} == fingerprints.sections().keys()
