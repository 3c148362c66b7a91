"""Offload: what streams between a device, its host's memory and disks in a step, and what compute waits for of it.

Sources: ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840, section 4): gradients go to the host beside the backward, the
host updates, weights come back. ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857, section 4): optimizer states
pass through the host from and to the disk, reading, updating and writing beside each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from meshwright.cost.stages import Stage
from meshwright.spec import DTYPE_BYTES, Job, Link, NodeGroup, Strategy

__all__ = ["Streams", "offload_streams"]

#: Where a node does not say: PCIe 3.0 x16, two sockets of DDR4, and one NVMe disk for all its devices.
_HOST_LINK = Link(latency_s=10e-6, bytes_per_s=16e9)
_HOST_BYTES_PER_S = 200e9
_DISK = Link(latency_s=100e-6, bytes_per_s=2e9)


class Streams(Struct, frozen=True, kw_only=True):
    """Seconds of a step's traffic by what moves, of one rank, and what of it compute waits for (`exposed_s`)."""

    parameters_s: float = 0.0
    activations_s: float = 0.0
    gradients_s: float = 0.0
    update_s: float = 0.0
    exposed_s: float = 0.0


def offload_streams(
    job: Job,
    strategy: Strategy,
    node: NodeGroup,
    *,
    stages: Sequence[Stage],
    forward_s: float,
    backward_s: float,
    microbatches: int,
    trained: int,
) -> Streams:
    """The traffic of one rank.

    Parameters come once a pass from where they rest; activations go once and come once; both run beside compute. With
    the optimizer elsewhere, gradients leave beside the backward, and compute waits for the update: the slowest of the
    host's memory, the disk, and the way back of the weights.

    Args:
        forward_s: compute of one microbatch; `backward_s` the same.
        trained: parameters that this rank updates.
    """
    offload = strategy.offload
    if (offload.optimizer, offload.parameters, offload.activations) == ("device",) * 3:
        return Streams()
    used = max(1, min(node.devices, strategy.world_size))
    link = node.host_link or _HOST_LINK
    bus = link.bytes_per_s * link.efficiency
    host = (node.host_memory_bytes_per_s or _HOST_BYTES_PER_S) / used
    disk = (node.disk or _DISK).bytes_per_s / used
    compute, stored = DTYPE_BYTES[job.compute_dtype], DTYPE_BYTES[job.param_dtype]
    share = strategy.shard * strategy.cp if strategy.zero == 3 else 1
    weights = compute * sum(block.parameters for stage in stages for block in stage.blocks) / share
    passes = 2 * microbatches if strategy.zero == 3 else 2
    parameters = 0.0
    if offload.parameters != "device":
        parameters = passes * weights / (bus if offload.parameters == "host" else min(bus, disk))
    activations = 0.0
    if offload.activations == "host":
        policy = strategy.recompute
        kept = sum(
            block.saved_bytes.get(policy, block.saved_bytes.get("none", 0))
            for stage in stages
            for block in stage.blocks
            if block.kind == "layer"
        )
        activations = 2 * microbatches * strategy.microbatch * kept / bus
    room = microbatches * (forward_s + backward_s)
    exposed = max(0.0, parameters + activations - room)
    gradients = update = 0.0
    if offload.optimizer != "device":
        gradients = stored * trained / bus
        states = job.optimizer.state_tensors
        touched = stored * (3 + 2 * states) * trained / host
        moved = 2 * stored * (1 + states) * trained / disk if offload.optimizer == "disk" else 0.0
        back = compute * trained / bus if offload.parameters == "device" else 0.0
        update = max(touched, moved, back)
        exposed += max(0.0, gradients - backward_s) + update
    return Streams(
        parameters_s=parameters,
        activations_s=activations,
        gradients_s=gradients,
        update_s=update,
        exposed_s=exposed,
    )
