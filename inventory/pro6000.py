"""Nodes of eight RTX PRO 6000 Blackwell over PCIe. Their settings are in group_data/pro6000.py beside this file."""

hosts = [
    ("gpu-1.example.net", {}),
]
