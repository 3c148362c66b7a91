"""Nearest: of what does not fit, what comes nearest."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.errors import ConfigError
from meshwright.planner.rule import Candidate
from meshwright.planner.space import Space
from meshwright.spec import Strategy

__all__ = ["Nearest"]


class Nearest:
    """The strategies that need least of those that do not fit: one for each ZeRO stage and kind of mesh."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, bool, bool], tuple[int, Strategy]] = {}

    def note(self, strategy: Strategy, needed_bytes: int) -> None:
        """A strategy that does not fit, and what it needs at least."""
        kind = (strategy.zero, strategy.tp > 1, strategy.pp > 1)
        if kind not in self._found or needed_bytes < self._found[kind][0]:
            self._found[kind] = needed_bytes, strategy

    def candidates(self, space: Space, make: Callable[[Strategy], Candidate]) -> list[Candidate]:
        """All of them, the nearest first."""
        found = []
        for _, strategy in sorted(self._found.values(), key=lambda entry: (entry[0], str(entry[1]))):
            try:
                found.append(make(space.settled(strategy)))
            except ConfigError:  # no cut of its layers is legal
                continue
        return found
