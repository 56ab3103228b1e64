"""Nodes of eight B300 over NVLink. Their settings are in group_data/b300.py beside this file."""

hosts = [
    ("hgx-1.example.net", {}),
]
