"""Amounts: how much a strategy has to recompute to fit, as bounds on memory say."""

from __future__ import annotations

import math

from meshwright.cost.floors import Floors
from meshwright.cost.pricer import Pricer
from meshwright.planner.nearest import Nearest
from meshwright.planner.space import Recompute, Space
from meshwright.spec import Strategy

__all__ = ["Amounts"]


class Amounts:
    """The least recomputation of strategies of one space; `short` remembers what does not fit with any."""

    def __init__(self, pricer: Pricer, space: Space, floors: Floors, short: Nearest) -> None:
        self._pricer, self._space, self._floors, self._short = pricer, space, floors, short

    def lean_s(self, lean: Strategy) -> float:
        """Seconds that nothing on the mesh of its leanest strategy lies below; infinite where nothing fits."""
        first, *others = self._space.recomputes
        least = self._floors.lean_mesh_s(lean, first.policy, first.blocks)
        if least < math.inf and first.policy == "none":
            return least
        return min([least, *(self._floors.lean_mesh_s(lean, entry.policy, entry.blocks) for entry in others)])

    def needed(self, way: Strategy) -> tuple[float, tuple[int, ...]]:
        """Seconds that nothing on a mesh with a way to shard lies below, infinite where nothing fits; and of every
        policy the place in its numbers of blocks of the fewest that may be enough, -1 where none is."""
        first, *others = self._space.recomputes
        floors = [self._floors.zero_mesh_s(way, first.policy, first.blocks)]
        if floors[0][0] < math.inf and first.policy == "none":  # then the others need not recompute either
            return floors[0][0], (0,) * (1 + len(others))
        floors += [self._floors.zero_mesh_s(way, entry.policy, entry.blocks) for entry in others]
        least = floors[0][0] if floors[0][0] < math.inf else min(floors)[0]
        return least, tuple(place if floor < math.inf else -1 for floor, place in floors)

    def least_s(self, strategy: Strategy, places: tuple[int, ...]) -> float:
        """Seconds that a strategy does not lie below with so much recomputation by the first policy that may be enough.

        Args:
            places: of each policy, the place in its numbers of blocks; -1 where none is enough.
        """
        least = math.inf
        for entry, place in zip(self._space.recomputes, places, strict=True):
            if place >= 0:
                changed = self._space.recomputing(strategy, entry, entry.blocks[place])
                least = min(least, self._floors.schedule_s(changed))
                if entry is self._space.recomputes[0]:
                    break  # the others take longer
        return least

    def fewest(self, strategy: Strategy, entry: Recompute, low: int, spare: float = 1.0) -> int:
        """The place of the fewest blocks, from `low` on, under which the bound on memory fits; -1 where there is none.

        Args:
            spare: how many times the usable bytes there may be.
        """
        budget = spare * self._pricer.budget_bytes(strategy)

        def needed(place: int) -> int:
            return self._floors.bytes(self._space.recomputing(strategy, entry, entry.blocks[place]))

        high, step = len(entry.blocks) - 1, 1
        if (least := needed(high)) > budget:
            self._short.note(self._space.recomputing(strategy, entry, entry.blocks[high]), least)
            return -1
        while low < high:  # most often near; a cut of layers may lift what more blocks need, so the low ones come first
            middle = min(low + step - 1, (low + high) // 2)
            if needed(middle) <= budget:
                high = middle
            else:
                low, step = middle + 1, 2 * step
        return low

    def more(self, strategy: Strategy, entry: Recompute, short: int) -> int | None:
        """The fewest blocks with which the first and the last pipeline rank fit, more than those of a strategy that is
        short of so many bytes; None: all are too few. Bisection from what the bound on memory says, as memory falls
        with the number of blocks."""

        def at(index: int) -> Strategy:
            return self._space.recomputing(strategy, entry, entry.blocks[index])

        def fits(index: int) -> bool:
            return self._pricer.short_bytes(self._space.settled(at(index)), ends=True) <= 0

        low, high = entry.blocks.index(strategy.recompute_blocks) + 1, len(entry.blocks) - 1
        if low > high:
            return None
        wanted = self._floors.bytes(strategy) - short
        guess = next((index for index in range(low, high) if self._floors.bytes(at(index)) <= wanted), high)
        if not fits(guess):
            low = guess + 1
            if low > high or not fits(high):
                return None
        else:
            high = guess
            if guess > low and not fits(guess - 1):
                low = guess
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return entry.blocks[low]
