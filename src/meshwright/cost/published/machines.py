"""Machines as tables name them: a device, how many of them, and whatever is said of their network."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.cost.published.rows import PublishedRow, Unpriced
from meshwright.errors import MeshwrightError
from meshwright.spec import Cluster, Device, Link, NodeGroup
from meshwright.spec.devices import KnownDevice, find_device, known_devices

__all__ = ["Machines", "machines_of"]

_GIB = 2**30
_PER_NODE = 8
#: Of a rack of 72 (NVL72) jobs use 64, so that powers of two divide it.
_PER_RACK = 64
#: Where the catalogue does not know a device: what the driver and error correction leave of its memory.
_VISIBLE = 0.985
#: Names that differ from the catalogue's by more than form and memory.
_NAMES = (
    (re.compile(r"H100\b.*(500 ?W|HBM2e)", re.IGNORECASE), "H100-500W"),
    (re.compile(r"\bA6000\b", re.IGNORECASE), "RTX A6000"),
    (re.compile(r"\bMI250\b", re.IGNORECASE), "MI250X"),
    (re.compile(r"\bGH200\b", re.IGNORECASE), "H100-SXM-80GB"),
)
_MEMORY = re.compile(r"(?<![0-9.])([0-9]{2,3}(?:\.[0-9]+)?) ?(GiB|GB|gb|G)\b")
_PORTS = re.compile(r"([0-9]+) ?x ?([0-9]+) ?(?:Gb|Gbps|Gbit)\b")
_RATE = re.compile(
    r"(?<![0-9.x])([0-9]+(?:\.[0-9]+)?) ?(?:Gb(?:ps|/s|it(?:/s)?)?|gbps|gbit/s)\b( ?(?:/|per) ?(?:GPU|device))?"
)
_NODE = re.compile(r"\b([0-9]{1,2}) ?(?:GPUs? ?)?(?:/|per) ?node", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The cluster of a row, and what had to be assumed of it."""

    cluster: Cluster
    assumed: tuple[str, ...] = ()


def machines_of(row: PublishedRow, count: int, network: str = "") -> Machines:
    """The machines of a row.

    Args:
        count: how many devices.
        network: of each node, where its document tells and the row does not (`4x100Gb`).

    Raises:
        Unpriced: the device is not known.
    """
    named = row.text("gpu_type")
    device, known, assumed = _device(named)
    asked = _NODE.search(named)
    usual = _PER_RACK if known is not None and known.rack else int(asked[1]) if asked else _PER_NODE
    per_node = next(size for size in range(min(count, usual), 0, -1) if count % size == 0) if count else 1
    per_node = per_node if per_node > 1 or count == 1 else min(count, usual)
    nodes = math.ceil(count / per_node)
    name = f"{count} x {named}"
    if known is None:
        group = NodeGroup(count=nodes, devices=per_node, device=device)
        return Machines(cluster=Cluster(name=name, nodes=(group,)), assumed=assumed)
    group = replace(known.nodes(_modules(known, per_node), nodes), devices=per_node, device=device)
    between = None
    if nodes > 1:
        told = _bytes_per_s(f"{named} {row.text('notes')}", per_node) or _bytes_per_s(network, per_node)
        between = Link(latency_s=known.network.latency_s, bytes_per_s=told or known.network.bytes_per_s)
        if not told:
            assumed += (f"a network of {between.bytes_per_s * 8 / 1e9:g} Gb/s for each device",)
    return Machines(cluster=Cluster(name=name, nodes=(group,), between=between), assumed=assumed)


def _modules(known: KnownDevice, devices: int) -> int:
    return max(1, min(devices, known.most) // known.dies)


def _bytes_per_s(text: str, per_node: int) -> float:
    """The network of each device, 0.0 where the text says nothing of it."""
    ports = _PORTS.search(text)
    if ports:
        return int(ports[1]) * int(ports[2]) * 1e9 / 8 / per_node
    rate = _RATE.search(text)
    if not rate:
        return 0.0
    return float(rate[1]) * 1e9 / 8 / (1 if rate[2] else per_node)


@lru_cache(maxsize=256)
def _device(named: str) -> tuple[Device, KnownDevice | None, tuple[str, ...]]:
    """The device that a table names: the catalogue's where its memory agrees, else one of the memory that is named."""
    asked = next((name for pattern, name in _NAMES if pattern.search(named)), named)
    found = _MEMORY.search(named)
    size = float(found[1]) if found else None
    exact = found is not None and found[2] == "GiB"
    known, assumed = _known(asked, named, size)
    if known is None:
        if size is None:
            raise Unpriced(f"the memory of {named or 'the device'} is not published")
        return Device(name=named, kind="cuda", memory_bytes=int(size * (1 if exact else _VISIBLE) * _GIB)), None, ()
    device = known.device
    if size is None or (not exact and abs(device.memory_bytes / _GIB - size) < 0.1 * size):
        return device, known, assumed
    return replace(device, name=named, memory_bytes=int(size * (1 if exact else _VISIBLE) * _GIB)), known, assumed


def _known(asked: str, named: str, size: float | None) -> tuple[KnownDevice | None, tuple[str, ...]]:
    """The catalogue's entry whose chip the name holds; of several sizes the one that is named, else the largest."""
    try:
        return find_device(asked), ()
    except MeshwrightError:
        pass
    spelled = [(entry, _place(entry, asked)) for entry in known_devices()]
    longest = max((length for _, length in spelled), default=0)
    if not longest:
        return None, ()
    of_chip = [entry for entry, length in spelled if length == longest]
    form = next((form for form in ("PCIe", "NVL") if re.search(form, named.replace("-", ""), re.IGNORECASE)), "SXM")
    of_chip = [entry for entry in of_chip if entry.form == form] or of_chip
    if size is not None:
        return min(of_chip, key=lambda entry: abs(entry.memory_gib - size)), ()
    best = max(of_chip, key=lambda entry: entry.memory_gib)
    return best, (f"{best.name}, of the {len(of_chip)} sizes of {best.chip}",) if len(of_chip) > 1 else ()


def _place(entry: KnownDevice, text: str) -> int:
    """How many letters of the text name this chip, 0 for none."""
    for chip in (entry.chip, entry.chip.removeprefix("RTX ")):
        pattern = r"[ _-]?".join(re.escape(part) for part in chip.split())
        if re.search(rf"(?<![A-WYZa-wyz0-9]){pattern}(?=$|[^0-9A-Za-z]|SXM|PCI|NVL)", text, re.IGNORECASE):
            return len(chip)
    return 0
