"""Clusters of a given size, for tests."""

from __future__ import annotations

from dataclasses import replace

from meshwright.cost import framework_bytes
from meshwright.spec import Cluster, DecoderShape, Device, NodeGroup
from meshwright.spec.clusters import parse_cluster

__all__ = ["CARD_13B", "EVEN", "SMALL", "cluster", "cut_down"]

#: Sizes that divide nothing, and activations that matter beside the states.
SMALL = DecoderShape(
    vocab_size=101,
    hidden_size=12,
    intermediate_size=31,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=128,
)

#: The same with widths that two ranks divide.
EVEN = replace(SMALL, intermediate_size=32)


def cluster(devices: int, tensors_bytes: int, name: str = "test machine") -> Cluster:
    """`devices` CPU devices, each with room for this many bytes of tensors, and so slow that more of them are faster
    whatever they have to communicate."""
    device = Device(
        name="core",
        memory_bytes=framework_bytes("cpu") + tensors_bytes,
        memory_bytes_per_s=1e8,
        peak_flops_per_s={"float32": 1e7},
    )
    return Cluster(name=name, nodes=(NodeGroup(devices=devices, device=device),), memory_fraction=1.0)


def cut_down(text: str, *, memory_gib: float = 0, host_gib: float = 0) -> Cluster:
    """A cluster of the catalogue with less memory on a device, or less on a host."""
    whole = parse_cluster(text)
    nodes = []
    for group in whole.nodes:
        device = replace(group.device, memory_bytes=int(memory_gib * 2**30)) if memory_gib else group.device
        host = int(host_gib * 2**30) if host_gib else group.host_memory_bytes
        nodes.append(replace(group, device=device, host_memory_bytes=host))
    return replace(whole, nodes=tuple(nodes))


#: One card of 16 GB in a machine with hardly any memory of its own.
CARD_13B = cut_down("1xV100-PCIe-16GB", host_gib=1)
