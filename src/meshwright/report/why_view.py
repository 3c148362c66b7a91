"""Strategies side by side on the screen: the ranking of a plan, and an answer to `--why`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.planner.why import Why
from meshwright.report.style import CATEGORY_HEADERS, Scale, numbers, totals
from meshwright.spec import Plan
from meshwright.spec.units import show_bytes, show_seconds

__all__ = ["ranking", "why_view"]


def ranking(plan: Plan) -> Table:
    """The best strategies in order: strategy, time of a step, tokens per second, MFU, memory."""
    rows = [(str(plan.strategy), plan.strategy.world_size, plan.cost.step_s, plan.cost.total_bytes, plan.executable)]
    rows += [
        (other.strategy, other.devices, other.step_s, other.total_bytes, other.executable) for other in plan.runner_up
    ]
    scale = Scale.of(row[3] for row in rows)
    several = len({devices for _, devices, *_ in rows}) > 1
    table = numbers(f"The best strategies that fit into {show_bytes(plan.usable_bytes)}")
    table.padding = (0, 1, 0, 0)
    table.add_column("", justify="right")
    table.add_column("strategy", ratio=1)
    if several:
        table.add_column("devices", justify="right")
    for name in ("step", "tokens/s", "MFU", scale.unit):
        table.add_column(name, justify="right", no_wrap=True)
    peak, mfu = plan.peak_flops_per_s, plan.mfu
    for index, (strategy, devices, step_s, total, executable) in enumerate(rows):
        share = "-"
        if mfu is not None and peak and step_s:
            used = peak * devices / plan.strategy.world_size
            share = f"{plan.cost.model_flops / step_s / used:.1%}"
        rate = f"{plan.tokens / step_s:,.0f}" if step_s else "-"
        cells = [str(index + 1), strategy + ("" if executable else " *")]
        cells += [str(devices)] if several else []
        table.add_row(
            *cells, show_seconds(step_s), rate, share, scale.show(total), style="cyan" if index == 0 else None
        )
    if not all(executable for *_, executable in rows):
        table.caption = "* priced, but not executed by this version"
        table.caption_justify = "left"
    return table


def why_view(answer: Why, plan: Plan) -> RenderableType:
    """The best strategy within what was asked beside the chosen one: time by term, memory by category."""
    kept = f"  (pinned as before: {answer.kept})" if answer.kept else ""
    heading = Text.assemble(
        ("\nWhy not ", "bold"),
        (answer.asked, "bold cyan"),
        (f"?  {answer.strategy}{kept}\n", ""),
        (f"{answer.reason}\n", ""),
    )
    times = _compared("Time of a step")
    names = sorted({**plan.cost.terms, **answer.more_s}, key=lambda name: -abs(answer.more_s.get(name, 0.0)))
    for name in names:
        chosen = plan.cost.terms.get(name, 0.0)
        _row(times, name, chosen, chosen + answer.more_s.get(name, 0.0), show_seconds)
    _row(times, "step", plan.cost.step_s, answer.step_s, show_seconds, "bold")
    memory = _compared(f"Memory of a device, {show_bytes(answer.usable_bytes)} usable")
    held = {name: (plan.cost.in_step.get(name, 0), answer.in_step.get(name, 0)) for name in CATEGORY_HEADERS}
    held["besides tensors"] = (
        plan.cost.total_bytes - sum(plan.cost.in_step.values()),
        answer.total_bytes - sum(answer.in_step.values()),
    )
    for name, (here, there) in held.items():
        if here or there:
            _row(memory, name, here, there, show_bytes)
    _row(memory, "total", plan.cost.total_bytes, answer.total_bytes, show_bytes, "bold")
    return Group(heading, times, memory)


def _compared(title: str) -> Table:
    table = totals(title)
    table.add_column("", style="dim")
    for name in ("chosen", "asked", "difference"):
        table.add_column(name, justify="right")
    return table


def _row(table: Table, name: str, chosen: Any, asked: Any, show: Callable[[Any], str], style: str = "") -> None:
    more = asked - chosen
    difference = f"{'+' if more > 0 else '-'}{show(abs(more))}" if more else "-"
    table.add_row(name, show(chosen), show(asked), difference, style=style)
