"""How tensor parallelism divides a model, told without running it: by the runtime's own plan and cuts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import ConfigError
from meshwright.measure.sharding_exchanges import find_exchanges
from meshwright.measure.sharding_notes import Told, notes_of
from meshwright.measure.whole_model import whole_model
from meshwright.runtime.cuts import Cut
from meshwright.runtime.tp.apply import require_one_stream
from meshwright.runtime.tp.divide import divide
from meshwright.runtime.tp.plan import Assigned, plan_sharding
from meshwright.runtime.units import find_blocks, owners
from meshwright.spec import Strategy
from meshwright.spec.job import DTYPE_BYTES
from meshwright.spec.sharded import Sharded, ShardedModules, ShardedParameter

__all__ = ["explain_sharding"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def explain_sharding(
    model: Any,
    tp: int,
    *,
    annotations: Mapping[str, str] | None = None,
    sequence_parallel: bool = False,
    dtype: str = "float32",
    name: str = "",
) -> Sharded:
    """What tensor parallelism over `tp` ranks splits how, what it replicates and why, and the bytes of each rank.

    Args:
        model: a name of the catalogue, the path of a `config.json` or its folder, a mapping with its keys; a function
            that builds a module, or its name (`package.module:function`, `file.py:function`); a module. Nothing of a
            module is changed, and no values are made for the others.
        tp: tensor-parallel ranks.
        annotations: as `Engine(..., sharding=...)` takes them.
        sequence_parallel: whether activations between divided matrices are cut along the tokens.
        dtype: of the stored parameters.
        name: of the model, where it is not the one it is found by.

    Raises:
        ConfigError: the model cannot be found or built, or the degree, an annotation or the dtype cannot be.
        UnsupportedCombination: the model cannot be divided over so many ranks, and what would do.
    """
    Strategy(tp=tp, sequence_parallel=sequence_parallel)  # its errors are those of the run
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {dtype!r} is not known", fix=f"use one of {', '.join(DTYPE_BYTES)}")
    module, found_name = whole_model(model)
    styles = plan_sharding(module, annotations or {})
    blocks = find_blocks(module)
    if sequence_parallel:
        require_one_stream(module, blocks, [entry.style for entry in styles.values()])
    names = [block for block, _ in blocks]
    sharding = divide(module, styles, tp, blocks=names if sequence_parallel else [])
    told = Told(module, sharding, tp, tuple(names), sequence_parallel)
    rows = _rows(_entries(told), DTYPE_BYTES[dtype])
    cuts = sharding.cuts.values()
    ranks = [sum(_size(cut.local_shape(rank)) for cut in cuts) for rank in range(tp)]
    whole = sum(_size(cut.shape) for cut in cuts)
    return Sharded(
        model=name or found_name,
        kind=type(module).__name__,
        tp=tp,
        sequence_parallel=sequence_parallel,
        dtype=dtype,
        modules=rows,
        parameters=whole,
        rank_parameters=tuple(ranks),
        replicated_parameters=sum(_size(cut.shape) for cut in cuts if cut.replicated),
        padding=sum(_padding(cut, tp) for cut in cuts),
        whole_bytes=whole * DTYPE_BYTES[dtype],
        rank_bytes=tuple(count * DTYPE_BYTES[dtype] for count in ranks),
        exchanges=find_exchanges(told) if tp > 1 else (),
        shares=sum(cut.partial for cut in cuts) if tp > 1 else 0,
    )


@dataclass(frozen=True)
class _Entry:
    """A module that holds parameters; those that are counted with another module have no part in `counted`."""

    name: str
    assigned: Assigned
    cuts: tuple[tuple[str, Cut], ...]
    counted: frozenset[str]
    notes: tuple[str, ...]

    @property
    def pattern(self) -> str:
        return _NUMBER.sub("*", self.name)


def _entries(told: Told) -> Iterable[_Entry]:
    first = {
        id(getattr(place.module, place.name)): name for name, places in owners(told.model).items() for place in places
    }
    for name, module in told.model.named_modules():
        held = dict(module.named_parameters(recurse=False))
        if not held:
            continue
        full = {key: f"{name}.{key}" if name else key for key in held}
        shared = {key: first[id(value)] for key, value in held.items() if first[id(value)] != full[key]}
        cuts = tuple((key, told.sharding.cuts[first[id(value)]]) for key, value in held.items())
        entry = told.sharding.styles.get(name, Assigned("replicate", "default"))
        notes = notes_of(told, name, module, entry, dict(cuts))
        for key, other in shared.items():
            notes.append(f"{key} is tied to {_NUMBER.sub('*', other)}, and counted there")
        yield _Entry(name, entry, cuts, frozenset(held) - set(shared), tuple(notes))


def _rows(entries: Iterable[_Entry], width: int) -> tuple[ShardedModules, ...]:
    groups: dict[Any, list[_Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.pattern, entry.assigned, entry.cuts, entry.counted, entry.notes), []).append(entry)
    patterns = [key[0] for key in groups]
    return tuple(_row(members, width, several=patterns.count(members[0].pattern) > 1) for members in groups.values())


def _row(members: Sequence[_Entry], width: int, *, several: bool) -> ShardedModules:
    one = members[0]
    ranks = range(len(one.cuts[0][1].segments))
    counted = [cut for key, cut in one.cuts if key in one.counted]
    name = one.pattern if len(members) > 1 or several else one.name
    return ShardedModules(
        name=_ranges(members) if several else name,
        count=len(members),
        style=one.assigned.style,
        source=one.assigned.source,
        parameters=tuple(
            ShardedParameter(name=key, shape=cut.shape, rank_shapes=tuple(cut.local_shape(rank) for rank in ranks))
            for key, cut in one.cuts
        ),
        whole_bytes=width * len(members) * sum(_size(cut.shape) for cut in counted),
        rank_bytes=tuple(width * len(members) * sum(_size(cut.local_shape(rank)) for cut in counted) for rank in ranks),
        notes=one.notes,
    )


def _ranges(members: Sequence[_Entry]) -> str:
    """The name with the numbers of the blocks that are meant: `layers.0-2,5.mlp.up`; further numbers are `*`."""
    numbers = sorted({int(found[0]) for member in members if (found := _NUMBER.search(member.name))})
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return members[0].pattern.replace("*", text, 1)


def _size(shape: Sequence[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _padding(cut: Cut, ranks: int) -> int:
    if not cut.shape or not cut.shape[cut.dim]:
        return 0
    row = _size(cut.shape) // cut.shape[cut.dim]
    return row * sum(cut.length[rank] - sum(size for _, size in cut.segments[rank]) for rank in range(ranks))
