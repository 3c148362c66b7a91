"""estimate: the memory of every pipeline rank under a strategy, beside what its device has."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.cost.memory import RankMemory, StepMemory
from meshwright.cost.overhead import overhead_bytes
from meshwright.errors import ConfigError
from meshwright.spec import Cluster, Job, ModelSpec, Strategy
from meshwright.spec.conventions import Convention, on_accelerator

__all__ = ["Estimate", "RankEstimate", "estimate", "estimate_of", "rank_bytes"]

#: What ZeRO can divide, so that a larger shard group or a higher stage helps.
_STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class RankEstimate:
    """One pipeline rank (all ranks of its other mesh dimensions are alike), in bytes.

    `layers` counts its layers on each of its stages, `holds` names its other blocks. `at_rest` and `in_step` map a
    category to bytes between steps and at the largest moment of a step, which `phase` names; `overhead` what the
    process takes besides tensors. `host_bytes` and `disk_bytes` are what this rank keeps on those tiers. `total_bytes`
    is what the device must hold.
    """

    rank: int
    layers: tuple[int, ...]
    holds: tuple[str, ...]
    at_rest: dict[str, int]
    in_step: dict[str, int]
    phase: str
    overhead: dict[str, int]
    host_bytes: int
    disk_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory of a strategy for a job on a cluster. `usable_bytes` is what a plan may take of a device.

    `divides` says which bytes of the worst rank the shard group divides. `notes` say what was assumed.
    """

    model: str
    parameters: int
    strategy: str
    cluster: str
    devices: int
    world_size: int
    global_batch: int
    sequence: int
    compute_dtype: str
    stack: str
    microbatches: int
    ranks: tuple[RankEstimate, ...]
    usable_bytes: int
    device_bytes: int
    host_usable_bytes: int | None
    host_needed_bytes: int
    disk_usable_bytes: int | None = None
    disk_needed_bytes: int = 0
    divides: dict[str, int]
    notes: tuple[str, ...] = field(default=())

    @property
    def worst(self) -> RankEstimate:
        """The rank that needs most; the first one of equals."""
        return max(self.ranks, key=lambda rank: rank.total_bytes)

    @property
    def short_bytes(self) -> int:
        """Bytes that the worst rank needs beyond what is usable on its device; negative when it fits."""
        return self.worst.total_bytes - self.usable_bytes

    @property
    def host_short_bytes(self) -> int:
        """Bytes that a node's host memory is short of; negative or 0 when it is enough or not known."""
        return self.host_needed_bytes - self.host_usable_bytes if self.host_usable_bytes is not None else 0

    @property
    def disk_short_bytes(self) -> int:
        """Bytes that a node's disk is short of; negative or 0 when it is enough or not known."""
        return self.disk_needed_bytes - self.disk_usable_bytes if self.disk_usable_bytes is not None else 0

    @property
    def fits(self) -> bool:
        """Whether every device, every host and every disk has room."""
        return max(self.short_bytes, self.host_short_bytes, self.disk_short_bytes) <= 0

    @property
    def states_bytes(self) -> int:
        """Of the worst rank's largest moment, what ZeRO can divide among more ranks."""
        return sum(self.worst.in_step[name] for name in _STATES)


def estimate(
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    strategy: Strategy,
    *,
    convention: Convention | None = None,
    model_parameters: int = 0,
) -> Estimate:
    """The memory of each pipeline rank.

    Args:
        model: described for the layout of the strategy (`Layout.of(job, strategy)`).
        convention: how another stack holds bytes; without one as this runtime does.
        model_parameters: those of the whole model, where `model` is the part of a tensor- or expert-parallel rank.

    Raises:
        ConfigError: the strategy needs more ranks than there are devices, or does not fit the model or the batch.
        UnsupportedCombination: its schedule is not defined for these numbers of stages and microbatches.
    """
    if strategy.world_size > cluster.devices:
        raise ConfigError(
            f"the strategy needs {strategy.world_size} ranks, but {cluster.name} has {cluster.devices} devices",
            why="dp x tp x pp x cp ranks run, each on a device of its own",
            fix=f"use {cluster.devices} ranks or fewer, or a larger cluster",
        )
    if cluster.device_kind != "cpu":
        convention = on_accelerator(convention)
    memory = StepMemory(model, job, strategy, convention)
    return estimate_of(memory, model, cluster, job, strategy, convention, model_parameters=model_parameters)


def estimate_of(
    memory: StepMemory,
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    strategy: Strategy,
    convention: Convention | None,
    *,
    model_parameters: int = 0,
) -> Estimate:
    """The estimate of a step's memory that is worked out already; see `estimate`."""
    ranks = tuple(_rank_estimate(index, rank, cluster, strategy, convention) for index, rank in enumerate(memory.ranks))
    worst = memory.ranks[max(range(len(ranks)), key=lambda index: ranks[index].total_bytes)]
    hosts = [group.host_memory_bytes for group in cluster.nodes if group.host_memory_bytes is not None]
    device_bytes = _smallest_used(cluster, strategy.world_size)
    disks = [group.disk_bytes for group in cluster.nodes if group.disk_bytes is not None]
    per_node = min(max(group.devices for group in cluster.nodes), strategy.world_size)
    host = max(rank.host for rank in memory.ranks)
    if host and cluster.device_kind == "cpu":  # the devices' memory is the host's
        host += max(rank.total_bytes for rank in ranks)
    return Estimate(
        model=model.name,
        parameters=model_parameters or sum(stage.parameters for stage in memory.stages),
        strategy=str(strategy),
        cluster=cluster.name,
        devices=cluster.devices,
        world_size=strategy.world_size,
        global_batch=job.global_batch,
        sequence=job.sequence,
        compute_dtype=job.compute_dtype,
        stack=job.stack,
        microbatches=memory.microbatches,
        ranks=ranks,
        usable_bytes=int(device_bytes * cluster.memory_fraction),
        device_bytes=device_bytes,
        host_usable_bytes=int(min(hosts) * cluster.memory_fraction) if hosts else None,
        host_needed_bytes=per_node * host,
        disk_usable_bytes=min(disks) if disks else None,
        disk_needed_bytes=per_node * max(rank.disk for rank in memory.ranks),
        divides=worst.divided,
        notes=(model.source,) if model.source else (),
    )


def _smallest_used(cluster: Cluster, ranks: int) -> int:
    """Memory of the smallest device that is needed: those with the most memory are taken first."""
    for group in sorted(cluster.nodes, key=lambda group: -group.device.memory_bytes):
        ranks -= group.count * group.devices
        if ranks <= 0:
            break
    return group.device.memory_bytes


def rank_bytes(rank: RankMemory, cluster: Cluster, strategy: Strategy, convention: Convention | None) -> int:
    """The total bytes of one pipeline rank."""
    return rank.peak_bytes + sum(_overhead(rank, cluster, strategy, convention).values())


def _overhead(rank: RankMemory, cluster: Cluster, strategy: Strategy, convention: Convention | None) -> dict[str, int]:
    kind, units = cluster.device_kind, rank.gathers_in_flight
    return overhead_bytes(kind, strategy, rank.peak_bytes, convention, units=units, unit_bytes=rank.largest_unit)


def _rank_estimate(
    index: int, rank: RankMemory, cluster: Cluster, strategy: Strategy, convention: Convention | None
) -> RankEstimate:
    """What one pipeline rank holds."""
    overhead = _overhead(rank, cluster, strategy, convention)
    kinds = [block.name for stage in rank.stages for block in stage.blocks if block.kind != "layer"]
    return RankEstimate(
        rank=index,
        layers=tuple(sum(block.kind == "layer" for block in stage.blocks) for stage in rank.stages),
        holds=tuple(kinds),
        at_rest=rank.at_rest,
        in_step=rank.in_step,
        phase=rank.peak.phase,
        overhead=overhead,
        host_bytes=rank.host,
        disk_bytes=rank.disk,
        total_bytes=rank.peak_bytes + sum(overhead.values()),
    )
