"""A plan on the screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.cost import CATEGORIES
from meshwright.report.style import Scale, numbers, totals
from meshwright.spec import Plan
from meshwright.spec.units import show_bytes

__all__ = ["HEADERS", "plan_view"]

#: Categories of memory as narrow columns.
HEADERS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "gathered": "gathered",
    "activations": "acts",
    "logits": "logits",
}


def plan_view(plan: Plan) -> RenderableType:
    """The chosen strategy against the best others, its memory at rest and in step, what was left out, and sources."""
    return Group(
        _heading(plan),
        _candidates(plan),
        *_reasons(plan),
        _at_rest(plan),
        _in_step(plan),
        _collectives(plan),
        *_left_out(plan),
        _sources(plan),
    )


def _heading(plan: Plan) -> Text:
    parts = Text("\nPlan  ", style="bold")
    parts.append(str(plan.strategy), style="bold cyan")
    job, cluster = plan.job, plan.cluster
    microbatches = plan.strategy.microbatches(job.global_batch)
    parts.append(
        f"\n{cluster.name}: {cluster.devices} x {cluster.nodes[0].device.name}, {plan.strategy.world_size} used\n"
        f"global batch {job.global_batch} = dp {plan.strategy.dp} x microbatch {plan.strategy.microbatch}"
        f" x accumulation {microbatches}, sequences of {job.sequence} tokens\n",
        style="",
    )
    if plan.pinned:
        pins = " ".join(key + (rest if rest[0] in "<>" else f"={rest}") for key, rest in plan.pinned.items())
        parts.append(f"pinned: {pins}\n")
    return parts


def _candidates(plan: Plan) -> Table:
    rows = [(plan.cost.in_step, sum(plan.cost.collectives.values()))]
    rows += [(other.in_step, other.collectives) for other in plan.runner_up]
    scale = Scale.of(total for memory, _ in rows for total in (sum(memory.values()),))
    table = numbers(f"Memory in step of one rank ({scale.unit}), and collectives a step")
    table.add_column("", justify="right")
    for category in CATEGORIES:
        table.add_column(HEADERS[category], justify="right")
    table.add_column("total", justify="right", style="bold")
    table.add_column("collectives", justify="right")
    for index, (memory, collectives) in enumerate(rows):
        cells = [scale.show(memory.get(category, 0)) for category in CATEGORIES]
        style = "cyan" if index == 0 else None
        table.add_row(str(index + 1), *cells, scale.show(sum(memory.values())), str(collectives), style=style)
    return table


def _reasons(plan: Plan) -> Iterator[Text]:
    second = f"the next best {plan.runner_up[0].strategy}: {plan.runner_up[0].reason}" if plan.runner_up else ""
    yield _line(f" 1  {plan.strategy}", f"chosen over {second}" if second else "chosen: nothing else fits", "cyan")
    for index, other in enumerate(plan.runner_up, start=2):
        yield _line(f" {index}  {other.strategy}", other.reason, "")


def _line(what: str, why: str, style: str) -> Text:
    return Text.assemble((what, style), (f": {why}", "dim"))


def _at_rest(plan: Plan) -> Table:
    table = totals("At rest, between steps")
    table.add_column("", style="dim")
    table.add_column("bytes", justify="right")
    held = {name: size for name, size in plan.cost.at_rest.items() if size}
    for name, size in held.items():
        table.add_row(name, show_bytes(size))
    table.add_row("total", show_bytes(sum(held.values())), style="bold")
    if plan.cost.padding_bytes:
        table.add_row("of which padding", show_bytes(plan.cost.padding_bytes))
    return table


def _in_step(plan: Plan) -> Table:
    cost = plan.cost
    table = totals(f"In step, at its largest moment ({cost.phase})")
    table.add_column("", style="dim")
    for name in ("bytes", "divides by the shard group", "does not"):
        table.add_column(name, justify="right")
    for name, size in cost.in_step.items():
        if size:
            divided = cost.divided.get(name, 0)
            table.add_row(name, show_bytes(size), _or_dash(divided), _or_dash(size - divided))
    divided = sum(cost.divided.values())
    shares = _or_dash(divided), _or_dash(cost.peak_bytes - divided)
    table.add_row("total", show_bytes(cost.peak_bytes), *shares, style="bold")
    table.add_row("the process itself", show_bytes(plan.framework_bytes))
    usable = plan.cluster.usable_bytes
    left = usable - plan.framework_bytes - cost.peak_bytes
    table.add_row("usable on a device", show_bytes(usable))
    table.add_row("left", show_bytes(left))
    return table


def _or_dash(size: int) -> str:
    return show_bytes(size) if size else "-"


def _collectives(plan: Plan) -> Text:
    kinds = [
        f"{count} {kind.replace('_', '-')} ({show_bytes(plan.cost.collective_bytes[kind])})"
        for kind, count in plan.cost.collectives.items()
    ]
    return Text(f"collectives a step: {', '.join(kinds) or 'none'}")


def _left_out(plan: Plan) -> Iterator[Text]:
    if plan.rejected:
        yield Text("\nLeft out", style="bold")
    for entry in plan.rejected:
        yield _line(f" {entry.strategy}", entry.reason, "")


def _sources(plan: Plan) -> Text:
    source = plan.provenance
    return Text(f"\nRule: {source.rule}\nMemory: {source.memory}.\n", style="dim")
