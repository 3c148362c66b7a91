"""The lattice of what can be combined, and the short list of it that every run of the tests takes."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

from tests.harness.cases import Case
from tests.harness.pairwise import Row, pairwise

__all__ = ["FACTORS", "SHORT", "WORLDS", "allowed", "as_case", "layouts", "short_list", "strategies"]

WORLDS = (2, 3, 4, 5, 8, 1)

#: A shard group is a size, or 0 for all ranks. `first` recomputes the first two blocks only.
FACTORS: dict[str, tuple[Any, ...]] = {
    "world": WORLDS,
    "zero": (3, 2, 1, 0),
    "shard": (0, 2, 4, 1),
    "accumulation": (3, 1),
    "recompute": ("none", "selective", "full", "first"),
    "clip": (0.1, 0.0),
    "tied": (True, False),
    "dtype": ("float64", "float32"),
    "model": ("decoder", "decoder-10", "llama", "gpt2", "mlp"),
    "optimizer": ("sgd", "adamw", "adamw-default-eps"),
    "prefetch": (0, 1, 2),
    "unit_blocks": (1, 2),
    "valid": ("unequal", "all"),
    "source": ("builder", "module"),
    "scope": ("global", "local"),
}

#: Eight ranks take as long as all others together: they are in the whole lattice.
SHORT = FACTORS | {"world": tuple(world for world in WORLDS if world < 8)}


def allowed(row: Row) -> bool:
    """Whether a combination is legal; a part of one may still become legal."""
    world, zero, shard = row.get("world"), row.get("zero"), row.get("shard")
    if shard and world and (shard > world or world % shard or (shard == world > 1)):
        return False  # the whole world is shard 0
    if shard and zero == 0:
        return False
    return not (row.get("prefetch") and zero is not None and zero != 3)


def as_case(row: Row) -> Case:
    """The case of a combination."""
    row = dict(row)
    if row.get("recompute") == "first":
        row |= {"recompute": "full", "recompute_blocks": 2}
    return Case(**row)


@cache
def short_list() -> tuple[Case, ...]:
    """Cases that together have every pair of levels, with fewer than eight ranks."""
    return tuple(as_case(row) for row in pairwise(SHORT, allowed))


def layouts() -> list[Row]:
    """Every world with every ZeRO stage and shard group."""
    names = ("world", "zero", "shard")
    rows = [dict(zip(names, levels, strict=True)) for levels in product(*(FACTORS[name] for name in names))]
    return [row for row in rows if allowed(row)]


def strategies() -> list[Row]:
    """What is combined with each layout in the whole lattice."""
    names = ("accumulation", "recompute", "clip", "tied")
    return [dict(zip(names, levels, strict=True)) for levels in product(*(FACTORS[name] for name in names))]
