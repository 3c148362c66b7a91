"""How far predictions are off, and whether they rank runs as they were measured. Pure functions of pairs of numbers."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

__all__ = ["Errors", "Point", "Regret", "concordance", "errors", "regret"]

#: Two published values that differ by less than this are not ranked: repeats of one run differ by 1 to 3 percent.
_APART = 0.05


@dataclass(frozen=True, kw_only=True)
class Point:
    """A predicted and a published value, less being better.

    `alike` is what two points must share to be ranked against each other (model and cluster), `group` what a choice
    between strategies leaves fixed, and `choice` the strategy. Values of different batches must be per token.
    """

    predicted: float
    published: float
    alike: Hashable = None
    group: Hashable = None
    choice: Hashable = None

    @property
    def error(self) -> float:
        """(predicted - published) / published."""
        return self.predicted / self.published - 1


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Of `count` points: median and mean of the absolute relative errors, and of the signed ones."""

    count: int
    median_absolute: float
    mean_absolute: float
    median_signed: float
    mean_signed: float


@dataclass(frozen=True, kw_only=True)
class Regret:
    """Over `groups` groups of several strategies: how much slower than the best measured the predicted best was."""

    groups: int
    median: float
    mean: float
    largest: float


def errors(points: Iterable[Point]) -> Errors | None:
    """The errors of points, None of none."""
    signed = [point.error for point in points]
    if not signed:
        return None
    absolute = [abs(error) for error in signed]
    return Errors(
        count=len(signed),
        median_absolute=statistics.median(absolute),
        mean_absolute=statistics.fmean(absolute),
        median_signed=statistics.median(signed),
        mean_signed=statistics.fmean(signed),
    )


def concordance(points: Sequence[Point]) -> tuple[int, float] | None:
    """How many pairs of alike points differ by more than 5% as published, and the share predicted in the same order.

    A pair whose predictions are equal counts as half. None where no pair does.
    """
    pairs, right = 0, 0.0
    for same in _grouped(points, "alike"):
        for one, other in combinations(same, 2):
            low, high = sorted((one, other), key=lambda point: point.published)
            if high.published <= low.published * (1 + _APART):
                continue
            pairs += 1
            right += 1.0 if low.predicted < high.predicted else 0.5 if low.predicted == high.predicted else 0.0
    return (pairs, right / pairs) if pairs else None


def regret(points: Sequence[Point]) -> Regret | None:
    """What choosing by prediction costs: published value of the choice predicted best, over the best published, - 1.

    A strategy that was measured several times counts with the median of its values. None where no group has several.
    """
    lost = []
    for same in _grouped(points, "group"):
        choices = _grouped(same, "choice")
        if len(choices) < 2:
            continue
        tried = [
            (statistics.median(p.predicted for p in tries), statistics.median(p.published for p in tries))
            for tries in choices
        ]
        best = min(published for _, published in tried)
        lost.append(min(tried)[1] / best - 1)
    if not lost:
        return None
    return Regret(groups=len(lost), median=statistics.median(lost), mean=statistics.fmean(lost), largest=max(lost))


def _grouped(points: Iterable[Point], name: str) -> list[list[Point]]:
    found: dict[Hashable, list[Point]] = {}
    for point in points:
        key = getattr(point, name)
        if key is not None:
            found.setdefault(key, []).append(point)
    return list(found.values())
