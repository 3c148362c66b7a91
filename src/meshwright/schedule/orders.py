"""Compute orders: which microbatch each rank runs when, for every schedule but the V-shaped ones.

Each function returns one list of compute actions per rank. Stages are dealt out in turn (`looped`): stage s lies on
rank s modulo the number of ranks.
"""

from __future__ import annotations

from itertools import chain

from meshwright.errors import UnsupportedCombination
from meshwright.schedule.action import Action, new_action

__all__ = ["Orders", "gpipe", "interleaved", "interleaved_zero_bubble", "looped_bfs", "one_forward_one_backward"]

Orders = list[list[Action]]


def gpipe(ranks: int, microbatches: int) -> Orders:
    """All forwards, then all backwards. Huang et al., GPipe, arXiv 1811.06965."""
    return [
        [Action(kind, rank, k) for kind in ("forward", "backward") for k in range(microbatches)]
        for rank in range(ranks)
    ]


def one_forward_one_backward(ranks: int, microbatches: int) -> Orders:
    """Rank r runs p - 1 - r forwards ahead, then one forward and one backward in turn.

    Narayanan et al., PipeDream-Flush, arXiv 2006.09503.
    """
    orders = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - 1 - rank)
        forward = [new_action(("forward", rank, k, None, None, None)) for k in range(microbatches)]
        backward = [new_action(("backward", rank, k, None, None, None)) for k in range(microbatches)]
        pairs = zip(forward[ahead:], backward, strict=False)
        orders.append([*forward[:ahead], *chain.from_iterable(pairs), *backward[microbatches - ahead :]])
    return orders


def looped_bfs(ranks: int, microbatches: int, virtual_stages: int) -> Orders:
    """Every microbatch through one stage before the next stage of the rank; backwards in the opposite order.

    Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953.
    """
    orders = []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual_stages, ranks)
        actions = [Action("forward", stage, k) for stage in stages for k in range(microbatches)]
        actions += [Action("backward", stage, k) for stage in reversed(stages) for k in reversed(range(microbatches))]
        orders.append(actions)
    return orders


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


def _interleave(
    ranks: int, rank: int, virtual_stages: int, per_round: int, step: int, backward: bool
) -> tuple[int, int]:
    """Stage and microbatch of a rank's forward (or backward) number `step`."""
    block, within = divmod(step, per_round)
    turn, chunk = divmod(block, virtual_stages)
    if backward:
        chunk = virtual_stages - 1 - chunk
    return chunk * ranks + rank, turn * per_round + within


def interleaved(ranks: int, microbatches: int, virtual_stages: int) -> Orders:
    """One forward and one backward in turn over several stages a rank.

    Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2, with the warm-up of Megatron-LM; the rounds may be
    longer than `ranks` microbatches, as in PyTorch's `ScheduleInterleaved1F1B`.

    Raises:
        UnsupportedCombination: the microbatches do not split into equal rounds; the text names the nearest that do.
    """
    per_round = _per_round("interleaved-1f1b", "1f1b", ranks, microbatches)
    total = virtual_stages * microbatches
    orders = []
    for rank in range(ranks):
        ahead = min(total, (virtual_stages - 1) * per_round + 2 * (ranks - 1 - rank))
        place = [_interleave(ranks, rank, virtual_stages, per_round, step, False) for step in range(total)]
        actions = [Action("forward", *place[step]) for step in range(ahead)]
        for step in range(total):
            if ahead + step < total:
                actions.append(Action("forward", *place[ahead + step]))
            actions.append(Action("backward", *_interleave(ranks, rank, virtual_stages, per_round, step, True)))
        orders.append(actions)
    return orders


def interleaved_zero_bubble(ranks: int, microbatches: int, virtual_stages: int) -> Orders:
    """One forward and one backward in turn with the backward split: rank r runs its weight half r steps later.

    With one stage a rank this is ZB-H1, which is defined for any number of microbatches. Qi et al., Zero Bubble
    Pipeline Parallelism, arXiv 2401.10241, section 2; interleaved as PyTorch's `ScheduleInterleavedZeroBubble`.

    Raises:
        UnsupportedCombination: the microbatches do not split into equal rounds; the text names the nearest that do.
    """
    per_round = _per_round("interleaved-zb", "zb-h1", ranks, microbatches) if virtual_stages > 1 else microbatches
    total = virtual_stages * microbatches
    orders = []
    for rank in range(ranks):
        ahead = min(total, (virtual_stages - 1) * per_round + ranks - 1 - rank)
        forward = [_interleave(ranks, rank, virtual_stages, per_round, step, False) for step in range(total)]
        backward = [_interleave(ranks, rank, virtual_stages, per_round, step, True) for step in range(total)]
        actions = [Action("forward", *place) for place in forward[:ahead]]
        for step in range(total):
            if ahead + step < total:
                actions.append(Action("forward", *forward[ahead + step]))
            actions.append(Action("backward-input", *backward[step]))
            if step >= rank:
                actions.append(Action("backward-weight", *backward[step - rank]))
        actions += [Action("backward-weight", *place) for place in backward[max(0, total - rank) :]]
        orders.append(actions)
    return orders
