"""Software constants from a few measured rows: factors on groups of terms, by ridge-regularised least squares.

The cost model's constants belong to devices, links and kinds of kernels. A stack of its own kernels, a network that is
shared, or a step that does more than training differ from them by factors that a few rows of the same stack tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["GROUPS", "Factors", "calibrate"]

#: Groups of terms that share a factor, and how far it may lie from 1 (standard deviation of its logarithm). The first
#: is of all terms together. Groups later in the list need a row more each.
GROUPS: tuple[tuple[str, tuple[str, ...], float], ...] = (
    ("all", (), 0.35),
    ("memory", ("memory-bound operations", "logits and loss", "optimizer"), 0.35),
    (
        "waiting",
        (
            "tensor parallel",
            "context parallel",
            "expert parallel",
            "pipeline bubble",
            "pipeline messages",
            "parameter gathers",
            "gradient reduction",
            "offload",
            "synchronisation",
        ),
        0.35,
    ),
)
#: Standard deviation of a measurement's logarithm about what the factors can explain.
_NOISE = 0.03
#: Rows that agree need ten steps; those that contradict each other come a hundredth nearer to a compromise by each one.
_ITERATIONS = 3000
_CLOSE = 1e-10


@dataclass(frozen=True, kw_only=True)
class Factors:
    """One positive factor for each group of terms."""

    values: tuple[float, ...]

    def seconds(self, terms: Mapping[str, float]) -> float:
        """A step's seconds by its terms, with these factors."""
        return math.exp(_prediction(_sums(terms), [math.log(value) for value in self.values]))


def calibrate(rows: Sequence[tuple[Mapping[str, float], float]]) -> Factors:
    """The factors that explain rows best.

    Minimises the sum of (log predicted / measured)^2 / 0.03^2 and of (log factor)^2 / width^2.

    Args:
        rows: the terms of a predicted step and its measured seconds. One row sets one factor, two rows two, and so on:
            there is never more freedom than rows.
    """
    free = min(len(rows), len(GROUPS))
    logs = [0.0] * len(GROUPS)
    if not free:
        return Factors(values=(1.0,) * len(GROUPS))
    sums = [_sums(terms) for terms, _ in rows]
    measured = [math.log(seconds) for _, seconds in rows]
    cost = _cost(sums, measured, logs)
    for _ in range(_ITERATIONS):
        step = [*_newton_step(sums, measured, logs, free), *[0.0] * (len(GROUPS) - free)]
        while max(abs(change) for change in step) >= _CLOSE:
            tried = [value + change for value, change in zip(logs, step, strict=True)]
            if _cost(sums, measured, tried) < cost:
                break
            step = [change / 2 for change in step]
        else:
            break
        logs, cost = tried, _cost(sums, measured, tried)
    return Factors(values=tuple(math.exp(value) for value in logs))


def _sums(terms: Mapping[str, float]) -> list[float]:
    """Seconds of each group; those in none of the others are the first's own."""
    named = [sum(terms.get(term, 0.0) for term in members) for _, members, _ in GROUPS[1:]]
    return [max(0.0, sum(terms.values()) - sum(named)), *named]


def _prediction(sums: Sequence[float], logs: Sequence[float]) -> float:
    scaled = sums[0] + sum(part * math.exp(log) for part, log in zip(sums[1:], logs[1:], strict=True))
    return logs[0] + math.log(scaled)


def _cost(sums: Sequence[Sequence[float]], measured: Sequence[float], logs: Sequence[float]) -> float:
    """What is minimised."""
    penalty = sum((log / width) ** 2 for log, (_, _, width) in zip(logs, GROUPS, strict=True))
    misses = (log - _prediction(parts, logs) for parts, log in zip(sums, measured, strict=True))
    return penalty + sum((miss / _NOISE) ** 2 for miss in misses)


def _newton_step(
    sums: Sequence[Sequence[float]], measured: Sequence[float], logs: Sequence[float], free: int
) -> list[float]:
    """One Gauss-Newton step: (J'J / noise^2 + 1 / width^2) d = J'r / noise^2 - t / width^2."""
    matrix = [[0.0] * free for _ in range(free)]
    right = [0.0] * free
    for index in range(free):
        width = GROUPS[index][2]
        matrix[index][index] += width**-2
        right[index] -= logs[index] * width**-2
    for parts, log_seconds in zip(sums, measured, strict=True):
        whole = parts[0] + sum(part * math.exp(log) for part, log in zip(parts[1:], logs[1:], strict=True))
        slopes = [1.0, *(parts[group] * math.exp(logs[group]) / whole for group in range(1, free))]
        residual = log_seconds - _prediction(parts, logs)
        for one in range(free):
            right[one] += slopes[one] * residual / _NOISE**2
            for other in range(free):
                matrix[one][other] += slopes[one] * slopes[other] / _NOISE**2
    return _solve(matrix, right)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination of a small positive definite system."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for below in range(column + 1, size):
            factor = rows[below][column] / rows[column][column]
            rows[below] = [a - factor * b for a, b in zip(rows[below], rows[column], strict=True)]
    found = [0.0] * size
    for index in range(size - 1, -1, -1):
        known = sum(rows[index][other] * found[other] for other in range(index + 1, size))
        found[index] = (rows[index][size] - known) / rows[index][index]
    return found
