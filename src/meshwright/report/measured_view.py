"""Predicted beside measured, on the screen."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType

from meshwright.cost import CATEGORIES
from meshwright.report.style import totals
from meshwright.spec.units import show_bytes

__all__ = ["measured_view"]


def measured_view(predicted: Mapping[str, int], measured: Mapping[str, int]) -> RenderableType:
    """Memory of one rank in step, by category: predicted, measured, and by how many per cent the measured is off.

    Args:
        predicted: `Cost.in_step`.
        measured: `StepReport.peak_bytes`; where it has no `logits`, they are among its `activations`. `allocator`, what
            the device's allocator says, is shown beside the total.
    """
    table = totals("Memory of one rank in step, predicted and measured")
    table.add_column("", style="dim")
    for name in ("predicted", "measured", "off by"):
        table.add_column(name, justify="right")
    wanted = dict(predicted)
    if "logits" not in measured and wanted.get("logits"):
        wanted["activations"] = wanted.get("activations", 0) + wanted.pop("logits")
    for category in CATEGORIES:
        size, found = wanted.get(category, 0), measured.get(category, 0)
        if size or found:
            label = "activations, logits" if category == "activations" and "logits" not in measured else category
            table.add_row(label, show_bytes(size), show_bytes(found), _off(size, found))
    whole = sum(wanted.values())
    counted = measured.get("total", sum(measured.get(category, 0) for category in CATEGORIES))
    table.add_row("total", show_bytes(whole), show_bytes(counted), _off(whole, counted), style="bold")
    if "allocator" in measured:
        table.add_row("allocator", "", show_bytes(measured["allocator"]), _off(whole, measured["allocator"]))
    return table


def _off(predicted: int, measured: int) -> str:
    return f"{(measured - predicted) / predicted:+.1%}" if predicted else "-"
