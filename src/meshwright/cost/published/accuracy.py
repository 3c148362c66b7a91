"""Accuracy over tables: errors, ranking, regret, beside a constant MFU, and with a few rows for calibration."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from meshwright.cost.published.calibrate import calibrate
from meshwright.cost.published.metrics import Errors, Point, Regret, concordance, errors, regret
from meshwright.cost.published.pricing import PricedRow, price_rows
from meshwright.cost.published.rows import PublishedRow, read_rows
from meshwright.errors import ConfigError

__all__ = ["DRAWS", "Accuracy", "Calibrated", "Summary", "accuracy"]

#: How often calibration rows are drawn; figures are the median over these draws.
DRAWS = 20
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Figures of the rows that calibration left to check: medians over draws. `regret` is of the mean over groups.

    `uncalibrated` counts rows of stacks with too few rows to calibrate on and check, which are not in the figures.
    """

    rows: float
    median_absolute: float
    mean_absolute: float
    median_signed: float
    concordance: float | None
    uncalibrated: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of a set of rows. `skipped` counts reasons; rows that publish no such figure are in neither number."""

    priced: int
    skipped: dict[str, int]
    errors: Errors | None
    pairs: int = 0
    concordance: float | None = None
    regret: Regret | None = None
    baseline: Errors | None = None
    baseline_concordance: float | None = None
    calibrated: Calibrated | None = None

    @property
    def rows_skipped(self) -> int:
        """Rows that publish a figure and were not priced."""
        return sum(self.skipped.values())


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """All rows of the tables, and figures of any part of them. `refused` are files that hold no training runs."""

    rows: tuple[PricedRow, ...]
    calibrate_on: int = 0
    refused: dict[str, str] = field(default_factory=dict)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the tables, in order."""
        return tuple(dict.fromkeys(row.row.file for row in self.rows))

    def part(
        self,
        *,
        file: str | None = None,
        stack: Hashable = None,
        mixture: bool | None = False,
        excluded: bool = False,
        fitted: bool | None = None,
    ) -> tuple[PricedRow, ...]:
        """Some of the rows; None of a condition means both."""
        return tuple(
            row
            for row in self.rows
            if (file is None or row.row.file == file)
            and (stack is None or row.stack == stack)
            and (mixture is None or row.mixture == mixture)
            and bool(row.excluded) == excluded
            and (fitted is None or row.fitted == fitted)
        )

    def time(self, rows: Sequence[PricedRow]) -> Summary:
        """Figures of the step times of some rows."""
        priced = [row for row in rows if row.time is not None]
        points = [row.time_point() for row in priced]
        plain = [row.time_point(row.time.baseline_s) for row in priced if row.time is not None]
        ranked, baseline_ranked = concordance(points), concordance(plain)
        return Summary(
            priced=len(priced),
            skipped=dict(Counter(row.no_time for row in rows if row.has_time and row.time is None)),
            errors=errors(points),
            pairs=ranked[0] if ranked else 0,
            concordance=ranked[1] if ranked else None,
            regret=regret(points),
            baseline=errors(plain),
            baseline_concordance=baseline_ranked[1] if baseline_ranked else None,
            calibrated=self._calibrated_summary(priced) if self.calibrate_on else None,
        )

    def memory(self, rows: Sequence[PricedRow]) -> Summary:
        """Figures of the peaks of some rows."""
        points = [row.memory_point() for row in rows if row.memory is not None]
        ranked = concordance(points)
        return Summary(
            priced=len(points),
            skipped=dict(Counter(row.no_memory for row in rows if row.has_memory and row.memory is None)),
            errors=errors(points),
            pairs=ranked[0] if ranked else 0,
            concordance=ranked[1] if ranked else None,
        )

    @cached_property
    def calibrated_s(self) -> dict[int, float]:
        """By the row's place in `rows`: the median of its calibrated predictions over the draws that left it out."""
        found: dict[int, list[float]] = {}
        for draw in self._draws:
            for place, seconds in draw.items():
                found.setdefault(place, []).append(seconds)
        return {place: statistics.median(seconds) for place, seconds in found.items()}

    @cached_property
    def _draws(self) -> tuple[dict[int, float], ...]:
        """For each draw, the calibrated prediction of every row that was not drawn, by its place in `rows`."""
        stacks: dict[Hashable, list[int]] = {}
        for place, row in enumerate(self.rows):
            if row.time is not None and not row.excluded:
                stacks.setdefault(row.stack, []).append(place)
        return tuple(
            {place: seconds for places in stacks.values() for place, seconds in self._left_out(places, draw)}
            for draw in range(DRAWS)
        )

    def _left_out(self, places: list[int], draw: int) -> Iterable[tuple[int, float]]:
        if len(places) <= self.calibrate_on:
            return
        first = self.rows[places[0]]
        drawn = random.Random(f"{first.stack} {draw}").sample(places, self.calibrate_on)
        times = {place: self.rows[place].time for place in places}
        factors = calibrate([(time.terms, time.published_s) for place in drawn if (time := times[place]) is not None])
        for place in places:
            time = times[place]
            if place not in drawn and time is not None:
                yield place, factors.seconds(time.terms)

    def _calibrated_summary(self, rows: Sequence[PricedRow]) -> Calibrated | None:
        wanted = {id(row) for row in rows}
        places = [place for place, row in enumerate(self.rows) if id(row) in wanted]
        found: list[tuple[Errors, float | None]] = []
        for draw in self._draws:
            points: list[Point] = [self.rows[place].time_point(draw[place]) for place in places if place in draw]
            figures, ranked = errors(points), concordance(points)
            if figures is not None:
                found.append((figures, ranked[1] if ranked else None))
        if not found:
            return None
        ranks = [rank for _, rank in found if rank is not None]
        return Calibrated(
            rows=statistics.median(figures.count for figures, _ in found),
            median_absolute=statistics.median(figures.median_absolute for figures, _ in found),
            mean_absolute=statistics.median(figures.mean_absolute for figures, _ in found),
            median_signed=statistics.median(figures.median_signed for figures, _ in found),
            concordance=statistics.median(ranks) if ranks else None,
            uncalibrated=sum(place not in self.calibrated_s for place in places),
        )


def accuracy(tables: Sequence[str | Path], *, calibrate_on: int = 0) -> Accuracy:
    """Price every row of tables that can be priced, beside what was published.

    Args:
        tables: CSV files, or folders of them; a folder's files that hold no training runs are passed over.
        calibrate_on: rows of each file and stack that fix its software constants; 0 for none.

    Raises:
        ConfigError: a file cannot be read or holds no training runs, or no row of all can be priced.
    """
    if calibrate_on < 0:
        raise ConfigError(f"calibrate_on={calibrate_on} is negative", fix="give 0 or more rows")
    paths, refused = _paths(tables)
    rows: list[PublishedRow] = []
    for path, given in paths:
        try:
            rows += read_rows(path)
        except ConfigError as error:
            if given:
                raise
            refused[path.name] = error.what.partition(" has ")[2] and f"has {error.what.partition(' has ')[2]}"
    found = Accuracy(rows=price_rows(rows), calibrate_on=calibrate_on, refused=refused)
    if not any(row.time or row.memory for row in found.rows):
        raise _nothing(found, [str(path) for path, _ in paths])
    return found


def _paths(tables: Sequence[str | Path]) -> tuple[list[tuple[Path, bool]], dict[str, str]]:
    """The files, and whether each was named itself."""
    found: list[tuple[Path, bool]] = []
    for table in tables:
        path = Path(table)
        if path.is_dir():
            inside = sorted(path.glob("*.csv"))
            if not inside:
                raise ConfigError(f"{path} holds no CSV file", fix="give a CSV of published measurements")
            found += [(file, False) for file in inside]
        else:
            found.append((path, True))
    if not found:
        raise ConfigError("no table is given", fix="give a CSV of published measurements, or a folder of them")
    return found, {}


def _nothing(found: Accuracy, names: list[str]) -> ConfigError:
    silent = "neither a step time nor a peak is published"
    reasons = Counter(row.no_time or row.no_memory or silent for row in found.rows)
    told = "; ".join(f"{reason} ({count} rows)" for reason, count in reasons.most_common(_SHOWN))
    return ConfigError(
        f"no row of {', '.join(names[:_SHOWN])} can be priced",
        why=told or "there are no rows",
        fix="give rows with model, seq, gpus, gpu_type, and step_time_s, tokens_per_s_per_gpu or peak_mem_gb",
    )
