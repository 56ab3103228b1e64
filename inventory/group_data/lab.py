"""Settings of the machines in lab.py: eight described GPUs, a tiny model on the CPU, all else as on a GPU node."""

gpu = "rtx-pro-6000-blackwell-server"
gpu_count = 8
weights_directory = "/srv/weights"
model = "lab-tiny"  # trained by bin/lab build
profile = "cpu"
release = "sglang-0.5.17"
toolkits_beside = ["12.8"]  # newly installed beside the release's 13.0
start_timeout = 900  # two busy cores need a few minutes
edge_name = "kimi.lab"  # clients name it to the machine's address; Caddy's own authority signs for it
