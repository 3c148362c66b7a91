"""Unequal nodes: the parts of a cluster that are tried, fastest nodes first."""

from __future__ import annotations

from dataclasses import replace

from meshwright.cost.compute import speeds
from meshwright.spec import Cluster, Job, NodeGroup

__all__ = ["parts"]


def parts(cluster: Cluster, job: Job) -> list[Cluster]:
    """All of a cluster, and what is left without the slowest nodes, without the two slowest kinds, and so on.

    In each the fastest nodes come first, for ranks are laid over nodes in their order. Equal nodes are one part. Data
    parallelism gives every rank an equal share, so that slow nodes may hold up more than they do; pipeline stages are
    cut in proportion to the speed of their devices.
    """
    if all(group.device == cluster.nodes[0].device for group in cluster.nodes):
        return [cluster]

    def pace(group: NodeGroup) -> tuple[float, float, int]:
        speed = speeds(group.device, job.compute_dtype)
        return -speed.product_flops_per_s, -speed.bytes_per_s, -group.device.memory_bytes

    order = sorted(cluster.nodes, key=pace)
    ends = [n for n in range(1, len(order)) if pace(order[n - 1]) != pace(order[n])]
    return [replace(cluster, nodes=tuple(order[:end])) for end in (len(order), *reversed(ends))]
