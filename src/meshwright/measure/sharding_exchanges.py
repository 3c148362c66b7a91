"""Which collectives tensor parallelism runs for a microbatch, and where: what the hooks in `runtime/tp` do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.measure.sharding_notes import Told
from meshwright.runtime.tp.divide import APART, Region
from meshwright.spec.sharded import Exchange

__all__ = ["find_exchanges"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_REDUCE, _GATHER, _SCATTER = "all-reduce", "all-gather", "reduce-scatter"


@dataclass(frozen=True)
class _Event:
    """What one module does in a forward and in a backward, and where that is told."""

    module: str
    place: str
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    why: str


#: What all events at a place do: forward, backward and why.
_Done = tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...]


def find_exchanges(told: Told) -> tuple[Exchange, ...]:
    """The collectives of the forward and of the backward, blocks that are alike together.

    Divided matrices that stand in one module are taken to share one input, apart from an MLP's beside attention.
    """
    order = {name: index for index, (name, _) in enumerate(told.model.named_modules())}
    places: dict[str, list[_Event]] = {}
    for event in sorted([*_ends(told), *_regions(told), *_modules(told)], key=lambda event: order[event.module]):
        places.setdefault(event.place, []).append(event)
    groups: dict[tuple[str, _Done], int] = {}
    for place, events in places.items():
        pattern = _NUMBER.sub("*", place) if place in told.blocks else place
        done = tuple((event.forward, event.backward, event.why) for event in events)
        groups[pattern, done] = groups.get((pattern, done), 0) + 1
    return tuple(
        Exchange(
            name=pattern,
            count=count,
            forward=dict(Counter(kind for forward, _, _ in done for kind in forward)),
            backward=dict(Counter(kind for _, backward, _ in done for kind in backward)),
            why="; ".join(why for _, _, why in done),
        )
        for (pattern, done), count in groups.items()
    )


def _event(told: Told, name: str, forward: Sequence[str], backward: Sequence[str], why: str) -> _Event:
    place = next((block for block in told.blocks if name == block or name.startswith(f"{block}.")), name)
    return _Event(name, place, tuple(forward), tuple(backward), why)


def _regions(told: Told) -> Iterable[_Event]:
    forward, backward = ([_GATHER], [_SCATTER]) if told.sequence_parallel else ([], [_REDUCE])
    for region in told.sharding.regions:
        for columns in _inputs(told, region):
            leaves = [name.rpartition(".")[2] for name in columns]
            outputs = [_GATHER] * len(leaves) if region.gathers else []
            why = f"{'outputs and ' if outputs else ''}input of {', '.join(leaves)}"
            yield _event(told, columns[0], [*forward, *outputs], backward, why)


def _inputs(told: Told, region: Region) -> list[list[str]]:
    """The columns of a region by what enters them: an MLP beside attention, in one module, has an input of its own."""
    heads, modules = region.heads, dict(told.model.named_modules())
    if heads is None or len(region.columns) <= APART:
        return [list(region.columns)]
    sizes = {heads.queries * heads.size, heads.groups * heads.size}
    of_heads = [name for name in region.columns if getattr(modules[name], "out_features", None) in sizes]
    return [part for part in (of_heads, [name for name in region.columns if name not in of_heads]) if part]


def _modules(told: Told) -> Iterable[_Event]:
    modules = dict(told.model.named_modules())
    for name, entry in told.sharding.styles.items():
        leaf = name.rpartition(".")[2]
        if entry.style in ("rowwise", "split-input"):
            forward, backward = ([_SCATTER], [_GATHER]) if told.sequence_parallel else ([_REDUCE], [])
            taken = [_GATHER] if entry.style == "split-input" else []
            yield _event(told, name, forward, [*backward, *taken], f"sum of {leaf}")
        elif entry.style == "experts":
            yield _event(told, name, [_REDUCE], [_REDUCE] * 2, f"sum of {leaf}, their inputs and their weights")
        elif entry.style == "vocab" and isinstance(modules[name], nn.Embedding):
            yield _event(told, name, [_REDUCE], [], "rows that a rank does not have")
        elif entry.style == "vocab":
            joins = told.sequence_parallel and _final_norm(told)
            forward, backward = ([_GATHER], [_SCATTER]) if joins else ([], [_REDUCE])
            yield _event(told, name, forward, backward, f"input of {leaf}")


def _ends(told: Told) -> Iterable[_Event]:
    """Where sequences are cut, and put together again."""
    if told.sequence_parallel and told.blocks:
        first, last = told.blocks[0], told.blocks[-1]
        yield _Event(first, f"before {first}", (), (_GATHER,), "the sequence is cut")
        if not _final_norm(told):
            yield _Event(last, f"after {last}", (_GATHER,), (), "the sequence is put together")


def _final_norm(told: Told) -> bool:
    """Whether the head puts sequences together, behind a norm of cut ones."""
    return any(entry.style == "sequence" for entry in told.sharding.styles.values())
