"""A plan on the screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.planner.explain import bottleneck
from meshwright.report.style import CATEGORY_HEADERS as HEADERS
from meshwright.report.style import bar, totals
from meshwright.report.why_view import ranking
from meshwright.spec import Plan
from meshwright.spec.units import show_bytes, show_seconds

__all__ = ["HEADERS", "changes", "memory", "plan_view", "times", "verdict"]

_BAR = 24
_COLORS = {
    "matrix products": "green",
    "attention": "green",
    "memory-bound operations": "yellow",
    "logits and loss": "yellow",
    "recompute": "magenta",
    "pipeline bubble": "red",
    "optimizer": "cyan",
}
_PER_TOKENS = 1e9
#: Terms of a smaller share are added up.
_LEAST = 0.0005
_OVERHEAD = {
    "framework": "the process itself",
    "communicators": "communicators",
    "collectives": "gather buffers",
    "allocator": "allocator gaps",
}


def plan_view(plan: Plan) -> RenderableType:
    """The ranking; where the chosen plan spends its time and its memory; what others lose by; what was left out."""
    return Group(
        _heading(plan),
        ranking(plan),
        *_reasons(plan),
        times(plan),
        verdict(plan),
        memory(plan),
        _collectives(plan),
        *changes(plan),
        *_left_out(plan),
        _sources(plan),
    )


def _heading(plan: Plan) -> Text:
    job, cluster, strategy = plan.job, plan.cluster, plan.strategy
    parts = Text("\nPlan  ", style="bold")
    parts.append(str(strategy), style="bold cyan")
    parts.append(
        f"\n{plan.model.name}, {plan.model.parameters:,} parameters\n"
        f"{cluster.name}: {cluster.inventory}, {strategy.world_size} used\n"
        f"global batch {job.global_batch} = dp {strategy.dp} x microbatch {strategy.microbatch}"
        f" x accumulation {strategy.microbatches(job.global_batch)}, sequences of {job.sequence} tokens, "
        f"{job.compute_dtype}, {job.stack} kernels\n",
        style="",
    )
    if plan.pinned:
        pins = " ".join(key + (rest if rest[0] in "<>" else f"={rest}") for key, rest in plan.pinned.items())
        parts.append(f"pinned: {pins}\n")
    if plan.searched:
        counted = ", ".join(f"{count:,} {name}" for name, count in plan.searched.items())
        proof = "nothing else can be better"
        if plan.unproven:
            proof = f"by the bounds on what was not looked at, something up to {plan.unproven:.0%} better may exist"
        parts.append(f"looked at: {counted}; {proof}\n")
    if not plan.executable:
        parts.append("this version prices this strategy but does not execute it (--executable plans what it does)\n")
    return parts


def _reasons(plan: Plan) -> Iterator[Text]:
    for index, other in enumerate(plan.runner_up, start=2):
        yield Text.assemble((f" {index}  ", ""), (other.reason, "dim"))
    if not plan.runner_up:
        yield Text(" nothing else fits", style="dim")


def times(plan: Plan) -> Table:
    """Seconds of a step by term, the longest first."""
    bound = plan.error_bar.step_time
    about = f", ±{bound:.0%}" if bound else ""
    table = totals(f"Time of a step, {show_seconds(plan.cost.step_s)}{about}")
    table.add_column("", style="dim")
    table.add_column("", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", no_wrap=True)
    terms, whole = plan.cost.terms, plan.cost.step_s or 1.0
    longest = max(terms.values(), default=1.0) or 1.0
    small = {name: seconds for name, seconds in terms.items() if seconds < _LEAST * whole}
    for name, seconds in sorted(terms.items(), key=lambda term: -term[1]):
        if name in small:
            continue
        line = Text(bar(seconds / longest, _BAR), style=_COLORS.get(name, "blue"))
        table.add_row(name, show_seconds(seconds), f"{seconds / whole:.1%}", line)
    if small:
        rest = sum(small.values())
        table.add_row("the rest", show_seconds(rest), f"{rest / whole:.1%}", "")
    return table


def verdict(plan: Plan) -> Text:
    """The bottleneck, and what the plan makes of the devices."""
    rate, mfu = plan.tokens_per_s, plan.mfu
    devices = plan.strategy.world_size
    text = f"bottleneck: {bottleneck(plan.cost)}\n{rate:,.0f} tokens/s, {rate / devices:,.0f} on each device"
    if mfu is not None:
        text += f", MFU {mfu:.1%}"
    if rate:
        hours = devices * _PER_TOKENS / rate / 3600
        text += f"; {hours:,.1f} device-hours for 10^9 tokens"
        if plan.price_per_hour:
            text += f", which cost {hours * plan.price_per_hour:,.2f} at {plan.price_per_hour:g} an hour"
    return Text(text + "\n")


def memory(plan: Plan) -> Table:
    """Bytes by category, at rest and in step, and which of them the shard group divides."""
    cost, bound = plan.cost, plan.error_bar.memory
    about = f", ±{bound:.0%}" if bound else ""
    table = totals(f"Memory of a device, {show_bytes(cost.total_bytes)}{about}; in step: {cost.phase}")
    table.add_column("", style="dim")
    for name in ("at rest", "in step", "sharded", "not sharded"):
        table.add_column(name, justify="right")
    for name in HEADERS:
        rest, step = cost.at_rest.get(name, 0), cost.in_step.get(name, 0)
        if rest or step:
            divided = cost.divided.get(name, 0)
            table.add_row(name, *(_or_dash(size) for size in (rest, step, divided, step - divided)))
    for name, size in cost.overhead.items():
        if size:
            table.add_row(_OVERHEAD.get(name, name), "-", show_bytes(size), "-", show_bytes(size))
    divided = sum(cost.divided.values())
    table.add_row(
        "total",
        show_bytes(sum(cost.at_rest.values())),
        show_bytes(cost.total_bytes),
        _or_dash(divided),
        show_bytes(cost.total_bytes - divided),
        style="bold",
    )
    usable = plan.usable_bytes
    table.add_row(f"usable, {plan.cluster.memory_fraction:.0%}", "", show_bytes(usable), "", "")
    table.add_row("left", "", show_bytes(usable - cost.total_bytes), "", "")
    if cost.padding_bytes:
        table.add_row("of which padding", show_bytes(cost.padding_bytes), "", "", "")
    for name, size in (("host memory of a rank", cost.host_bytes), ("disk of a rank", cost.disk_bytes)):
        if size:
            table.add_row(name, show_bytes(size), show_bytes(size), "", "")
    return table


def _or_dash(size: int) -> str:
    return show_bytes(size) if size else "-"


def _collectives(plan: Plan) -> Text:
    kinds = [
        f"{count} {kind.replace('_', '-')} ({show_bytes(plan.cost.collective_bytes.get(kind, 0))})"
        for kind, count in plan.cost.collectives.items()
    ]
    return Text(f"collectives a step: {', '.join(kinds) or 'none'}")


def changes(plan: Plan) -> Iterator[Text]:
    """What each change would bring."""
    if not plan.changes:
        return
    yield Text("\nWhat one change would bring, in tokens/s", style="bold")
    for change in plan.changes:
        gain = change.tokens_per_s / plan.tokens_per_s - 1 if plan.tokens_per_s else 0.0
        other = "" if change.strategy == str(plan.strategy) else f", with {change.strategy}"
        told = f"{gain:+.1%} (step {show_seconds(change.step_s)}{other})" if abs(gain) >= 0.0005 else "nothing"
        yield Text.assemble((f" {change.what}", ""), (f": {told}", "dim"))


def _left_out(plan: Plan) -> Iterator[Text]:
    if plan.rejected or plan.left_out:
        yield Text("\nLeft out", style="bold")
    for entry in (*plan.left_out, *plan.rejected):
        yield Text.assemble((f" {entry.strategy}", ""), (f": {entry.reason}", "dim"))


def _sources(plan: Plan) -> Text:
    source = plan.provenance
    names = dict.fromkeys(constant.source for constant in source.constants if constant.source)
    bound = f"Error bar: {plan.error_bar.source}.\n" if plan.error_bar.source else ""
    listed = "".join(f"  {name}\n" for name in names)
    return Text(
        f"\nRule: {source.rule}\nMemory: {source.memory}.\nTime: {source.time}.\n{bound}"
        + (f"Constants ({len(source.constants)}, each in plan.toml) come from:\n{listed}" if listed else ""),
        style="dim",
    )
