"""Balance: how many layers each pipeline stage holds, so that the slowest is as fast as can be."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate

__all__ = ["balanced_layers", "balanced_ranks"]

_HALVINGS = 100
_TIE = 1 + 1e-12
#: What is better is better by more than this.
_STEP = 1 + 1e-9


def balanced_layers(layers: Sequence[float], beside: Sequence[float], paces: Sequence[float] = ()) -> tuple[int, ...]:
    """Layers per stage that minimise the time of the slowest stage; each stage has one at least.

    Among equals the stages are as even as can be, and the later ones hold more: the earlier ones hold the activations
    of more microbatches.

    Args:
        layers: what each layer takes; at least as many as stages.
        beside: what each stage takes besides (embedding, head, loss).
        paces: how fast the device of each stage is, relative to one another; equal without.
    """
    pace = list(paces) or [1.0] * len(beside)
    if len(set(layers)) == 1:
        return _dealt(len(layers), layers[0], beside, pace)
    if len(set(pace)) > 1 or any(beside[1:-1]):
        return _searched(layers, beside, pace)  # filling up could leave a stage with a layer that is too large for it
    sums = list(accumulate(layers, initial=0.0))
    whole = sums[-1] + sum(beside)
    low, high = whole / sum(pace), whole / min(pace)
    best = (len(layers) - len(beside) + 1, *[1] * (len(beside) - 1))
    middle = low + max(layers) / min(pace)  # most often the slowest is about a layer above the mean
    for _ in range(_HALVINGS):
        found = _filled(sums, beside, pace, middle)
        if found is None:
            low = middle
            found = _filled(sums, beside, pace, high / _STEP)
            if found is None:
                break  # nothing is better than the slowest of the best
        best, high = found, _slowest(found, sums, beside, pace)
        middle = (low + high) / 2
    limit = _slowest(best, sums, beside, pace) * _TIE
    evened = _evened(best, sums, beside, pace, limit)
    return evened if _slowest(evened, sums, beside, pace) <= limit else best


def _dealt(count: int, layer: float, beside: Sequence[float], pace: Sequence[float]) -> tuple[int, ...]:
    """Equal layers, each given to the stage that is then the fastest: the later one of equals."""
    mean = (count * layer + sum(beside)) / sum(pace)
    sizes = [max(1, int((mean * speed - more) / layer)) for more, speed in zip(beside, pace, strict=True)]
    left = count - sum(sizes)
    while left < 0:  # some stages have their one layer though they are too slow for it
        held = [(more + size * layer) / speed for more, size, speed in zip(beside, sizes, pace, strict=True)]
        sizes[max((s for s in range(len(sizes)) if sizes[s] > 1), key=lambda s: (held[s], -s))] -= 1
        left += 1
    if left:
        each = zip(beside, sizes, pace, strict=True)
        open_ = [((more + (size + 1) * layer) / speed, -stage) for stage, (more, size, speed) in enumerate(each)]
        heapify(open_)
        for _ in range(left):
            seconds, stage = open_[0]
            sizes[-stage] += 1
            heapreplace(open_, (seconds + layer / pace[-stage], stage))
    return tuple(sizes)


def _searched(layers: Sequence[float], beside: Sequence[float], pace: Sequence[float]) -> tuple[int, ...]:
    """The best cut by dynamic programming: the first n layers on the first s stages, for all n and s."""
    sums = list(accumulate(layers, initial=0.0))
    best = [0.0, *[math.inf] * len(layers)]
    ways: list[list[int]] = []
    for stage, more in enumerate(beside):
        line, way = [math.inf] * (len(layers) + 1), [0] * (len(layers) + 1)
        for count in range(stage + 1, len(layers) + 1):
            for start in range(stage, count):
                slowest = max(best[start], (more + sums[count] - sums[start]) / pace[stage])
                if slowest < line[count]:
                    line[count], way[count] = slowest, start
        best = line
        ways.append(way)
    sizes, end = [], len(layers)
    for way in reversed(ways):
        sizes.append(end - way[end])
        end = way[end]
    return tuple(reversed(sizes))


def balanced_ranks(
    layers: Sequence[float], beside: Sequence[float], stage_ranks: Sequence[int], paces: Sequence[float] = ()
) -> tuple[int, ...]:
    """Layers per stage where ranks hold several stages: the slowest rank is as fast as can be, with layers of their
    mean time, and each rank's layers are spread evenly over its stages."""
    ranks = max(stage_ranks) + 1
    held: list[list[int]] = [[stage for stage, rank in enumerate(stage_ranks) if rank == r] for r in range(ranks)]
    mean = sum(layers) / len(layers)
    each = len(held[0])
    # A stage needs a layer: what is shared out are the layers beyond one for every stage.
    more = len(layers) - each * ranks
    of_rank = [sum(beside[stage] for stage in stages) + mean * (each - 1) for stages in held]
    pace = [paces[stages[0]] for stages in held] if paces else []
    counts = balanced_layers([mean] * (more + ranks), of_rank, pace)
    sizes = [0] * len(stage_ranks)
    for stages, count in zip(held, counts, strict=True):
        base, over = divmod(count + each - 1, each)
        # What is over goes to stages with nothing beside their layers, and to earlier ones.
        order = sorted(stages, key=lambda stage: (beside[stage], stage))
        for place, stage in enumerate(order):
            sizes[stage] = base + (place < over)
    return tuple(sizes)


def _filled(
    sums: Sequence[float], beside: Sequence[float], pace: Sequence[float], limit: float
) -> tuple[int, ...] | None:
    """Fill stages from the last to the first up to a limit of time; None where layers are left over, or one alone is
    too much.

    Args:
        sums: what the first layers take, by their number from 0 on.
    """
    left, counts = len(sums) - 1, [0] * len(beside)
    for stage in range(len(beside) - 1, -1, -1):
        room = limit * _TIE * pace[stage] - beside[stage]
        start = bisect_left(sums, sums[left] - room, stage, left)  # every stage before needs a layer
        if start == left:
            return None
        counts[stage], left = left - start, start
    return None if left else tuple(counts)


def _evened(
    counts: Sequence[int], sums: Sequence[float], beside: Sequence[float], pace: Sequence[float], limit: float
) -> tuple[int, ...]:
    """As many layers on each stage as on the others, as far as the limit lets it, with layers of their mean time."""
    layers, stages = len(sums) - 1, len(counts)
    mean = sums[-1] / layers
    most = [max(1, int((limit * speed - more) / mean)) for more, speed in zip(beside, pace, strict=True)]
    all_have = min(*most, layers // stages)
    left, sizes = layers - all_have * stages, [all_have] * stages
    while left:
        open_ = [stage for stage in range(len(sizes)) if sizes[stage] < most[stage]]
        if not open_:
            return tuple(counts)
        lowest = min(sizes[stage] for stage in open_)
        for stage in sorted((s for s in open_ if sizes[s] == lowest), reverse=True)[:left]:
            sizes[stage] += 1
            left -= 1
    return tuple(sizes)


def _slowest(counts: Sequence[int], sums: Sequence[float], beside: Sequence[float], pace: Sequence[float]) -> float:
    most, start = 0.0, 0
    for count, more, speed in zip(counts, beside, pace, strict=True):
        stop = start + count
        most, start = max(most, (more + sums[stop] - sums[start]) / speed), stop
    return most
