"""The price of a strategy: memory and communication of one rank."""

from __future__ import annotations

from meshwright.cost.communication import count_collectives
from meshwright.cost.memory import StepMemory
from meshwright.spec import Cost, Job, ModelSpec, Strategy

__all__ = ["price"]


def price(model: ModelSpec, job: Job, strategy: Strategy) -> Cost:
    """What a strategy costs one rank: bytes at rest and at the largest moment of a step, and a step's collectives.

    Args:
        model: described for the job's sequence length and compute dtype.
        job: global batch, dtypes, optimizer.
        strategy: a legal strategy without model parallelism; whether it is executable does not matter.

    Raises:
        ConfigError: the global batch does not divide into the strategy's microbatches.
    """
    memory = StepMemory(model, job, strategy)
    worst = memory.worst
    counts, volume = count_collectives(model, job, strategy, memory)
    return Cost(
        at_rest=worst.at_rest,
        in_step=worst.in_step,
        divided=worst.divided,
        padding_bytes=worst.padding,
        peak_bytes=worst.peak_bytes,
        phase=worst.peak.phase,
        collectives=counts,
        collective_bytes=volume,
    )
