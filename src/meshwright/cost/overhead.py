"""What a rank takes of a device's memory besides tensors: the process, its communicators, the allocator's gaps."""

from __future__ import annotations

from meshwright.spec import Strategy
from meshwright.spec.conventions import Convention

__all__ = ["communicators", "framework_bytes", "least_overhead_bytes", "overhead_bytes"]

_MIB = 2**20
#: CPU: resident memory of a rank after importing torch and the runtime, joining a gloo group of 2 and one backward
#: (280 MiB with PyTorch 2.13), rounded up. Other kinds: the driver's context with PyTorch's kernels, 1573 MiB on an
#: A100 (bigscience, tr11-176B-ml/chronicles-prequel.md), rounded down.
_FRAMEWORK_BYTES = {"cpu": 300 * _MIB}
_ACCELERATOR_BYTES = 1536 * _MIB
#: A communicator of NCCL or RCCL holds channel buffers on the device. NCCL_BUFFSIZE is 4 MiB a channel and peer by
#: default, with some tens of channels: an allowance of 256 MiB. The first one is part of the framework's bytes.
_COMMUNICATOR_BYTES = {"cpu": 0}
_ACCELERATOR_COMMUNICATOR_BYTES = 256 * _MIB
#: What is reserved beyond the tensors that are counted, as a share of these: the caching allocator's gaps, and what an
#: operation needs while it runs. Accelerators: fitted once, to the published peaks of all stacks together.
_GAPS = {"cpu": 0.0}
_ACCELERATOR_GAPS = 0.08


def framework_bytes(device_kind: str) -> int:
    """Bytes of a device's memory that a rank needs besides tensors and further communicators."""
    return _FRAMEWORK_BYTES.get(device_kind, _ACCELERATOR_BYTES)


def communicators(strategy: Strategy) -> int:
    """Groups of ranks that a rank communicates in: one per mesh dimension of more than one rank."""
    s = strategy
    return (s.tp > 1) + (s.pp > 1) + (s.cp > 1) + (s.ep > 1) + (s.replicas > 1) + (s.shard * s.cp > 1)


def least_overhead_bytes(device_kind: str, strategy: Strategy, tensor_bytes: int) -> int:
    """The sum of `overhead_bytes`, without gathers in flight."""
    each = _COMMUNICATOR_BYTES.get(device_kind, _ACCELERATOR_COMMUNICATOR_BYTES)
    gaps = int(_GAPS.get(device_kind, _ACCELERATOR_GAPS) * tensor_bytes)
    return framework_bytes(device_kind) + each * max(0, communicators(strategy) - 1) + gaps


def overhead_bytes(
    device_kind: str,
    strategy: Strategy,
    tensor_bytes: int,
    convention: Convention | None = None,
    *,
    units: int = 0,
    unit_bytes: int = 0,
) -> dict[str, int]:
    """Bytes besides tensors, by what takes them: `framework`, `communicators`, `collectives`, `allocator`.

    Args:
        tensor_bytes: the peak of tensors, of which the allocator's gaps are a share.
        units, unit_bytes: gathers in flight, and the largest ZeRO unit in the compute dtype. An accelerator's gather
            writes into a buffer of its own, which its stream may hold until a later one is done.
        convention: what another stack takes; its process's bytes hold its communicators.
    """
    each = _COMMUNICATOR_BYTES.get(device_kind, _ACCELERATOR_COMMUNICATOR_BYTES)
    gaps = _GAPS.get(device_kind, _ACCELERATOR_GAPS)
    process, joined = framework_bytes(device_kind), each * max(0, communicators(strategy) - 1)
    if convention is not None:
        gaps = gaps if convention.gaps is None else convention.gaps
        process, joined = (process, joined) if convention.process_bytes is None else (convention.process_bytes, 0)
    in_flight = 0 if device_kind == "cpu" else units * unit_bytes
    return {
        "framework": process,
        "communicators": joined,
        "collectives": in_flight,
        "allocator": int(gaps * tensor_bytes),
    }
