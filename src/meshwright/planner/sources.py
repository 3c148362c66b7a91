"""Where the numbers of a plan came from: every constant of its devices, links and kernels, by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from meshwright.cost.compute import speeds
from meshwright.cost.links import Placement
from meshwright.cost.overhead import overhead_bytes
from meshwright.spec import Cluster, Constant, Device, Efficiency, ErrorBar, Job, Link, ModelSpec, Strategy

__all__ = ["constants", "error_bar"]

_CLUSTER = "as the cluster describes it"
_ASSUMED = "assumed: the cluster does not tell"
_GB = 10**9
#: Figures of `Efficiency` in words, with their units.
_REACHED = {
    "half_inner": ("inner dim at which half of that is reached", "elements"),
    "tile": ("rows of an output tile", "rows"),
    "attention": ("share of the peak, attention forward", ""),
    "backward_attention": ("share of the peak, attention backward", ""),
    "memory": ("share of the memory bandwidth", ""),
    "kernel_s": ("starting an operation", "s"),
    "contention": ("slowed by collectives that run beside, share of their time", ""),
}
#: Median absolute errors of step times and of memory over the rows of docs/accuracy.md, rounded up.
_STEP_TIME_ERROR = 0.08
_MEMORY_ERROR = 0.06
#: The same where experts are routed, or the host or a disk holds a part: published rows of both lie farther off.
_WIDER_ERROR = 0.25
_ERRORS = "median absolute error against published measurements, docs/accuracy.md"


def error_bar(cluster: Cluster, model: ModelSpec, strategy: Strategy) -> ErrorBar:
    """How far predictions for a cluster may be off; not known for devices whose speed nobody told or measured."""
    devices = [group.device for group in cluster.nodes]
    if any(device.efficiency is None or device.kind == "cpu" for device in devices):
        return ErrorBar(source="the speed of this device is not calibrated: meshwright calibrate measures it")
    offload = strategy.offload
    away = (offload.optimizer, offload.parameters, offload.activations) != ("device",) * 3
    wider = away or any(block.experts for block in model.blocks)
    step_time = _WIDER_ERROR if wider else _STEP_TIME_ERROR
    return ErrorBar(step_time=step_time, memory=_MEMORY_ERROR, source=_ERRORS)


def constants(cluster: Cluster, job: Job, strategy: Strategy) -> tuple[Constant, ...]:
    """Every constant that the price of a strategy hangs on, in the order of the cluster's nodes."""
    found: list[Constant] = []
    for group in {group.device.name: group for group in cluster.nodes}.values():
        found += _of_device(group.device, job, cluster.source or _CLUSTER)
        tiers = {"host link": group.host_link, "disk": group.disk}
        for name, link in tiers.items():
            if link is not None:
                found += _of_link(name, link, cluster.source or _CLUSTER)
        if group.host_memory_bytes_per_s is not None:
            rate = float(group.host_memory_bytes_per_s)
            found.append(
                Constant(name="host memory bandwidth", value=rate, unit="bytes/s", source=cluster.source or _CLUSTER)
            )
    across = Placement(cluster, strategy).group("dp")
    told = any(group.inside is not None for group in cluster.nodes)
    if max(group.devices for group in cluster.nodes) > 1:
        found += _of_link("link inside a node", across.within, (cluster.source or _CLUSTER) if told else _ASSUMED)
    if sum(group.count for group in cluster.nodes) > 1:
        known = cluster.between is not None
        found += _of_link("link between nodes", across.between, (cluster.source or _CLUSTER) if known else _ASSUMED)
    found += _of_process(cluster.device_kind)
    return tuple(found)


def _of_process(kind: str) -> Iterator[Constant]:
    """What a rank takes besides tensors (`cost/overhead.py`): for two communicators and 1 GB of tensors."""
    taken = overhead_bytes(kind, Strategy(dp=2, tp=2), _GB)
    rows = [
        ("the process itself", float(taken["framework"]), "bytes"),
        ("each further communicator", float(taken["communicators"]), "bytes"),
        ("allocator gaps, share of all tensors", taken["allocator"] / _GB, ""),
    ]
    for name, value, unit in rows:
        yield Constant(
            name=name, value=value, unit=unit, source="measured or fitted to published peaks: cost/overhead.py"
        )


def _of_device(device: Device, job: Job, source: str) -> Iterator[Constant]:
    speed = speeds(device, job.compute_dtype)
    reached = speed.reached
    fitted = reached.source or (
        "assumed: the device is not in the catalogue" if device.efficiency is None else _CLUSTER
    )
    told = source if not speed.guessed else _ASSUMED
    moved = source if device.memory_bytes_per_s is not None else _ASSUMED
    rows = [
        ("memory", float(device.memory_bytes), "bytes", source),
        (f"peak in {job.compute_dtype}", speed.flops_per_s, "flops/s", told),
        ("memory bandwidth", speed.bytes_per_s / reached.memory, "bytes/s", moved),
        ("share of the peak, matrix products", speed.product_flops_per_s / speed.flops_per_s, "", fitted),
    ]
    for entry in fields(Efficiency):
        if entry.name not in ("products", "source"):
            name, unit = _REACHED.get(entry.name, (entry.name.replace("_", " "), ""))
            rows.append((name, getattr(reached, entry.name), unit, fitted))
    for name, value, unit, origin in rows:
        yield Constant(name=f"{device.name}: {name}", value=float(value), unit=unit, source=origin)


def _of_link(name: str, link: Link, source: str) -> Iterator[Constant]:
    yield Constant(name=f"{name}: latency", value=float(link.latency_s), unit="s", source=source)
    yield Constant(name=f"{name}: bandwidth", value=float(link.bytes_per_s), unit="bytes/s", source=source)
    yield Constant(name=f"{name}: share of it reached", value=float(link.efficiency), unit="", source=source)
    for kind, share in (link.collectives or {}).items():
        reached = f"{name}: share of it reached, {kind.replace('_', '-')}"
        yield Constant(name=reached, value=float(share), unit="", source=source)
