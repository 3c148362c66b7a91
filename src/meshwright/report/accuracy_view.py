"""Accuracy on the screen: every row predicted beside published, then figures of time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.cost.published import Accuracy, PricedRow, Summary
from meshwright.report.style import numbers

__all__ = ["accuracy_view", "show_seconds", "show_share"]

_GIB = 2**30
_FAR, _NEAR = 0.15, 0.05
_ASSUMED, _DEVICE = 6, 14


def accuracy_view(found: Accuracy) -> RenderableType:
    """Rows file by file, what was skipped and left out, then the figures."""
    return Group(
        *(part for file in found.files for part in _file(found, file)),
        *_excluded(found),
        *_figures(found),
        *_passed_over(found),
    )


def show_share(value: float | None, *, signed: bool = False) -> str:
    """A fraction in percent, a dash for none."""
    if value is None:
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def show_seconds(value: float | None) -> str:
    """Seconds with three significant digits, a dash for none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _file(found: Accuracy, file: str) -> Iterator[RenderableType]:
    rows = [(place, row) for place, row in enumerate(found.rows) if row.row.file == file and not row.excluded]
    priced = [(place, row) for place, row in rows if row.time or row.memory]
    if priced:
        yield _rows(found, file, priced)
    yield from _reasons(file, [row for _, row in rows])
    yield from _assumed([row for _, row in priced])


def _rows(found: Accuracy, title: str, rows: Sequence[tuple[int, PricedRow]]) -> Table:
    table = numbers(f"\n{title}, published and predicted")
    table.padding = (0, 1, 0, 0)
    table.add_column("row", justify="right", no_wrap=True)
    table.add_column("model, GPUs, strategy", ratio=1)
    timed, held = any(row.time for _, row in rows), any(row.memory for _, row in rows)
    if timed:
        for name in ("step, s", "error", *(("calibr.",) if found.calibrate_on else ())):
            table.add_column(name, justify="right", no_wrap=True)
    if held:
        for name in ("GiB", "error"):
            table.add_column(name, justify="right", no_wrap=True)
    for place, row in rows:
        table.add_row(*_cells(found, place, row, timed, held))
    return table


def _cells(found: Accuracy, place: int, row: PricedRow, timed: bool, held: bool) -> list[RenderableType]:
    time, memory, setup = row.time, row.memory, row.setup
    run = f"{row.row.text('model')}, {row.row.text('gpus')} {row.row.text('gpu_type')[:_DEVICE]}"
    cells: list[RenderableType] = [str(row.row.index), run if setup is None else f"{run}\n{setup.strategy}"]
    if timed:
        cells.append(f"{show_seconds(time.published_s)} {show_seconds(time.predicted_s)}" if time else "-")
        cells.append(_error(time.error if time else None))
    if timed and found.calibrate_on:
        calibrated = found.calibrated_s.get(place)
        cells.append(_error(calibrated / time.published_s - 1 if time and calibrated else None))
    if held:
        cells.append(f"{memory.published_bytes / _GIB:.1f} {memory.predicted_bytes / _GIB:.1f}" if memory else "-")
        cells.append(_error(memory.error if memory else None))
    return cells


def _error(value: float | None) -> Text:
    style = "" if value is None else "red" if abs(value) > _FAR else "green" if abs(value) <= _NEAR else ""
    return Text(show_share(value, signed=True), style=style)


def _reasons(file: str, rows: Sequence[PricedRow]) -> Iterator[Text]:
    """Rows that publish a figure and have no prediction, by reason."""
    told: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row.has_time and row.time is None:
            told.setdefault(("time", row.no_time), []).append(row.row.index)
        if row.has_memory and row.memory is None:
            told.setdefault(("memory", row.no_memory), []).append(row.row.index)
    for (what, reason), places in told.items():
        yield Text(f"{file}: {what} of row {_places(places)} skipped: {reason}", style="yellow")


def _places(places: Sequence[int]) -> str:
    """`1, 3-5, 9`."""
    parts: list[list[int]] = []
    for place in places:
        if parts and place == parts[-1][-1] + 1:
            parts[-1].append(place)
        else:
            parts.append([place])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _assumed(rows: Sequence[PricedRow]) -> Iterator[Text]:
    told: dict[str, list[int]] = {}
    for row in rows:
        for words in row.setup.assumed if row.setup else ():
            told.setdefault(words, []).append(row.row.index)
    for words, places in list(told.items())[:_ASSUMED]:
        yield Text(f"assumed in row {_places(places)}: {words}", style="dim")
    if len(told) > _ASSUMED:
        yield Text(f"and {len(told) - _ASSUMED} further assumptions (--json lists them by row)", style="dim")
    disagree = [(row.row.index, row.time.disagrees) for row in rows if row.time and row.time.disagrees]
    if disagree:
        shown = "; ".join(f"row {index}: {words}" for index, words in disagree[:_ASSUMED])
        more = f" and {len(disagree) - _ASSUMED} more" if len(disagree) > _ASSUMED else ""
        yield Text(f"columns of one row that contradict each other: {shown}{more}", style="dim")


def _excluded(found: Accuracy) -> Iterator[RenderableType]:
    """Rows not to be trusted, apart."""
    rows = [(place, row) for place, row in enumerate(found.rows) if row.excluded]
    if not rows:
        return
    table = numbers("\nRows not to be trusted, in none of the figures")
    for name in ("file", "row", "model"):
        table.add_column(name)
    table.add_column("error of time", justify="right")
    table.add_column("error of memory", justify="right")
    table.add_column("why")
    silent: dict[str, int] = {}
    for _, row in rows:
        if not (row.time or row.memory):
            silent[row.excluded] = silent.get(row.excluded, 0) + 1
            continue
        table.add_row(
            row.row.file,
            str(row.row.index),
            row.row.text("model"),
            _error(row.time.error if row.time else None),
            _error(row.memory.error if row.memory else None),
            row.excluded,
        )
    if table.row_count:
        yield table
    for reason, count in silent.items():
        yield Text(f"{count} more that could not be priced: {reason}", style="dim")


def _figures(found: Accuracy) -> Iterator[RenderableType]:
    parts = [(file, found.part(file=file)) for file in found.files]
    parts.append(("all", found.part()))
    if found.part(fitted=True) and found.part(fitted=False):
        parts.append(("all that constants were not fitted on", found.part(fitted=False)))
    parts.append(("models with experts", found.part(mixture=True)))
    times = [(name, found.time(rows)) for name, rows in parts]
    if any(summary.priced for _, summary in times):
        yield _time_table(times)
        yield _beside_table(found, times)
    memories = [(name, found.memory(rows)) for name, rows in parts]
    if any(summary.priced for _, summary in memories):
        yield _memory_table(memories)


def _time_table(parts: Sequence[tuple[str, Summary]]) -> Table:
    table = numbers("\nTime of a step: errors of the prediction")
    table.add_column("dense models of", overflow="fold")
    for name in ("priced", "skipped", "median", "mean", "bias", "ranked", "regret"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, summary in parts:
        if summary.priced or summary.skipped:
            regret = show_share(summary.regret.mean if summary.regret else None)
            table.add_row(name, *_summed(summary), regret)
    return table


def _beside_table(found: Accuracy, parts: Sequence[tuple[str, Summary]]) -> Table:
    """What else is compared: a constant share of the peak, and the prediction after calibration."""
    title = "\nBeside it, median errors: a constant MFU per device"
    table = numbers(title + (f"; calibrated on {found.calibrate_on} rows" if found.calibrate_on else ""))
    table.add_column("dense models of", overflow="fold")
    for name in ("prediction", "constant MFU", *(("calibrated", "ranked") if found.calibrate_on else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for name, summary in parts:
        if not summary.priced:
            continue
        cells = [show_share(one.median_absolute if one else None) for one in (summary.errors, summary.baseline)]
        if found.calibrate_on:
            told = summary.calibrated
            cells += [show_share(told.median_absolute if told else None), "-"]
            if told and told.concordance is not None:
                cells[-1] = f"{told.concordance:.2f}"
        table.add_row(name, *cells)
    return table


def _memory_table(parts: Sequence[tuple[str, Summary]]) -> Table:
    table = numbers("\nPeak memory: errors of the prediction")
    table.add_column("dense models of")
    for name in ("priced", "skipped", "median", "mean", "bias", "ranked"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, summary in parts:
        if not summary.priced and not summary.skipped:
            continue
        table.add_row(name, *_summed(summary))
    return table


def _summed(summary: Summary) -> list[str]:
    shown = summary.errors
    return [
        str(summary.priced),
        str(summary.rows_skipped),
        show_share(shown.median_absolute if shown else None),
        show_share(shown.mean_absolute if shown else None),
        show_share(shown.median_signed if shown else None, signed=True),
        _ranked(summary),
    ]


def _ranked(summary: Summary) -> str:
    return "-" if summary.concordance is None else f"{summary.concordance:.2f} of {summary.pairs}"


def _passed_over(found: Accuracy) -> Iterator[Text]:
    for file, reason in found.refused.items():
        yield Text(f"{file} passed over: it {reason}", style="dim")
