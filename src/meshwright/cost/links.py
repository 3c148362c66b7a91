"""Collectives: how long each takes, by the place of its ranks on nodes and the links between them."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from msgspec import Struct

from meshwright.spec import Cluster, Device, Link, NodeGroup, Strategy

__all__ = ["Collective", "Group", "Placement", "collective_s"]

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]

#: Starting a collective on an accelerator, besides its steps: all-reduce of 32 KiB to 1 MiB on 8 H200 takes 40 to 46
#: microseconds (ml-engineering, network README), of which 14 steps of NVLink are 27.
_CALL_S = 20e-6
#: Where a cluster does not say how its devices are joined: PCIe 3.0 x16 and 100 Gb/s for a node of 8, or gloo over
#: shared memory and 10 Gb/s for CPUs.
_UNKNOWN = {
    "cpu": (Link(latency_s=60e-6, bytes_per_s=1.5e9, efficiency=1), Link(latency_s=100e-6, bytes_per_s=1.25e9)),
    "": (Link(latency_s=5e-6, bytes_per_s=16e9), Link(latency_s=10e-6, bytes_per_s=1.5625e9)),
}


#: What collectives over many nodes lose, for each doubling of their number: a ring cuts the message into ever smaller
#: pieces and waits for its slowest link; an all-reduce may take a tree.
_SPREAD = {"all_reduce": 0.03, "all_gather": 0.1, "reduce_scatter": 0.1}


class Group(NamedTuple):
    """Ranks that communicate: `size` of them, `inside` on each of `nodes` nodes, and their links.

    `call_s` is what starting a collective takes. Without ranks on several nodes `between` is not used.
    """

    size: int
    inside: int
    nodes: int
    within: Link
    between: Link
    call_s: float = 0.0


def collective_s(kind: Collective, message_bytes: float, group: Group) -> float:
    """Seconds of one collective: latency of its steps, and bytes over the slower of its tiers.

    Over nodes every rank drives its own share of the node's network, and both tiers work at once (NCCL's rings through
    all network ports). Ring: (n-1)/n of the message for a gather or a scatter, twice that for an all-reduce; an
    all-reduce over many nodes takes the fewer steps of ring and double binary tree (Thakur et al. 2005, section 3 and
    4; NVIDIA NCCL 2.4).

    Args:
        kind: all_to_all exchanges what each rank holds, send goes to one neighbour.
        message_bytes: the whole, unsharded message; of all_to_all and send what one rank holds.
    """
    size, inside, nodes, within, between, call_s = group
    if size == 1:
        return 0.0
    if kind == "send":
        link = between if inside == 1 and nodes > 1 else within
        return link.latency_s + message_bytes / _rate(link, kind)
    fast, times = _rate(within, kind), 2 if kind == "all_reduce" else 1
    if nodes == 1:
        moved = times * (size - 1) / size * message_bytes / fast
        return call_s + times * (size - 1) * within.latency_s + moved
    slow = _rate(between, kind)
    if kind == "all_to_all":
        moved = max((size - inside) / size * message_bytes / slow, (inside - 1) / size * message_bytes / fast)
        return call_s + (nodes - 1) * between.latency_s + (inside - 1) * within.latency_s + moved
    across = (nodes - 1) / nodes * message_bytes / (inside * slow)
    here = (size - 1) / size * message_bytes / fast if inside > 1 else 0.0
    steps = times * (nodes - 1)
    if kind == "all_reduce":
        steps = min(steps, 2 * math.ceil(math.log2(nodes)))
    latency = steps * between.latency_s + times * (inside - 1) * within.latency_s
    spread = 1 + _SPREAD[kind] * math.log2(nodes)
    return call_s + latency + times * max(across * spread, here)


def _rate(link: Link, kind: Collective) -> float:
    """Bytes per second that a collective reaches."""
    return link.bytes_per_s * (link.collectives.get(kind, link.efficiency) if link.collectives else link.efficiency)


class Placement(Struct, frozen=True):
    """Where the ranks of a strategy lie: rank r on device r of the cluster, nodes in the cluster's order."""

    cluster: Cluster
    strategy: Strategy

    def group(self, dimension: str) -> Group:
        """The ranks of one mesh dimension, or of `dp` (replicas and shard group), `zero` (what ZeRO cuts over: shard
        group and cp), `reduced` (all whose gradients are summed: dp and cp), `ep` or `experts` (what cuts an expert).
        """
        size, stride = self._span(dimension)
        return _group(self.cluster, size, stride, self.strategy.world_size)

    def devices(self, stage: int) -> Device:
        """The slowest device that a pipeline rank's ranks run on."""
        held = {id(group): group for group in self._groups(stage)}.values()
        return min(held, key=lambda group: _speed(group.device)).device

    def node(self, stage: int = 0) -> NodeGroup:
        """The nodes of a pipeline rank; of several kinds the first."""
        return self._groups(stage)[0]

    def _groups(self, stage: int) -> list[NodeGroup]:
        if len(self.cluster.nodes) == 1:
            return [self.cluster.nodes[0]]
        size, stride = self._span("pp")
        block = stride * size
        ranks: set[int] = set()
        for start in range(0, self.strategy.world_size, block):
            ranks.update((start + stage * stride, start + (stage + 1) * stride - 1))
        found, first = [], 0
        for group in self.cluster.nodes:
            last = first + group.count * group.devices
            if any(first <= rank < last for rank in ranks) or (min(ranks) < first and max(ranks) >= last):
                found.append(group)
            first = last
        return found or [self.cluster.nodes[-1]]

    def _span(self, dimension: str) -> tuple[int, int]:
        """How many ranks a dimension has, and how far they lie apart."""
        s = self.strategy
        sizes = {"pp": s.pp, "dp_replicate": s.replicas, "dp_shard": s.shard, "cp": s.cp, "tp": s.tp}
        stride, strides = 1, {}
        for name in reversed(s.mesh_order):
            strides[name] = stride
            stride *= sizes[name]
        if dimension in sizes:
            return sizes[dimension], strides[dimension]
        joined = {
            "dp": ("dp_replicate", "dp_shard"),
            "zero": ("dp_shard", "cp"),
            "reduced": ("dp_replicate", "dp_shard", "cp"),
        }
        if dimension in joined:
            names = joined[dimension]
            used = [name for name in names if sizes[name] > 1] or list(names)
            return math.prod(sizes[name] for name in names), min(strides[name] for name in used)
        if dimension == "ep":  # experts are laid over tp, cp and dp_shard, the nearest ranks first
            return s.ep, 1
        return max(1, s.shard * s.cp * s.tp // s.ep), min(s.ep, s.world_size)


def _group(cluster: Cluster, size: int, stride: int, world: int) -> Group:
    per_node = min(group.devices for group in cluster.nodes)
    nodes = 1
    if world > per_node and size > 1:
        inside = max(1, min(size, per_node // stride)) if stride < per_node else 1
        nodes = -(-size // inside)
    inside = -(-size // nodes)
    usual = _UNKNOWN.get(cluster.device_kind, _UNKNOWN[""])
    links = [group.inside for group in cluster.nodes if group.inside is not None]
    within = min(links, key=lambda link: link.bytes_per_s) if links else usual[0]
    call_s = 0.0 if cluster.device_kind == "cpu" else _CALL_S
    return Group(size, inside, nodes, within, cluster.between or usual[1], call_s)


def _speed(device: Device) -> float:
    return max(device.peak_flops_per_s.get("bfloat16", 0), device.peak_flops_per_s.get("float16", 0)) or max(
        device.peak_flops_per_s.values(), default=0.0
    )
