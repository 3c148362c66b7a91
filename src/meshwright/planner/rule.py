"""The rule of choice: fixed, stated in every plan, the same for everyone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.cost import recomputed_blocks
from meshwright.spec import Cost, Job, ModelSpec, Strategy
from meshwright.spec.units import show_bytes

__all__ = ["POLICIES", "RULE", "Candidate", "rank", "why_second"]

RULE = (
    "Use as many ranks as the devices and the global batch allow. Among the strategies that fit into memory take the "
    "one with the fewest collectives a step, then the fewest bytes in them, then the least recomputation, then the "
    "fewest microbatches, then the least memory."
)

#: Recompute policies, the least recomputation first.
POLICIES = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """A strategy with its price, and what the rule compares."""

    strategy: Strategy
    cost: Cost
    microbatches: int
    recomputed_flops: int
    key: tuple[int, ...] = field(repr=False)


def rank(model: ModelSpec, job: Job, strategy: Strategy, cost: Cost) -> Candidate:
    """A candidate; of two with equally many ranks the one with the smaller `key` is better, and no two are equal.

    Recomputation is compared by the flops that full recompute does again; selective recompute repeats no matrix product
    and comes between none and any full one.
    """
    again = model.layers[: recomputed_blocks(model, strategy)]
    flops = sum(block.forward_flops for block in again) * strategy.microbatch if strategy.recompute == "full" else 0
    microbatches = strategy.microbatches(job.global_batch)
    key = (
        sum(cost.collectives.values()),
        sum(cost.collective_bytes.values()),
        flops * microbatches,
        POLICIES.index(strategy.recompute),
        len(again),
        microbatches,
        cost.peak_bytes,
        strategy.zero,
        -strategy.shard,
    )
    return Candidate(strategy, cost, microbatches, flops * microbatches, key)


def why_second(best: Candidate, other: Candidate) -> str:
    """What a candidate that fits loses by against the best: the first criterion of the rule that tells them apart."""
    criteria: list[tuple[Callable[[Candidate], int], Callable[[], str]]] = [
        (_collectives, lambda: f"{_collectives(other)} collectives a step instead of {_collectives(best)}"),
        (_volume, lambda: f"{show_bytes(_volume(other))} in collectives instead of {show_bytes(_volume(best))}"),
        (lambda c: c.recomputed_flops, lambda: f"recomputes {_share(other)} where the best recomputes {_share(best)}"),
        (
            lambda c: POLICIES.index(c.strategy.recompute),
            lambda: f"recomputes ({other.strategy.recompute}) without need",
        ),
        (lambda c: c.microbatches, lambda: f"{other.microbatches} microbatches instead of {best.microbatches}"),
        (
            lambda c: c.cost.peak_bytes,
            lambda: f"needs {show_bytes(other.cost.peak_bytes - best.cost.peak_bytes)} more memory",
        ),
    ]
    for measure, text in criteria:
        if measure(best) != measure(other):
            return text()
    return "costs the same; the lower ZeRO stage and the larger shard group come first"


def _collectives(candidate: Candidate) -> int:
    return sum(candidate.cost.collectives.values())


def _volume(candidate: Candidate) -> int:
    return sum(candidate.cost.collective_bytes.values())


def _share(candidate: Candidate) -> str:
    strategy = candidate.strategy
    if strategy.recompute == "none":
        return "nothing"
    count = strategy.recompute_blocks
    return f"{count or 'all'} block{'' if count == 1 else 's'} ({strategy.recompute})"
