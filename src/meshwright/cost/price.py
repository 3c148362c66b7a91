"""The price of a strategy: memory and communication of one rank."""

from __future__ import annotations

from meshwright.cost.communication import count_collectives
from meshwright.cost.memory import CATEGORIES, StepMemory
from meshwright.cost.states import shard_group
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
    moment = worst.peak
    at_rest = dict.fromkeys(CATEGORIES, 0) | {"parameters": worst.parameters, "optimizer": worst.optimizer}
    in_step = at_rest | {
        "gradients": moment.gradients,
        "gathered": moment.gathered,
        "activations": moment.activations,
        "logits": moment.logits,
    }
    divided = dict.fromkeys(CATEGORIES, 0)
    if shard_group(strategy) > 1:
        divided |= {"parameters": worst.cut_parameters, "optimizer": worst.optimizer, "gradients": moment.reduced}
    counts, volume = count_collectives(model, job, strategy, memory)
    return Cost(
        at_rest=at_rest,
        in_step=in_step,
        divided=divided,
        padding_bytes=worst.padding,
        peak_bytes=sum(in_step.values()),
        phase=moment.phase,
        collectives=counts,
        collective_bytes=volume,
    )
