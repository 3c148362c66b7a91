"""Accuracy as numbers: what `--json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.cost.published.accuracy import Accuracy, Summary
from meshwright.cost.published.metrics import Errors
from meshwright.cost.published.pricing import PricedRow

__all__ = ["accuracy_table"]


def accuracy_table(found: Accuracy) -> dict[str, Any]:
    """Figures under `time` and `memory`, and all rows.

    Each of the two holds the figures of the dense rows that are to be trusted; `checking` those of files that no
    constant was fitted on, `fitted` the others; `mixtures` of models with experts and `excluded` of rows not to be
    trusted, apart; `by_file` the dense rows again, file by file. Errors are fractions, times seconds, sizes bytes.
    """
    return {
        "time": _parts(found, time=True),
        "memory": _parts(found, time=False),
        "calibrate_on": found.calibrate_on,
        "passed_over": found.refused,
        "rows": [_row(found, place, row) for place, row in enumerate(found.rows)],
    }


def _parts(found: Accuracy, *, time: bool) -> dict[str, Any]:
    def figures(rows: Sequence[PricedRow]) -> dict[str, Any]:
        return _summary(found.time(rows) if time else found.memory(rows), time=time)

    table = figures(found.part())
    table["skipped"] = _skipped(found.part(), time=time)
    table["checking"] = figures(found.part(fitted=False))
    table["fitted"] = figures(found.part(fitted=True))
    table["mixtures"] = figures(found.part(mixture=True))
    table["excluded"] = figures(found.part(mixture=None, excluded=True))
    table["by_file"] = {file: figures(found.part(file=file)) for file in found.files}
    return table


def _skipped(rows: Sequence[PricedRow], *, time: bool) -> list[dict[str, Any]]:
    told = [
        (row, row.no_time if time else row.no_memory)
        for row in rows
        if (row.has_time and row.time is None if time else row.has_memory and row.memory is None)
    ]
    return [{"file": row.row.file, "row": row.row.index, "reason": reason} for row, reason in told]


def _summary(summary: Summary, *, time: bool) -> dict[str, Any]:
    table: dict[str, Any] = {
        "rows_priced": summary.priced,
        "rows_skipped": summary.rows_skipped,
        "skipped_reasons": summary.skipped,
        **_errors(summary.errors),
        "pairs": summary.pairs,
        "concordance": summary.concordance,
    }
    lost = summary.regret
    table["regret"] = None if lost is None else lost.mean
    if not time:
        return table
    table["regret_groups"] = 0 if lost is None else lost.groups
    table["regret_median"] = None if lost is None else lost.median
    table["regret_largest"] = None if lost is None else lost.largest
    table["baseline"] = {**_errors(summary.baseline), "concordance": summary.baseline_concordance}
    told = summary.calibrated
    table["calibrated"] = None
    if told is not None:
        table["calibrated"] = {
            "rows_checked": told.rows,
            "rows_not_calibrated": told.uncalibrated,
            "median_absolute_error": told.median_absolute,
            "mean_absolute_error": told.mean_absolute,
            "bias": told.median_signed,
            "concordance": told.concordance,
        }
    return table


def _errors(figures: Errors | None) -> dict[str, float | None]:
    return {
        "median_absolute_error": figures.median_absolute if figures else None,
        "mean_absolute_error": figures.mean_absolute if figures else None,
        "bias": figures.median_signed if figures else None,
        "mean_bias": figures.mean_signed if figures else None,
    }


def _row(found: Accuracy, place: int, row: PricedRow) -> dict[str, Any]:
    setup, time, memory = row.setup, row.time, row.memory
    return {
        "file": row.row.file,
        "row": row.row.index,
        "model": row.row.text("model"),
        "gpus": row.row.text("gpus"),
        "gpu_type": row.row.text("gpu_type"),
        "strategy": None if setup is None else str(setup.strategy),
        "stack": None if setup is None else setup.stack,
        "experts": row.mixture,
        "fitted": row.fitted,
        "excluded": row.excluded,
        "assumed": [] if setup is None else list(setup.assumed),
        "published_s": time and time.published_s,
        "predicted_s": time and time.predicted_s,
        "baseline_s": time and time.baseline_s,
        "calibrated_s": found.calibrated_s.get(place) if found.calibrate_on else None,
        "time_error": time and time.error,
        "time_from": time and time.column,
        "disagrees": time.disagrees if time else "",
        "terms": time and time.terms,
        "time_skipped": row.no_time,
        "published_bytes": memory and memory.published_bytes,
        "predicted_bytes": memory and memory.predicted_bytes,
        "memory_error": memory and memory.error,
        "memory_skipped": row.no_memory,
    }
