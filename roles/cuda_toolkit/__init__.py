"""NVIDIA's repository, trusted by fingerprint; the release's CUDA toolkit beside what else is there; all proved."""
