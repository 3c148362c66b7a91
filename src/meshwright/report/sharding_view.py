"""A model over tensor-parallel ranks on the screen: what is split how, what is whole and why, who holds how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from meshwright.report.style import numbers
from meshwright.spec.sharded import Exchange, Sharded, ShardedModules
from meshwright.spec.units import show_bytes

__all__ = ["sharding_table", "sharding_view"]

#: Screens that have room for what is said of each module beside it.
_WIDE = 130
_SAID_BY = {"annotation": "you", "default": "-"}


def sharding_view(found: Sharded) -> RenderableType:
    """The modules, the totals, and the collectives of a microbatch."""
    return _View(found)


def sharding_table(found: Sharded) -> dict[str, Any]:
    """The same as JSON has it: shapes of every rank, bytes, and sums."""
    sums = {"even": found.even, "largest_rank_bytes": max(found.rank_bytes), "replicated_share": found.replicated_share}
    return asdict(found) | sums


class _View:
    """The view, in the width that there is."""

    def __init__(self, found: Sharded) -> None:
        self._found = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self._found
        yield Text(
            f"{found.kind} of {found.model}: {found.parameters:,} parameters over {found.tp} tensor-parallel "
            f"{'rank' if found.tp == 1 else 'ranks'}, stored in {found.dtype}"
            + (", sequences cut between divided matrices" if found.sequence_parallel else "")
        )
        yield from _modules(found, wide=options.max_width >= _WIDE)
        yield from map(Text, _sums(found))
        if not found.even:
            yield _ranks(found)
        if found.exchanges:
            yield _exchanges(found)


def _modules(found: Sharded, *, wide: bool) -> Iterable[RenderableType]:
    table = numbers("How the modules are held")
    for name in ("module", "style", "said by", "whole", "on rank 0"):
        table.add_column(name, overflow="fold")
    table.add_column("a rank", justify="right", no_wrap=True)
    table.add_column("note", overflow="fold", justify="left" if wide else "right")
    known: dict[str, int] = {}
    for row in found.modules:
        note = "; ".join(row.notes)
        if not wide and note:
            note = str(known.setdefault(note, len(known) + 1))
        table.add_row(
            Text(row.name or "(the model itself)") + Text(f" x{row.count}" if row.count > 1 else "", style="dim"),
            row.style,
            _SAID_BY.get(row.source, row.source),
            Text(_shape(row.parameters[0].shape)),
            Text(_on_rank_0(row)),
            show_bytes(max(row.rank_bytes)) if row.whole_bytes else "-",
            Text(note, style="dim" if wide else ""),
        )
    yield table
    for note, number in known.items():
        yield Text(f"{number:2}  {note}")
    if known:
        yield Text()


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "one number"


def _on_rank_0(row: ShardedModules) -> str:
    """The first parameter's shape on rank 0: that of the weight, where there is one."""
    one = row.parameters[0]
    if one.rank_shapes[0] == one.shape and one.even:
        return "all of it"
    return _shape(one.rank_shapes[0]) + ("" if one.even else ", others differ")


def _sums(found: Sharded) -> Iterable[str]:
    most = max(found.rank_parameters)
    yield f"whole: {found.parameters:,} parameters, {show_bytes(found.whole_bytes)}"
    largest = "" if found.even else " on the largest"
    yield f"a rank{largest}: {most:,} parameters, {show_bytes(max(found.rank_bytes))}"
    if found.tp > 1:
        share = f"{100 * found.replicated_share:.2g}% of the model"
        yield f"whole on every rank: {found.replicated_parameters:,} parameters, {share}"
    if found.padding:
        yield f"padding, on all ranks together: {found.padding:,} elements"
    if found.shares:
        yield f"gradients summed over tp once a step, in one all-reduce: those of {found.shares:,} parameters"


def _ranks(found: Sharded) -> RenderableType:
    table = numbers("Ranks that hold unequally much")
    table.add_column("ranks")
    table.add_column("parameters", justify="right")
    table.add_column("bytes", justify="right")
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, held in enumerate(zip(found.rank_parameters, found.rank_bytes, strict=True)):
        groups.setdefault(held, []).append(rank)
    for (parameters, size), ranks in groups.items():
        table.add_row(_ranges(ranks), f"{parameters:,}", show_bytes(size))
    return table


def _ranges(ranks: Sequence[int]) -> str:
    """`0-3, 5` of increasing numbers."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _exchanges(found: Sharded) -> RenderableType:
    table = numbers("Collectives over tp for each microbatch")
    for name in ("where", "forward", "backward", "what they bring together"):
        table.add_column(name, overflow="fold")
    for place in found.exchanges:
        where = Text(place.name) + Text(f" x{place.count}" if place.count > 1 else "", style="dim")
        table.add_row(where, _counts(place.forward), _counts(place.backward), Text(place.why, style="dim"))
    table.add_section()
    total = {way: _total(found.exchanges, way) for way in ("forward", "backward")}
    table.add_row("in all", _counts(total["forward"]), _counts(total["backward"]), "")
    return table


def _total(exchanges: Sequence[Exchange], way: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for place in exchanges:
        for kind, count in getattr(place, way).items():
            total[kind] = total.get(kind, 0) + count * place.count
    return total


def _counts(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" + ("s" if count > 1 else "") for kind, count in kinds.items()) or "-"
