"""Settings of the nodes in b300.py."""

gpu = "b300"
gpu_count = 8
weights_directory = "/srv/weights"  # a local disk with room for 602 GB: the weights and a drafter
profile = "tp8"  # tp8 pp8 ep8 ep4 ep8-dflash, each also with -eager; or for one run: --data profile=ep8
release = "sglang-0.5.17"
kv_cache_dtype = "auto"  # fp8_e4m3 doubles the tokens that fit
toolkits_beside = []  # e.g. ["12.8"], for other users of the machine
