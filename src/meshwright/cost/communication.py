"""What a step of a strategy communicates: collectives and bytes, counted in the schedule that the runtime plays."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from meshwright.cost.memory import RankMemory, StepMemory
from meshwright.cost.play import unchecked_schedule
from meshwright.cost.states import shard_group
from meshwright.spec import DTYPE_BYTES, Job, ModelSpec, Strategy

__all__ = ["count_collectives"]

#: The one small all-reduce of a step, in float64: loss sum, weight, squared gradient norm, and a mark per parameter.
_STATISTICS = "statistics"
_STATISTICS_VALUES = 3
_STATISTICS_VALUE_BYTES = 8

#: Rounds of as many microbatches as pipeline ranks after which a schedule repeats itself.
_STEADY = 4

Counts = tuple[Counter[str], Counter[str]]


def count_collectives(
    model: ModelSpec, job: Job, strategy: Strategy, memory: StepMemory
) -> tuple[dict[str, int], dict[str, int]]:
    """Counts and bytes of one step's collectives by kind, on the pipeline rank that needs most memory.

    Bytes are those of the whole, unsharded message, padding included: a gather of a unit moves it in the compute dtype,
    a reduce in the reduce dtype. The all-reduces of hybrid sharding move this rank's share of each unit. Kinds that do
    not occur are left out.

    Returns:
        Two mappings, the counts and the bytes, from `all_gather`, `reduce_scatter`, `all_reduce`, `statistics`; under
        pipelining `send` and `receive`; and those of model parallelism by dimension and kind, such as `tp_all_reduce`.
    """
    rank = memory.worst
    replicated = strategy.dp * strategy.cp  # ranks whose gradients are summed
    played = _played(
        strategy.schedule,
        strategy.pp,
        memory.microbatches,
        strategy.virtual_stages,
        (strategy.zero, 1 + (shard_group(strategy) > 1), 1 + (replicated > 1)),
        (strategy.gather, strategy.reduce),
    )[memory.ranks.index(rank)]
    totals: Counts = Counter(), Counter()
    _zero(played, rank, memory, job, strategy, totals)
    _messages(played, memory, strategy, totals)
    _model_parallel(rank, memory, strategy, totals)
    if strategy.world_size > 1:
        parameters = sum(max(len(block.tensors), 1) for block in model.blocks if block.parameters)
        _add(totals, _STATISTICS, 1, _STATISTICS_VALUE_BYTES * (_STATISTICS_VALUES + parameters))
    counts, volume = totals
    return dict(+counts), dict(+volume)


def _add(totals: Counts, kind: str, count: int, size: int) -> None:
    totals[0][kind] += count
    totals[1][kind] += count * size


def _zero(
    played: Counter[tuple[str, int, int]],
    rank: RankMemory,
    memory: StepMemory,
    job: Job,
    strategy: Strategy,
    totals: Counts,
) -> None:
    compute, reduced = DTYPE_BYTES[job.compute_dtype], DTYPE_BYTES[job.reduce_dtype]
    for stage in rank.stages:
        states = memory.moments_of[stage.index].states
        gathers, reduces = played["gather", stage.index, -1], played["reduce", stage.index, -1]
        for whole, made, share in zip(states.wholes, states.reduced, states.trained, strict=True):
            if whole:
                _add(totals, "all_gather", gathers, compute * whole)
                _add(totals, "reduce_scatter" if states.sharded else "all_reduce", reduces, reduced * made)
            if whole and states.sharded and strategy.replicas > 1:
                _add(totals, "all_reduce", 1, reduced * share)


def _messages(played: Counter[tuple[str, int, int]], memory: StepMemory, strategy: Strategy, totals: Counts) -> None:
    """Activations go to the stage behind, gradients of the same size to the one before."""
    for (kind, stage, other), count in played.items():
        if kind in ("send", "receive"):
            size = strategy.microbatch * memory.stages[min(stage, other)].blocks[-1].output_bytes
            _add(totals, kind, count, size)


def _model_parallel(rank: RankMemory, memory: StepMemory, strategy: Strategy, totals: Counts) -> None:
    for stage in rank.stages:
        for block in stage.blocks:
            for collective in block.collectives:
                times = memory.microbatches * (collective.forward + collective.backward)
                size = strategy.microbatch * collective.message_bytes
                _add(totals, f"{collective.dimension}_{collective.kind}", times, size)


def _played(
    name: str, ranks: int, microbatches: int, virtual: int, zero: tuple[int, int, int], variant: tuple[str, str]
) -> tuple[Counter[tuple[str, int, int]], ...]:
    """Per rank, how often the schedule does each thing: kind, stage, stage at the other end (-1: none).

    Once a schedule is steady, each further round of as many microbatches as ranks adds the same to every count.
    """
    steady = (_STEADY + 1) * ranks + 1
    rounds = max(0, microbatches - steady) // ranks
    few = _counted(name, ranks, microbatches - rounds * ranks, virtual, zero, variant)
    if not rounds:
        return few
    fewer = _counted(name, ranks, microbatches - (rounds + 1) * ranks, virtual, zero, variant)
    return tuple(
        Counter({key: count + rounds * (count - less[key]) for key, count in most.items()})
        for most, less in zip(few, fewer, strict=True)
    )


@lru_cache(maxsize=256)
def _counted(
    name: str, ranks: int, microbatches: int, virtual: int, zero: tuple[int, int, int], variant: tuple[str, str]
) -> tuple[Counter[tuple[str, int, int]], ...]:
    ordered = unchecked_schedule(name, ranks, microbatches, virtual, zero, variant).ranks
    return tuple(
        Counter((a.kind, a.stage, -1 if a.peer_stage is None else a.peer_stage) for a in actions) for actions in ordered
    )
