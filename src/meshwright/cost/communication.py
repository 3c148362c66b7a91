"""What a step of a strategy communicates: collectives and bytes, counted in the schedule that the runtime plays."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

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
    held = [(whole, share) for whole, share in zip(memory.wholes, memory.shares, strict=True) if whole]
    gathers, reduces = _per_unit(
        strategy.zero, memory.sharded, strategy.dp > 1, strategy.microbatches(job.global_batch), len(held)
    )
    reduce_kind = "reduce_scatter" if memory.sharded else "all_reduce"
    counts = Counter({"all_gather": sum(gathers), reduce_kind: sum(reduces)})
    compute, reduced = DTYPE_BYTES[job.compute_dtype], DTYPE_BYTES[job.reduce_dtype]
    volume = Counter({"all_gather": compute * sum(n * whole for n, (whole, _) in zip(gathers, held, strict=True))})
    volume[reduce_kind] += reduced * sum(n * whole for n, (whole, _) in zip(reduces, held, strict=True))
    if memory.sharded and strategy.replicas > 1:
        counts["all_reduce"] += len(held)
        volume["all_reduce"] += reduced * sum(share for _, share in held)
    if strategy.dp > 1:
        parameters = sum(max(len(block.tensors), 1) for block in model.blocks if block.parameters)
        counts[_STATISTICS] = 1
        volume[_STATISTICS] = _STATISTICS_VALUE_BYTES * (_STATISTICS_VALUES + parameters)
    return dict(+counts), dict(+volume)


@lru_cache(maxsize=256)
def _per_unit(
    zero: int, sharded: bool, several: bool, microbatches: int, units: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How often the schedule gathers and reduces each unit in a step."""
    ranks = 2 if several else 1
    schedule = single_stage(zero=zero, shard=ranks if sharded else 1, dp=ranks, microbatches=microbatches, units=units)
    found = Counter((action.kind, action.unit) for action in schedule.ranks[0])
    return tuple(found["gather", u] for u in range(units)), tuple(found["reduce", u] for u in range(units))
