"""What a step of a strategy communicates: collectives and bytes, counted in the schedule that the runtime plays."""

from __future__ import annotations

from collections import Counter

from meshwright.cost.memory import RankMemory, StepMemory
from meshwright.cost.play import unit_counts
from meshwright.cost.states import shard_group, summed_elements
from meshwright.schedule import stage_ranks
from meshwright.spec import DTYPE_BYTES, Job, ModelSpec, Strategy

__all__ = ["count_collectives"]

#: The one small all-reduce of a step, in float64: loss sum, weight, squared gradient norm, and a mark per parameter.
_STATISTICS = "statistics"
_STATISTICS_VALUES = 3
_STATISTICS_VALUE_BYTES = 8

Counts = tuple[Counter[str], Counter[str]]


def count_collectives(
    model: ModelSpec, job: Job, strategy: Strategy, memory: StepMemory, pipeline_rank: int | None = None
) -> tuple[dict[str, int], dict[str, int]]:
    """Counts and bytes of one step's collectives by kind, on a pipeline rank; None: the one that needs most memory.

    Bytes are those of the whole, unsharded message, padding included: a gather of a unit moves it in the compute dtype,
    a reduce in the reduce dtype. The all-reduces of hybrid sharding move this rank's share of each unit. Kinds that do
    not occur are left out.

    Returns:
        Two mappings, the counts and the bytes, from `all_gather`, `reduce_scatter`, `all_reduce`, `statistics`; under
        pipelining `send` and `receive`; and those of model parallelism by dimension and kind, such as `tp_all_reduce`.
    """
    rank = memory.worst if pipeline_rank is None else memory.ranks[pipeline_rank]
    totals: Counts = Counter(), Counter()
    _zero(memory.ranks.index(rank), memory, job, strategy, totals)
    _messages(rank, memory, strategy, totals)
    _tied(rank, memory, job, strategy, totals)
    _model_parallel(rank, memory, strategy, totals)
    _shares(rank, job, strategy, totals)
    if strategy.world_size > 1:
        parameters = sum(max(len(block.tensors), 1) for block in model.blocks if block.parameters)
        _add(totals, _STATISTICS, 1, _STATISTICS_VALUE_BYTES * (_STATISTICS_VALUES + parameters))
    counts, volume = totals
    return dict(+counts), dict(+volume)


def _add(totals: Counts, kind: str, count: int, size: int) -> None:
    totals[0][kind] += count
    totals[1][kind] += count * size


def _zero(index: int, memory: StepMemory, job: Job, strategy: Strategy, totals: Counts) -> None:
    compute, reduced = DTYPE_BYTES[job.compute_dtype], DTYPE_BYTES[job.reduce_dtype]
    gathers, reduces = unit_counts(strategy, memory.microbatches, index)
    for stage in memory.ranks[index].stages:
        states, number = memory.moments_of[stage.index].states, stage.index
        for whole, made, share in zip(states.wholes, states.reduced, states.trained, strict=True):
            if whole:
                _add(totals, "all_gather", gathers.get(number, 0), compute * whole)
                kind = "reduce_scatter" if states.sharded else "all_reduce"
                _add(totals, kind, reduces.get(number, 0), reduced * made)
            if whole and states.sharded and strategy.replicas > 1:
                _add(totals, "all_reduce", 1, reduced * share)


def _messages(rank: RankMemory, memory: StepMemory, strategy: Strategy, totals: Counts) -> None:
    """Activations go to the stage behind, gradients of the same size to the one before."""
    lies = stage_ranks(strategy.schedule, strategy.pp, strategy.virtual_stages)
    for stage in rank.stages:
        for other in (stage.index - 1, stage.index + 1):
            if 0 <= other < len(lies) and lies[other] != lies[stage.index]:
                size = strategy.microbatch * memory.stages[min(stage.index, other)].blocks[-1].output_bytes
                for kind in ("send", "receive"):
                    _add(totals, kind, memory.microbatches, size)


def _tied(rank: RankMemory, memory: StepMemory, job: Job, strategy: Strategy, totals: Counts) -> None:
    """The gradients of a weight that stages on two ranks hold are summed over these, each rank's share."""
    for stage in memory.stages:
        here = any(held.index in (0, stage.index) for held in rank.stages)
        if here and stage.copied_parameters and not stage.borrowed_parameters:
            share = -(-stage.copied_parameters // shard_group(strategy))
            _add(totals, "all_reduce", 1, DTYPE_BYTES[job.param_dtype] * share)


def _model_parallel(rank: RankMemory, memory: StepMemory, strategy: Strategy, totals: Counts) -> None:
    for stage in rank.stages:
        recomputed = memory.moments_of[stage.index].recomputed
        for block in stage.blocks:
            policy = strategy.recompute if block.kind == "layer" and recomputed > 0 else "none"
            recomputed -= block.kind == "layer"
            for collective in block.collectives:
                each = collective.forward + collective.backward + collective.again(policy)
                size = strategy.microbatch * collective.message_bytes
                _add(totals, f"{collective.dimension}_{collective.kind}", memory.microbatches * each, size)


def _shares(rank: RankMemory, job: Job, strategy: Strategy, totals: Counts) -> None:
    """Gradients that are shares of each tensor-parallel rank are summed once, as they are stored."""
    elements = summed_elements(rank.stages, strategy)
    if elements:
        _add(totals, "tp_all_reduce", 1, DTYPE_BYTES[job.param_dtype] * elements)
