"""Clusters in one line of text: `8xH100-80GB:4` is 4 nodes of 8; or in a TOML file; or this machine."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.spec.cluster import Cluster, Link, NodeGroup
from meshwright.spec.devices import KnownDevice, find_device
from meshwright.spec.files import from_table, load_toml, require_format, to_table
from meshwright.spec.machine import this_machine

__all__ = ["cluster_from_table", "parse_cluster"]

_FORM = "DEVICES_PER_NODExDEVICE[:NODES][@NETWORK], such as 8xH100-80GB:4, 8xA100-80GB:16@4x100Gb or H100-80GB"
_HERE = frozenset({"this", "this machine", "this-machine"})
_COUNTED = re.compile(r"([0-9]+)\s*[x*\u00d7]\s*(.*)", re.DOTALL | re.IGNORECASE)
_RATE = re.compile(r"(?:([0-9]{1,4})\s*[x*\u00d7]\s*)?([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([MGT])(b|B)(?:/s|ps|it|it/s)?")
_SCALE = {"M": 1e6, "G": 1e9, "T": 1e12}
_MOST = 10_000_000
_OTHER_FILES = frozenset({".yaml", ".yml", ".json", ".ini", ".cfg", ".txt"})


def parse_cluster(text: str | Path) -> Cluster:
    """A cluster from its text form.

    `8xH100-80GB:4` is 4 nodes of 8 devices, `8xH100` one node, `H100-80GB` one device; device names are forgiving.
    `@100Gb` sets the network of each node to 100 Gb/s (`@8x100Gb` to 8 such ports, `@12.5GB` to bytes), which its
    devices share; without it the catalogue's typical network is taken. `this` is this machine. A path that ends in
    `.toml` is a file with `format` and the keys of Cluster at the top or under `[cluster]`, as in job and plan files.

    Raises:
        ConfigError: the text or the file cannot be read as a cluster.
    """
    asked = str(text).strip()
    if asked.lower() in _HERE:
        return this_machine()
    if asked.lower().endswith(".toml"):
        return _from_file(asked)
    asked, at, network = asked.partition("@")
    described, colon, nodes = asked.partition(":")
    counted = _COUNTED.fullmatch(described.strip())
    device = counted[2] if counted else described
    if not device.strip():
        raise ConfigError(f"cluster {str(text)!r} names no device", why=f"the form is {_FORM}", fix="name a device")
    if at and not network.strip():
        raise _no_rate(network)
    try:
        known = find_device(device)
    except ConfigError as error:
        raise _perhaps_a_file(str(text), error) from error
    if colon and not counted:
        wanted = nodes.strip() or "N"
        raise ConfigError(
            f"cluster {str(text)!r} does not say how many devices a node has",
            why=f"the form is {_FORM}",
            fix=f"write {min(known.node.devices, known.most)}x{known.name}:{wanted} for {wanted} nodes, or "
            f"{wanted}x{known.name} for one node",
        )
    modules = _number(counted[1], "devices per node", text) if counted else 1
    count = _number(nodes, "nodes", text) if colon else 1
    if network and count == 1:
        raise ConfigError(
            f"cluster {str(text)!r} sets a network between nodes",
            why="it has one node",
            fix=f"leave out @{network.strip()}, or give the number of nodes after a colon",
        )
    return _cluster(known, modules, count, network.strip())


def cluster_from_table(table: Any, where: str = "cluster") -> Cluster:
    """A cluster from a TOML table, in which `device` of a node may be a name of the catalogue.

    What such a node leaves out (host memory, links, disk) is the catalogue's; so is `between`, by the slowest network.

    Raises:
        ConfigError: a key, type or value is wrong, or a device is unknown.
    """
    if not isinstance(table, dict) or not isinstance(table.get("nodes"), list):
        return from_table(Cluster, table, where)
    named: list[KnownDevice] = []
    nodes = [_fill_node(entry, named) for entry in table["nodes"]]
    cluster = from_table(Cluster, {"name": where, **table, "nodes": nodes}, where)
    if named and not cluster.source:
        cluster = replace(cluster, source=_sources(named))
    if len(named) == len(nodes) and cluster.between is None and sum(group.count for group in cluster.nodes) > 1:
        slowest = min((entry.network for entry in named), key=lambda link: link.bytes_per_s)
        cluster = replace(cluster, between=slowest)
    return cluster


def _cluster(known: KnownDevice, modules: int, count: int, network: str) -> Cluster:
    group = known.nodes(modules, count)
    name = known.name if group.devices == count == 1 else f"{modules}x{known.name}"
    return Cluster(
        name=name + (f":{count}" if count > 1 else "") + (f"@{network}" if network else ""),
        nodes=(group,),
        between=_between(known, group, network) if count > 1 else None,
        source=_sources([known]) + (f"; network as asked: {network} for each node" if network else ""),
    )


def _between(known: KnownDevice, group: NodeGroup, network: str) -> Link:
    if network:
        return Link(latency_s=known.network.latency_s, bytes_per_s=_bytes_per_s(network) / group.devices)
    if known.rack and group.inside is not None and group.count * group.devices <= known.node.devices:
        return group.inside  # trays of one rack: its links join all of them
    return known.network


def _bytes_per_s(network: str) -> float:
    match = _RATE.fullmatch(network)
    if match is None or float(match[2]) == 0 or match[1] in ("0", "00", "000", "0000"):
        raise _no_rate(network)
    rate = float(match[2]) * _SCALE[match[3]] * int(match[1] or 1)
    return rate / 8 if match[4] == "b" else rate


def _no_rate(network: str) -> ConfigError:
    return ConfigError(
        f"network {network.strip()!r} is not a rate",
        why="it is what one node sends and what it receives per second",
        fix="write for example @100Gb, @8x200Gb (ports) or @12.5GB",
    )


def _number(digits: str, what: str, text: object) -> int:
    digits = digits.strip()
    if not re.fullmatch("[0-9]{1,8}", digits) or not 1 <= int(digits) <= _MOST:
        raise ConfigError(
            f"cluster {str(text)!r}: {digits!r} is not a number of {what}",
            why=f"the form is {_FORM}",
            fix=f"give a whole number from 1 to {_MOST}",
        )
    return int(digits)


def _perhaps_a_file(text: str, error: ConfigError) -> ConfigError:
    if Path(text).suffix.lower() in _OTHER_FILES:
        return ConfigError(
            f"cluster {text!r} is no TOML file", why="clusters are read from TOML", fix="give a path that ends in .toml"
        )
    near = difflib.get_close_matches(text.lower(), sorted(_HERE), n=1, cutoff=0.7)
    if near:
        return ConfigError(error.what, why=error.why, fix="write `this` for this machine")
    return error


def _from_file(path: str) -> Cluster:
    table = load_toml(path)
    require_format(table, path)
    if "cluster" in table:
        return cluster_from_table(table["cluster"], f"{path}: cluster")
    table.pop("format")
    if "nodes" not in table:
        raise ConfigError(
            f"{path} describes no cluster",
            why="it has neither [cluster] nor [[nodes]]",
            fix="write [[nodes]] with count, devices and device",
        )
    return cluster_from_table({"name": Path(path).stem, **table}, path)


def _fill_node(entry: Any, named: list[KnownDevice]) -> Any:
    """A node whose device is a name, with what it leaves out; its device as a table."""
    if not isinstance(entry, dict) or not isinstance(entry.get("device"), str):
        return entry
    known = find_device(entry["device"])
    named.append(known)
    usual = known.node.devices // known.dies
    devices = entry.get("devices", usual * known.dies)
    modules = max(1, devices // known.dies) if isinstance(devices, int) and not isinstance(devices, bool) else usual
    node = to_table(known.nodes(modules))
    return {**node, **entry, "devices": devices, "device": node["device"]}


def _sources(known: Sequence[KnownDevice]) -> str:
    texts = [text for entry in known for text in (entry.source, f"node: {entry.node.source}")]
    return "; ".join(dict.fromkeys(texts))
