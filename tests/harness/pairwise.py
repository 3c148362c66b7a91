"""A short list of combinations in which every pair of levels of any two factors occurs together.

Faults of a strategy usually need two things at once (hybrid groups with accumulation, ties with ZeRO-3). The greedy
algorithm here is small and deterministic, and leaves out pairs that no allowed combination has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

__all__ = ["feasible_pairs", "pairs_of", "pairwise"]

Row = dict[str, Any]
Factors = Mapping[str, Sequence[Any]]
#: Whether a combination, or a part of one, is allowed: it must say no only to what no completion can repair.
Allowed = Callable[[Row], bool]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Row) -> set[Pair]:
    """The pairs of levels in one row, each with its factors in the order of their names."""
    return set(combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def feasible_pairs(factors: Factors, allowed: Allowed) -> set[Pair]:
    """Every pair of levels that some allowed combination has."""
    found = set()
    for first, second in combinations(sorted(factors), 2):
        for a in factors[first]:
            for b in factors[second]:
                if _complete({first: a, second: b}, factors, allowed, lambda _: 0) is not None:
                    found.add(((first, a), (second, b)))
    return found


def pairwise(factors: Factors, allowed: Allowed) -> list[Row]:
    """Rows that together have every feasible pair; where nothing else decides, the earlier of two levels is taken."""
    uncovered = feasible_pairs(factors, allowed)
    order = {pair: number for number, pair in enumerate(sorted(uncovered, key=repr))}
    rows = []
    while uncovered:
        (first, a), (second, b) = min(uncovered, key=order.__getitem__)
        row = _complete(
            {first: a, second: b}, factors, allowed, lambda part, left=uncovered: len(pairs_of(part) & left)
        )
        assert row is not None
        uncovered = uncovered - pairs_of(row)
        rows.append({name: row[name] for name in factors})
    return rows


def _complete(part: Row, factors: Factors, allowed: Allowed, gain: Callable[[Row], int]) -> Row | None:
    """The part with a level for every factor, each chosen for the largest gain; None where nothing is allowed."""
    if not allowed(part):
        return None
    name = next((name for name in factors if name not in part), None)
    if name is None:
        return part
    wider = [part | {name: level} for level in factors[name]]
    for candidate in sorted(wider, key=gain, reverse=True):
        row = _complete(candidate, factors, allowed, gain)
        if row is not None:
            return row
    return None
