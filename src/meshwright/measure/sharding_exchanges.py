"""Which collectives tensor parallelism runs for a microbatch, and where: what the hooks in `runtime/tp` do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from meshwright.measure.sharding_notes import Told
from meshwright.spec.sharded import Exchange

__all__ = ["find_exchanges"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_REDUCE, _GATHER, _SCATTER = "all-reduce", "all-gather", "reduce-scatter"


@dataclass
class _Place:
    """What happens in one block, or in one module outside of blocks."""

    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    why: list[str] = field(default_factory=list)


def find_exchanges(told: Told) -> tuple[Exchange, ...]:
    """The collectives of the forward and of the backward, blocks that are alike together.

    Divided matrices that stand in one module are taken to share one input.
    """
    places: dict[str, _Place] = {}
    for name, (forward, backward, why) in _all(told):
        place = places.setdefault(_home(told, name), _Place())
        place.forward.update(forward)
        place.backward.update(backward)
        place.why.append(why)
    groups: dict[tuple[str, str, str, str], list[_Place]] = {}
    for name, place in places.items():
        key = (_NUMBER.sub("*", name), str(place.forward), str(place.backward), "; ".join(place.why))
        groups.setdefault(key, []).append(place)
    return tuple(
        Exchange(
            name=name,
            count=len(found),
            forward=dict(found[0].forward),
            backward=dict(found[0].backward),
            why=why,
        )
        for (name, _, _, why), found in groups.items()
    )


_Found = tuple[str, tuple[list[str], list[str], str]]


def _all(told: Told) -> Iterable[_Found]:
    """In the model's order."""
    order = {name: index for index, name in enumerate(dict(told.model.named_modules()))}
    found = [*_regions(told), *_modules(told)]
    yield from sorted(found, key=lambda entry: order.get(entry[0], len(order)))


def _regions(told: Told) -> Iterable[_Found]:
    for region in told.sharding.regions:
        leaves = [name.rpartition(".")[2] for name in region.columns]
        named = ", ".join(leaves)
        cut = told.sequence_parallel
        forward, backward = ([_GATHER], [_SCATTER]) if cut else ([], [_REDUCE])
        if region.gathers:
            yield (
                region.columns[0],
                ([*forward, *[_GATHER] * len(leaves)], backward, f"outputs of {named} and the input they share"),
            )
        else:
            yield region.columns[0], (forward, backward, f"input of {named}")


def _modules(told: Told) -> Iterable[_Found]:
    cut = told.sequence_parallel
    modules = dict(told.model.named_modules())
    final = any(entry.style == "sequence" for entry in told.sharding.styles.values())
    for name, entry in told.sharding.styles.items():
        leaf = name.rpartition(".")[2]
        if entry.style in ("rowwise", "split-input"):
            forward, backward = ([_SCATTER], [_GATHER]) if cut else ([_REDUCE], [])
            taken = [_GATHER] if entry.style == "split-input" else []
            yield name, (forward, [*backward, *taken], f"sum of {leaf}")
        elif entry.style == "experts":
            yield name, ([_REDUCE], [_REDUCE] * 2, f"sum of {leaf}, and their inputs and weights")
        elif entry.style == "vocab" and isinstance(modules[name], nn.Embedding):
            yield name, ([_REDUCE], [], "rows that a rank does not have")
        elif entry.style == "vocab":
            gathers = cut and final
            yield name, ([_GATHER] if gathers else [], [_SCATTER] if gathers else [_REDUCE], f"input of {leaf}")
    if cut and told.blocks:
        yield told.blocks[0], ([], [_GATHER], "the sequence is cut")
        if not final:
            yield told.blocks[-1], ([_GATHER], [], "the sequence is put together")


def _home(told: Told, name: str) -> str:
    return next((block for block in told.blocks if name == block or name.startswith(f"{block}.")), name)
