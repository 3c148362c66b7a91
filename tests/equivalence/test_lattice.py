"""The short list of strategies is what it says: it has every pair of options that is possible at all."""

import random
from itertools import combinations

import pytest

from tests.equivalence.lattice import SHORT, allowed, as_case, layouts, short_list
from tests.harness.cases import Case
from tests.harness.pairwise import Row, feasible_pairs, pairs_of, pairwise


def test_the_short_list_has_every_pair() -> None:
    rows = pairwise(SHORT, allowed)
    assert [as_case(row) for row in rows] == list(short_list())
    assert all(allowed(row) and set(row) == set(SHORT) for row in rows)
    assert set().union(*map(pairs_of, rows)) == feasible_pairs(SHORT, allowed)


def test_feasible_pairs_are_those_of_random_allowed_rows() -> None:
    """Counted in another way than the algorithm does: draw rows, keep the allowed ones, collect their pairs."""
    draw = random.Random(0)
    seen = set()
    for _ in range(20_000):
        row = {name: draw.choice(levels) for name, levels in SHORT.items()}
        if allowed(row):
            seen |= pairs_of(row)
    assert seen == feasible_pairs(SHORT, allowed)


def test_every_allowed_layout_is_legal_and_every_other_is_not_asked_for() -> None:
    for row in layouts():
        strategy = Case(**row).strategy
        assert strategy.world_size == row["world"]
        assert strategy.shard == (row["shard"] or (row["world"] if row["zero"] else 1))
    assert {(row["world"], row["shard"]) for row in layouts() if row["shard"] > 1} == {(4, 2), (8, 2), (8, 4)}


def test_a_pair_that_cannot_be_is_left_out() -> None:
    def no_pair(row: Row) -> bool:
        return (row.get("a"), row.get("b")) != (1, 1)

    factors = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    rows = pairwise(factors, no_pair)
    every = {(first, second) for row in rows for first, second in combinations(sorted(row.items()), 2)}
    assert (("a", 1), ("b", 1)) not in every
    assert len(every) == 11


@pytest.mark.parametrize("case", short_list(), ids=str)
def test_references_share_the_training(case: Case) -> None:
    reference = case.reference
    assert reference.job == case.job
    assert reference.reference == reference
    assert reference.strategy.world_size == 1
