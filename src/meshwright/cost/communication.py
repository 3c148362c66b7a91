"""What a step of a strategy communicates: collectives and their bytes, counted in the schedule that the runtime plays."""

from __future__ import annotations

from collections import Counter

from meshwright.cost.memory import StepMemory
from meshwright.schedule import single_stage
from meshwright.spec import DTYPE_BYTES, Job, ModelSpec, Strategy

__all__ = ["count_collectives"]

#: The one small all-reduce of a step, in float64: loss sum, weight, squared gradient norm, and a mark per parameter.
_STATISTICS = "statistics"
_STATISTICS_VALUES = 3
_STATISTICS_VALUE_BYTES = 8


def count_collectives(
    model: ModelSpec, job: Job, strategy: Strategy, memory: StepMemory
) -> tuple[dict[str, int], dict[str, int]]:
    """Counts and bytes of one step's collectives by kind; kinds that do not occur are left out.

    Bytes are those of the whole, unsharded message, padding included: a gather of a unit moves it in the compute dtype,
    a reduce in the reduce dtype. The all-reduces of hybrid sharding move this rank's share of each unit.

    Returns:
        Two mappings from `all_gather`, `reduce_scatter`, `all_reduce`, `statistics`: the counts, and the bytes.
    """
    compute, reduced = DTYPE_BYTES[job.compute_dtype], DTYPE_BYTES[job.reduce_dtype]
    held = [(whole, share) for whole, share in zip(memory.wholes, memory.shares, strict=True) if whole]
    schedule = single_stage(
        zero=strategy.zero,
        shard=strategy.shard,
        dp=strategy.dp,
        microbatches=strategy.microbatches(job.global_batch),
        units=len(held),
    )
    counts: Counter[str] = Counter()
    volume: Counter[str] = Counter()
    reduce_kind = "reduce_scatter" if memory.sharded else "all_reduce"
    for action in schedule.ranks[0]:
        if action.unit is None:
            continue
        whole, _ = held[action.unit]
        if action.kind == "gather":
            counts["all_gather"] += 1
            volume["all_gather"] += compute * whole
        elif action.kind == "reduce":
            counts[reduce_kind] += 1
            volume[reduce_kind] += reduced * whole
    if memory.sharded and strategy.replicas > 1:
        counts["all_reduce"] += len(held)
        volume["all_reduce"] += reduced * sum(share for _, share in held)
    if strategy.dp > 1:
        parameters = sum(max(len(block.tensors), 1) for block in model.blocks if block.parameters)
        counts[_STATISTICS] = 1
        volume[_STATISTICS] = _STATISTICS_VALUE_BYTES * (_STATISTICS_VALUES + parameters)
    return dict(counts), dict(volume)
