"""Compute orders: which microbatch a rank runs when, for every schedule but the V-shaped ones.

Each function returns the compute actions of one rank. Stages are dealt out in turn (`looped`): stage s lies on rank s
modulo the number of ranks.
"""

from __future__ import annotations

from itertools import chain

from meshwright.errors import UnsupportedCombination
from meshwright.schedule.action import Action, Kind, new_action

__all__ = [
    "Order",
    "Orders",
    "gpipe",
    "interleaved",
    "interleaved_zero_bubble",
    "looped_bfs",
    "one_forward_one_backward",
]

Order = list[Action]
#: One a rank.
Orders = list[Order]


def gpipe(ranks: int, microbatches: int, rank: int) -> Order:
    """All forwards, then all backwards. Huang et al., GPipe, arXiv 1811.06965."""
    return [*_run("forward", rank, range(microbatches)), *_run("backward", rank, range(microbatches))]


def one_forward_one_backward(ranks: int, microbatches: int, rank: int) -> Order:
    """Rank r runs p - 1 - r forwards ahead, then one forward and one backward in turn.

    Narayanan et al., PipeDream-Flush, arXiv 2006.09503.
    """
    ahead = min(microbatches, ranks - 1 - rank)
    forward, backward = _run("forward", rank, range(microbatches)), _run("backward", rank, range(microbatches))
    pairs = zip(forward[ahead:], backward, strict=False)
    return [*forward[:ahead], *chain.from_iterable(pairs), *backward[microbatches - ahead :]]


def looped_bfs(ranks: int, microbatches: int, virtual_stages: int, rank: int) -> Order:
    """Every microbatch through one stage before the next stage of the rank; backwards in the opposite order.

    Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953.
    """
    stages, actions = range(rank, ranks * virtual_stages, ranks), Order()
    for stage in stages:
        actions += _run("forward", stage, range(microbatches))
    for stage in reversed(stages):
        actions += _run("backward", stage, range(microbatches - 1, -1, -1))
    return actions


def _run(kind: Kind, stage: int, microbatches: range) -> Order:
    return [new_action((kind, stage, k, None, None, None)) for k in microbatches]


def _per_round(name: str, simple: str, ranks: int, microbatches: int) -> int:
    """Microbatches that run through one stage of a rank before the next stage has its turn.

    There are as many rounds as whole groups of `ranks` microbatches, at least one, and all are equally long. `simple`
    is the schedule to use instead.
    """

    def rounds(m: int) -> int:
        return max(1, m // ranks)

    if microbatches % rounds(microbatches):
        below = next(m for m in range(microbatches, 0, -1) if m % rounds(m) == 0)
        above = next(m for m in range(microbatches, 2 * microbatches + ranks) if m % rounds(m) == 0)
        raise UnsupportedCombination(
            f"schedule {name} with {microbatches} microbatches on {ranks} ranks",
            why=f"microbatches go through the stages of a rank in rounds of at least {ranks}, and "
            f"{microbatches} microbatches do not split into {rounds(microbatches)} equal rounds",
            fix=f"use {below} or {above} microbatches, or schedule {simple}, which takes any number",
        )
    return microbatches // rounds(microbatches)


def _interleaved(kind: Kind, ranks: int, rank: int, virtual_stages: int, microbatches: int, per_round: int) -> Order:
    """A rank's forwards, or its backwards of one kind: stage and microbatch of each, round by round."""
    found, chunks = Order(), range(virtual_stages)
    for start in range(0, microbatches, per_round):
        for chunk in chunks if kind == "forward" else reversed(chunks):
            found += _run(kind, chunk * ranks + rank, range(start, start + per_round))
    return found


def interleaved(ranks: int, microbatches: int, virtual_stages: int, rank: int) -> Order:
    """One forward and one backward in turn over several stages a rank.

    Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2, with the warm-up of Megatron-LM; the rounds may be
    longer than `ranks` microbatches, as in PyTorch's `ScheduleInterleaved1F1B`.

    Raises:
        UnsupportedCombination: the microbatches do not split into equal rounds; the text names the nearest that do.
    """
    per_round = _per_round("interleaved-1f1b", "1f1b", ranks, microbatches)
    shape = ranks, rank, virtual_stages, microbatches, per_round
    forward, backward = _interleaved("forward", *shape), _interleaved("backward", *shape)
    ahead = min(len(forward), (virtual_stages - 1) * per_round + 2 * (ranks - 1 - rank))
    pairs = zip(forward[ahead:], backward, strict=False)
    return [*forward[:ahead], *chain.from_iterable(pairs), *backward[len(forward) - ahead :]]


def interleaved_zero_bubble(ranks: int, microbatches: int, virtual_stages: int, rank: int) -> Order:
    """One forward and one backward in turn with the backward split: rank r runs its weight half r steps later.

    With one stage a rank this is ZB-H1, which is defined for any number of microbatches. Qi et al., Zero Bubble
    Pipeline Parallelism, arXiv 2401.10241, section 2; interleaved as PyTorch's `ScheduleInterleavedZeroBubble`.

    Raises:
        UnsupportedCombination: the microbatches do not split into equal rounds; the text names the nearest that do.
    """
    per_round = _per_round("interleaved-zb", "zb-h1", ranks, microbatches) if virtual_stages > 1 else microbatches
    shape = ranks, rank, virtual_stages, microbatches, per_round
    forward, backward = _interleaved("forward", *shape), _interleaved("backward-input", *shape)
    weights = _interleaved("backward-weight", *shape)
    total = len(forward)
    ahead = min(total, (virtual_stages - 1) * per_round + ranks - 1 - rank)
    actions = forward[:ahead]
    for step in range(total):
        actions += forward[ahead + step : ahead + step + 1]
        actions.append(backward[step])
        if step >= rank:
            actions.append(weights[step - rank])
    return actions + weights[max(0, total - rank) :]
