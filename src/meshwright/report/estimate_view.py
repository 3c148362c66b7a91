"""An estimate on the screen: a table and a bar per pipeline rank, and what is short."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.cost import CATEGORIES, Estimate, RankEstimate
from meshwright.report.plan_view import HEADERS
from meshwright.report.style import Scale, numbers
from meshwright.spec.units import show_bytes

__all__ = ["estimate_view"]

_BAR = 48
_COLORS = {
    "parameters": "blue",
    "gradients": "cyan",
    "optimizer": "green",
    "gathered": "magenta",
    "activations": "yellow",
    "logits": "red",
    "overhead": "bright_black",
}
_SHORT = HEADERS | {"overhead": "other"}
#: What makes each category smaller.
_REMEDIES = {
    "parameters": ("zero=3", "a larger shard group", "tp", "pp"),
    "gradients": ("zero=2", "a larger shard group", "tp", "pp"),
    "optimizer": ("zero=1", "a larger shard group", "offload.optimizer=host"),
    "gathered": ("zero=3", "gather=unit", "fewer unit_blocks", "less prefetch", "tp", "pp"),
    "activations": ("recompute=full", "a smaller microbatch", "tp with sequence_parallel", "cp (ZeRO does not help)"),
    "logits": ("a smaller microbatch", "tp (it divides the vocabulary)", "a fused loss (ZeRO does not help)"),
    "overhead": ("less prefetch", "fewer mesh dimensions (fewer communicators)"),
}


def estimate_view(found: Estimate) -> RenderableType:
    """The memory of each pipeline rank in step and at rest, a bar for each, and whether it fits."""
    scale = Scale.of(rank.total_bytes for rank in found.ranks)
    return Group(
        _heading(found),
        _table(found, scale),
        _at_rest(found, scale),
        *_bars(found),
        _legend(),
        *_verdict(found),
        *(Text(note, style="dim") for note in found.notes),
    )


def _heading(found: Estimate) -> Text:
    parts = Text.assemble(
        ("\nEstimate  ", "bold"),
        (found.model, "bold cyan"),
        f", {found.parameters:,} parameters\n",
        (found.strategy, "cyan"),
        f"\n{found.microbatches} {'microbatch' if found.microbatches == 1 else 'microbatches'} a step",
    )
    if len(found.ranks) > 1:
        parts.append(f", {len(found.ranks)} pipeline ranks")
    parts.append(
        f"\n{found.cluster}: {found.world_size} of {found.devices} devices; global batch {found.global_batch}, "
        f"sequences of {found.sequence} tokens, {found.compute_dtype}, {found.stack} kernels\n"
    )
    return parts


def _columns(table: Table) -> None:
    table.padding = (0, 1, 0, 0)  # ten columns on a terminal of 80
    table.add_column("rank", justify="right")
    table.add_column("layers", justify="right")
    for category in (*CATEGORIES, "overhead", "total"):
        style = "bold" if category == "total" else _COLORS.get(category, "")
        table.add_column(_SHORT.get(category, category), justify="right", style=style, no_wrap=True)


def _table(found: Estimate, scale: Scale) -> Table:
    table = numbers(f"In step, at the largest moment of each rank ({scale.unit})")
    _columns(table)
    for first, last, rank in _runs(found.ranks):
        cells = [scale.show(rank.in_step[name]) for name in CATEGORIES]
        extra = scale.show(sum(rank.overhead.values()))
        table.add_row(_name(first, last), _layers(rank), *cells, extra, scale.show(rank.total_bytes))
    return table


def _at_rest(found: Estimate, scale: Scale) -> Table:
    table = numbers(f"At rest, between steps ({scale.unit})")
    for name in ("rank", "parameters", "optimizer", "total", "host", "disk"):
        table.add_column(name, justify="right")
    for first, last, rank in _runs(found.ranks):
        held = [rank.at_rest["parameters"], rank.at_rest["optimizer"]]
        tiers = [rank.host_bytes, rank.disk_bytes]
        table.add_row(_name(first, last), *(scale.show(size) for size in (*held, sum(held), *tiers)))
    return table


def _runs(ranks: tuple[RankEstimate, ...]) -> Iterator[tuple[int, int, RankEstimate]]:
    """Neighbouring ranks that are alike, as one row: the first, the last, and the row."""
    start = 0
    for index, rank in enumerate(ranks):
        following = ranks[index + 1] if index + 1 < len(ranks) else None
        if following is None or _look(following) != _look(rank):
            yield start, index, rank
            start = index + 1


def _look(rank: RankEstimate) -> tuple[object, ...]:
    return rank.layers, rank.holds, tuple(rank.in_step.values()), tuple(rank.at_rest.values()), rank.total_bytes


def _name(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _layers(rank: RankEstimate) -> str:
    return "+".join(str(count) for count in rank.layers)


def _bars(found: Estimate) -> Iterator[Text]:
    longest = max(found.device_bytes, found.worst.total_bytes)
    for first, last, rank in _runs(found.ranks):
        sizes = {**{name: rank.in_step[name] for name in CATEGORIES}, "overhead": sum(rank.overhead.values())}
        line = Text(f"{_name(first, last):>9} ")
        done = drawn = 0
        for name, size in sizes.items():
            done += size
            cells = round(_BAR * done / longest) - drawn
            line.append("█" * cells, style=_COLORS[name])
            drawn += cells
        mark = round(_BAR * found.usable_bytes / longest)
        line.append(" " * max(0, mark - drawn) + "▏" if drawn <= mark else "", style="dim")
        line.append(f" {show_bytes(rank.total_bytes)}", style="" if rank.total_bytes <= found.usable_bytes else "red")
        yield line


def _legend() -> Text:
    line = Text(" " * 10)
    for name, color in _COLORS.items():
        line.append("█ ", style=color)
        line.append(f"{name}  ", style="dim")
    line.append("▏usable", style="dim")
    return line


def _verdict(found: Estimate) -> Iterator[Text]:
    worst = found.worst
    usable = f"{show_bytes(found.usable_bytes)} usable of {show_bytes(found.device_bytes)}"
    if found.short_bytes <= 0:
        yield Text.assemble(
            ("\nfits  ", "bold green"), f"rank {worst.rank} needs {show_bytes(worst.total_bytes)}; {usable}"
        )
    else:
        yield Text.assemble(
            ("\ndoes not fit  ", "bold red"),
            f"rank {worst.rank} is short of {show_bytes(found.short_bytes)}: "
            f"it needs {show_bytes(worst.total_bytes)}; {usable}",
        )
        yield from _largest(found)
    divided = sum(found.divides.values())
    other = worst.in_step["activations"] + worst.in_step["logits"]
    yield Text(
        f"model states {show_bytes(found.states_bytes)}, of which the shard group divides {show_bytes(divided)}; "
        f"activations and logits {show_bytes(other)}, which ZeRO cannot divide"
    )
    yield from _tier("host memory", found.host_needed_bytes, found.host_usable_bytes, "use offload to disk, or")
    yield from _tier("disk", found.disk_needed_bytes, found.disk_usable_bytes, "use")


def _tier(name: str, needed: int, usable: int | None, fix: str) -> Iterator[Text]:
    """What a node needs of a memory tier besides its devices."""
    if not needed:
        return
    told = f"{show_bytes(usable)} usable" if usable is not None else "its size is not known"
    yield Text(f"{name} of a node: {show_bytes(needed)} needed, {told}")
    if usable is not None and needed > usable:
        short = f"the {name} of a node is short of {show_bytes(needed - usable)}: {fix} fewer ranks a node"
        yield Text.assemble(("does not fit  ", "bold red"), short)


def _largest(found: Estimate) -> Iterator[Text]:
    worst = found.worst
    sizes = {**worst.in_step, "overhead": sum(worst.overhead.values())}
    name = max(sizes, key=lambda category: sizes[category])
    share = 100 * sizes[name] / worst.total_bytes
    words = found.strategy.split()
    done = {word for word in words if word.startswith(("zero=", "recompute=", "offload."))}
    fixes = [fix for fix in _REMEDIES[name] if fix.split(",")[0] not in done and (fix != "zero=1" or "zero=0" in words)]
    fixes = [fix for fix in fixes if fix != "zero=2" or not {"zero=2", "zero=3"} & done]
    size = f"{show_bytes(sizes[name])} ({share:.0f}%, {worst.phase})"
    yield Text(f"most of it is {name}: {size}; smaller with {', '.join(fixes)}")
