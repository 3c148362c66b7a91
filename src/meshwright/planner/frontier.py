"""Frontier: what a search has still to do, in the order in which it soon finds something good."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Entry", "Frontier"]

#: A bound usually lies below the price by so much for each step that is still to be done.
_BELOW = 0.03

Value = tuple[float, ...]
Step = Callable[..., None]
#: What a step can lead to at best, the step, and its arguments.
Entry = tuple[Value, Step, tuple[Any, ...]]


class Frontier:
    """Steps with the least objective that each can lead to.

    What is nearer to a price comes first, unless something else may be better by more than a bound usually lies below
    the price: so there is soon something to beat. Nothing is lost by the order: whoever takes all steps whose least is
    not beaten has seen the best.

    Args:
        left: steps of each kind, by the name of its function, that are left until a price is known.
    """

    def __init__(self, left: dict[str, float]) -> None:
        self._left, self._below, self._number = left, _BELOW, 0
        self._heap: list[tuple[Value, Value, int, Step, tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, value: Value, step: Step, arguments: tuple[Any, ...]) -> None:
        """Add a step that can lead to `value` at best."""
        self._number += 1
        heapq.heappush(self._heap, (self._order(value, step), value, self._number, step, arguments))

    def pop(self) -> Entry:
        """The step to be done next, and what it can lead to at best."""
        _, value, _, step, arguments = heapq.heappop(self._heap)
        return value, step, arguments

    def hurry(self) -> None:
        """Where bounds turn out to lie lower than usual, take what is near to a price still earlier."""
        self._below *= 1.5
        self._heap = [(self._order(value, step), value, at, step, what) for _, value, at, step, what in self._heap]
        heapq.heapify(self._heap)

    def rest(self) -> list[Entry]:
        """All that is left, which is forgotten here."""
        left = [(value, step, arguments) for _, value, _, step, arguments in self._heap]
        self._heap, self._below = [], _BELOW
        return left

    def _order(self, value: Value, step: Step) -> Value:
        return (*value[:-1], value[-1] * (1 + self._below * self._left[step.__name__]))
