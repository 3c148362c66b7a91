"""Predicted beside published: the peak, and whether it fits."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from meshwright.cost.estimate import Estimate
from meshwright.cost.published.rows import PublishedRow, Unpriced
from meshwright.cost.published.setups import Setup
from meshwright.cost.published.sources import setup_of
from meshwright.errors import MeshwrightError

__all__ = ["Comparison", "compare", "median_error", "peak_bytes"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A row that was priced, with the stack's convention (`estimate`).

    Peaks are in bytes as the stack's own figure counts them, of the rank that needs most.
    """

    row: PublishedRow
    setup: Setup
    estimate: Estimate

    @property
    def predicted_bytes(self) -> int:
        """The peak predicted with the stack's convention."""
        return peak_bytes(self.estimate, self.setup)

    @cached_property
    def plain_bytes(self) -> int:
        """The peak predicted without it."""
        return peak_bytes(self.setup.estimate(declared=False), self.setup)

    def error(self, *, declared: bool = True) -> float | None:
        """(predicted - published) / published, None where no peak was published."""
        published = self.row.peak_bytes
        predicted = self.predicted_bytes if declared else self.plain_bytes
        return (predicted - published) / published if published else None

    @property
    def fits(self) -> bool:
        """Whether a plan like this would be called feasible."""
        return self.estimate.fits


def compare(row: PublishedRow) -> Comparison:
    """A row beside its prediction.

    Raises:
        Unpriced: it cannot be priced; the text says why.
    """
    setup = setup_of(row)
    if setup.no_memory:
        raise Unpriced(setup.no_memory)
    try:
        return Comparison(row=row, setup=setup, estimate=setup.estimate())
    except MeshwrightError as error:
        raise Unpriced(error.what) from error


def peak_bytes(found: Estimate, setup: Setup) -> int:
    """What the stack's figure counts of the worst rank: live tensors, what the allocator reserved, or the device."""
    reads, overhead = setup.convention.reads, found.worst.overhead
    counted = sum(found.worst.in_step.values())
    if reads != "allocated":
        counted += overhead["allocator"]
    return counted + (overhead["framework"] + overhead["communicators"] if reads == "device" else 0)


def median_error(comparisons: Iterable[Comparison], *, declared: bool = True) -> float:
    """The median of the absolute errors of the rows with a published peak."""
    errors = [comparison.error(declared=declared) for comparison in comparisons]
    return statistics.median(abs(error) for error in errors if error is not None)
