"""Runs in a release's environment for test_engine_toolkits: FlashInfer, as the engine meets it on a node with GPUs.

argv: what to do. "kernel": build one sampling kernel by FlashInfer's own just-in-time compiler; "module": lay out the
whole sampling module, without compiling. SEEN_GPUS names the compute capability that torch reports ("12.0"), since the
lab has no GPU; without it torch is left as it is and sees none. ENGINE_ARCHITECTURES is put into
FLASHINFER_CUDA_ARCH_LIST once FlashInfer is imported: SGLang does so when it loads a model (set_cuda_arch).
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch

seen = os.environ.get("SEEN_GPUS")
if seen:
    major, minor = map(int, seen.split("."))
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.get_device_capability = lambda device=None: (major, minor)

import flashinfer  # noqa: E402, F401  its first look at the GPUs happens here, before the engine names any
from flashinfer.jit.core import gen_jit_spec  # noqa: E402
from flashinfer.jit.sampling import gen_sampling_module  # noqa: E402

if "ENGINE_ARCHITECTURES" in os.environ:
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = os.environ["ENGINE_ARCHITECTURES"]

KERNEL = """
#include <flashinfer/sampling.cuh>
cudaError_t probe(float* probabilities, int* output, unsigned batch, unsigned vocabulary, uint64_t* seed) {
  return flashinfer::sampling::SamplingFromProb<float, int>(
      probabilities, output, nullptr, nullptr, batch, vocabulary, true, nullptr, 0, nullptr, 0, 0);
}
"""

if sys.argv[1] == "kernel":
    source = Path(tempfile.mkdtemp()) / "probe.cu"
    source.write_text(KERNEL)
    spec = gen_jit_spec("probe", [source])
    spec.build(verbose=False)
    print("built", spec.get_library_path())
else:
    spec = gen_sampling_module()
    spec.write_ninja()
    print("laid out", spec.ninja_path)
    print(spec.ninja_path.read_text())
