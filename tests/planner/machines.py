"""Clusters of a given size, for tests."""

from __future__ import annotations

from meshwright.cost import framework_bytes
from meshwright.spec import Cluster, DecoderShape, Device, NodeGroup

__all__ = ["SMALL", "cluster"]

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


def cluster(devices: int, tensors_bytes: int, name: str = "test machine") -> Cluster:
    """`devices` CPU devices, each with room for this many bytes of tensors."""
    device = Device(name="core", memory_bytes=framework_bytes("cpu") + tensors_bytes)
    return Cluster(name=name, nodes=(NodeGroup(devices=devices, device=device),), memory_fraction=1.0)
