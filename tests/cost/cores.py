"""Prices on a CPU machine with room for everything."""

from __future__ import annotations

from meshwright.cost import price as price_on
from meshwright.spec import Cluster, Cost, Device, Job, ModelSpec, NodeGroup, Strategy

__all__ = ["CORES", "price"]

CORES = Cluster(name="cores", nodes=(NodeGroup(devices=64, device=Device(name="core", memory_bytes=2**40)),))


def price(model: ModelSpec, job: Job, strategy: Strategy) -> Cost:
    """What a strategy costs there."""
    return price_on(model, CORES, job, strategy)
