"""Reads a table of nftables, as nft prints it in JSON, and tells what it does with a packet that the machine sends."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any


def verdict(
    entries: Sequence[Mapping[str, Any]], chain: str, user: int, interface: str, protocol: str, address: str, port: int
) -> str:
    """accept, drop or reject: what a chain does with the first packet of a connection to `address` and `port`.

    entries: of nft's JSON. user: number of its owner. interface: the one it leaves by, "lo" for this machine itself.
    Raises ValueError for an expression that it does not know: then nothing can be said.
    """
    packet = {"skuid": user, "oif": interface, "l4proto": protocol, "address": address, "port": port}
    policies = {entry["chain"]["name"]: entry["chain"].get("policy") for entry in entries if "chain" in entry}
    if chain not in policies:
        raise ValueError(f"no chain {chain}")
    return _walk(entries, chain, packet) or policies[chain] or "accept"


def _walk(entries: Sequence[Mapping[str, Any]], chain: str, packet: Mapping[str, Any]) -> str | None:
    for entry in entries:
        rule = entry.get("rule")
        if not rule or rule["chain"] != chain:
            continue
        for part in rule["expr"]:
            ((kind, content),) = part.items()
            if kind == "match":
                if not _matches(content, packet):
                    break
            elif kind in ("accept", "drop", "reject"):
                return str(kind)
            elif kind in ("jump", "goto"):
                found = _walk(entries, content["target"], packet)
                if found or kind == "goto":
                    return found
            elif kind != "counter":
                raise ValueError(f"unknown statement {kind}")
    return None


def _matches(match: Mapping[str, Any], packet: Mapping[str, Any]) -> bool:
    left, right = match["left"], match["right"]
    if "meta" in left:
        value: Any = packet[left["meta"]["key"]]
    elif left.get("payload", {}).get("field") == "dport":
        if left["payload"]["protocol"] not in (packet["l4proto"], "th"):
            return False
        value = packet["port"]
    elif left.get("payload", {}).get("field") == "daddr":
        value = ipaddress.ip_address(packet["address"])
        if {4: "ip", 6: "ip6"}[value.version] != left["payload"]["protocol"]:
            return False
    else:
        raise ValueError(f"unknown match {left}")
    wanted = right["set"] if isinstance(right, dict) and "set" in right else [right]
    if match["op"] in ("==", "in"):
        return any(_is(value, each) for each in wanted)
    if match["op"] == "!=":
        return not any(_is(value, each) for each in wanted)
    if match["op"] == ">=":
        return bool(value >= right)
    raise ValueError(f"unknown comparison {match['op']}")


def _is(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict) and "prefix" in wanted:
        network = ipaddress.ip_network(f"{wanted['prefix']['addr']}/{wanted['prefix']['len']}")
        return value in network
    if isinstance(wanted, dict) and "range" in wanted:
        low, high = wanted["range"]
        return bool(low <= value <= high)
    if isinstance(value, (ipaddress.IPv4Address, ipaddress.IPv6Address)):
        return value == ipaddress.ip_address(wanted)
    return bool(value == wanted)
