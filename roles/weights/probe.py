"""Runs on the host: files, units and snapshots of the weights role. Reads only, and no content of weights."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from kit import on_host


def probe(
    paths: list[str],
    weights: list[dict[str, str]],
    receipts: str,
    units_folder: str,
    prefix: str,
    sharer: str,
    table: str,
) -> dict[str, Any]:
    """{"files": ..., "units": {unit: state}, "snapshots": {unit: receipt.check}, "others": [units], "table": rules}.

    weights: for each its "unit", "snapshot" and "manifest_sha256". receipts: the agent's module that checks them; where
    it is not there yet, no snapshot is proved. others: unit files of this role for weights that are not among them.
    sharer: a unit to look at too. table: an nftables table; its rules as nft lists them, None where it is not loaded.
    """
    check = checker(receipts)
    wanted = [entry["unit"] for entry in weights]
    try:
        names = os.listdir(units_folder)
    except FileNotFoundError:
        names = []
    others = sorted(
        name for name in names if name.startswith(prefix) and name.endswith(".service") and name not in wanted
    )
    listed = on_host.run(["/usr/sbin/nft", "list", "table", *table.split()])
    return {
        "table": listed["out"] if listed["code"] == 0 else None,
        "files": on_host.files(paths),
        "units": on_host.units([*wanted, *others, sharer]),
        "snapshots": {entry["unit"]: check(entry["snapshot"], entry["manifest_sha256"]) for entry in weights},
        "others": others,
    }


def checker(path: str) -> Callable[[str, str], dict[str, Any]]:
    """`check` of the agent's receipt module at this path."""
    if not os.path.exists(path):
        return lambda snapshot, manifest_sha256: {"state": "unproved", "damaged": {}, "strangers": []}
    specification = importlib.util.spec_from_file_location("receipt", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    found: Callable[[str, str], dict[str, Any]] = module.check
    return found
