"""What a pipeline rank does in a step, and what is in flight meanwhile, whatever its bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.schedule import compute_order

__all__ = ["Occasion", "Occasions", "Progress", "occasions"]

#: Schedules that hold every microbatch of a step at once. The others repeat themselves: after so many rounds of as many
#: microbatches as pipeline ranks no occasion is new (`tests/cost/test_stages.py` looks at all of them).
_ALL_IN_FLIGHT = ("gpipe", "looped-bfs")
_STEADY = 3


class Progress(NamedTuple):
    """How far a stage is in the step: whether a forward has run, its last backward, an input half, and a backward."""

    begun: bool
    ended: bool
    halves: bool
    backwards: bool


class Occasion(NamedTuple):
    """An action of a stage, and how far the rank is in the step.

    Attributes:
        first: no forward of the stage has run; `last`: no backward of it follows.
        progress: of each stage of the rank, before the action.
    """

    kind: str
    stage: int
    first: bool
    last: bool
    progress: tuple[Progress, ...]


#: Every occasion of a pipeline rank with what is in flight besides: of each stage, ascending, the other microbatches
#: between forward and backward, then of each those between the halves of a backward. Each differs from those before it;
#: the numbers say in which order they come.
Occasions = dict[Occasion, dict[tuple[int, ...], int]]


def occasions(name: str, ranks: int, microbatches: int, virtual: int, rank: int) -> Occasions:
    """What a rank does in a step.

    Raises:
        UnsupportedCombination: the schedule is not defined for these numbers.
    """
    few = microbatches
    if ranks == 1:
        few = min(microbatches, 3)  # the third of many microbatches finds what the second did
    elif name not in _ALL_IN_FLIGHT and (virtual == 1 or microbatches % ranks == 0):
        few = min(microbatches, _STEADY * ranks)
    return _walk(name, ranks, few, virtual, rank)


@lru_cache(maxsize=4096)  # a search looks at many strategies of one schedule
def _walk(name: str, ranks: int, microbatches: int, virtual: int, rank: int) -> Occasions:
    order = compute_order(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual, rank=rank)
    stages = sorted({action.stage for action in order})
    place, count = {stage: index for index, stage in enumerate(stages)}, len(stages)
    held, left = [0] * (2 * count), [microbatches] * count
    progress = (Progress(False, False, False, False),) * count
    # One loop without calls, as there are many actions: an occasion is made of its key in the end.
    found: dict[tuple[str, int, bool, bool, tuple[Progress, ...]], dict[tuple[int, ...], int]] = {}
    number = 0
    for kind, stage, *_ in order:
        at = place[stage]
        begun, ended, halves, backwards = now = progress[at]
        if kind == "backward-weight":
            held[count + at] -= 1
        elif kind != "forward":
            held[at] -= 1
        lines = found.setdefault((kind, stage, not begun, left[at] == 1, progress), {})
        if lines.setdefault(tuple(held), number) == number:
            number += 1
        if kind == "forward":
            held[at] += 1
            after = now if begun else now._replace(begun=True)
        elif kind == "backward-input":
            held[count + at] += 1
            after = now if halves else now._replace(halves=True)
        else:
            left[at] -= 1
            after = now if backwards and left[at] else now._replace(backwards=True, ended=ended or not left[at])
        if after is not now:
            progress = (*progress[:at], after, *progress[at + 1 :])
    return {Occasion(*key): lines for key, lines in found.items()}
