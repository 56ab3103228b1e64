"""The model server as a systemd unit: its key, its environment, its compiled kernels, and the proof that it answers."""
