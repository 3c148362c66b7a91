"""The price of a strategy: memory, communication and time of a step."""

from __future__ import annotations

from meshwright.cost.communication import count_collectives
from meshwright.cost.estimate import Estimate, estimate_of
from meshwright.cost.memory import StepMemory
from meshwright.cost.time import StepTime, step_time
from meshwright.spec import Cluster, Cost, Job, ModelSpec, Strategy
from meshwright.spec.conventions import on_accelerator

__all__ = ["price"]


def price(
    model: ModelSpec,
    cluster: Cluster,
    job: Job,
    strategy: Strategy,
    *,
    time: StepTime | None = None,
    memory: StepMemory | None = None,
    found: Estimate | None = None,
) -> Cost:
    """What a strategy costs: bytes at rest and at the largest moment of a step of the rank that needs most, a step's
    collectives, and its seconds by term.

    Args:
        model: described for the layout of the strategy.
        cluster: where it runs; whether it fits there does not matter.
        job: global batch, dtypes, optimizer.
        strategy: a legal strategy; whether it is executable does not matter.
        time, memory, found: its time, its memory and the estimate of it, where they are known already.

    Raises:
        ConfigError: the global batch does not divide into the strategy's microbatches, the stages do not fit the model,
            or it needs more ranks than there are devices.
        UnsupportedCombination: its schedule is not defined for these numbers of stages and microbatches.
    """
    convention = None if cluster.device_kind == "cpu" else on_accelerator(None)
    memory = memory or StepMemory(model, job, strategy, convention)
    found = found or estimate_of(memory, model, cluster, job, strategy, convention)
    worst, rank = found.worst, memory.ranks[found.worst.rank]
    counts, volume = count_collectives(model, job, strategy, memory)
    time = time or step_time(model, cluster, job, strategy)
    return Cost(
        at_rest=worst.at_rest,
        in_step=worst.in_step,
        divided=rank.divided,
        padding_bytes=rank.padding,
        peak_bytes=rank.peak_bytes,
        phase=worst.phase,
        collectives=counts,
        collective_bytes=volume,
        overhead=worst.overhead,
        total_bytes=worst.total_bytes,
        host_bytes=found.host_needed_bytes,
        disk_bytes=found.disk_needed_bytes,
        step_s=time.step_s,
        terms=time.terms,
        model_flops=time.model_flops,
    )
