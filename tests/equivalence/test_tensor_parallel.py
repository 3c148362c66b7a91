"""Tensor parallelism gives the numbers of one process: loss, norms, each gradient and each update, over three steps.

`make test` takes a short list in which every pair of options occurs together; `make test-all` longer ones and the whole
lattice.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.harness.cases import Case, check, check_many
from tests.harness.pairwise import Row, pairwise

#: Tensor-parallel ranks, data-parallel ranks.
LAYOUTS = ((2, 1), (3, 1), (4, 1), (2, 2), (2, 4), (4, 2))
#: Models whose heads the ranks can share: 6 queries with 2 keys and values (over 3 ranks each has all keys and picks),
#: 8 with 2 (over 4 ranks each key/value head is held twice), fused and transposed weights.
MODELS = {"decoder": (2, 3), "llama": (2, 3), "decoder-16": (2, 4), "gpt2-12": (2, 3, 4)}

FACTORS: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "model": tuple(MODELS),
    "zero": (3, 2, 1, 0),
    "shard": (0, 2),
    "sequence_parallel": (True, False),
    "accumulation": (3, 1),
    "recompute": ("none", "selective", "full"),
    "clip": (0.1, 0.0),
    "tied": (True, False),
    "dtype": ("float64", "float32"),
    "optimizer": ("sgd", "adamw", "adamw-default-eps"),
    "source": ("builder", "module"),
    "scope": ("global", "local"),
}

#: Eight ranks take as long as all others together: they have a test of their own. Every ZeRO stage beside tensor
#: parallelism is in `test_tensor_reports.py`, and Llama in `test_tensor_families.py`.
SHORT = FACTORS | {
    "layout": ((2, 1), (3, 1), (4, 1), (2, 2)),
    "model": ("decoder", "decoder-16", "gpt2-12"),
    "zero": (3, 1, 0),
    "shard": (0,),
    "accumulation": (2, 1),
}


def allowed(row: Row) -> bool:
    """Whether a combination is legal; a part of one may still become legal."""
    layout, model, zero, shard = row.get("layout"), row.get("model"), row.get("zero"), row.get("shard")
    if layout and model and layout[0] not in MODELS[model]:
        return False
    if shard and (zero == 0 or (layout and layout[1] != 4)):
        return False
    return not (zero and layout and layout[1] == 1)


def as_case(row: Row) -> Case:
    """The case of a combination."""
    row = dict(row)
    tp, dp = row.pop("layout")
    return Case(world=tp * dp, tp=tp, **row)


@cache
def long_list() -> tuple[Case, ...]:
    """Cases that together have every pair of levels."""
    return tuple(as_case(row) for row in pairwise(FACTORS, allowed))


@cache
def short_list() -> tuple[Case, ...]:
    """Cases that together have every pair of the short list's levels."""
    return tuple(as_case(row) for row in pairwise(SHORT, allowed))


@pytest.mark.parametrize("case", short_list(), ids=str)
def test_pairs_of_options(case: Case) -> None:
    reference = check(case)
    for step in reference.steps:
        assert (step.clipped_norm < step.grad_norm) == bool(case.clip), "the case does not clip where it should"


def test_hybrid_groups_of_ranks_that_share_a_model() -> None:
    check(Case(world=8, tp=2, zero=3, shard=2, sequence_parallel=True, accumulation=2, tied=True, clip=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in long_list() if case not in short_list()], ids=str)
def test_more_pairs_of_options(case: Case) -> None:
    test_pairs_of_options(case)


def lattice() -> list[Row]:
    """Every layout with every model, ZeRO stage and shard group."""
    names = ("layout", "model", "zero", "shard")
    rows = [dict(zip(names, levels, strict=True)) for levels in product(*(FACTORS[name] for name in names))]
    return [row for row in rows if allowed(row)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", lattice(), ids=lambda row: "-".join(map(str, row.values())))
def test_whole_lattice(row: Row) -> None:
    names = ("sequence_parallel", "accumulation", "recompute", "clip", "tied")
    strategies = [dict(zip(names, levels, strict=True)) for levels in product(*(FACTORS[name] for name in names))]
    check_many([as_case(row | strategy) for strategy in strategies], timeout_s=1500)
