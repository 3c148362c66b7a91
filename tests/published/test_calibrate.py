"""Factors from a few rows: what they were made with is found again, and there are never more than rows."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.cost.published.calibrate import GROUPS, Factors, calibrate

PRODUCTS, NORMS, REDUCES = "matrix products", "memory-bound operations", "gradient reduction"
TERMS = (
    {PRODUCTS: 1.0, NORMS: 0.3, REDUCES: 0.1},
    {PRODUCTS: 2.0, NORMS: 0.3, REDUCES: 1.0},
    {PRODUCTS: 0.5, NORMS: 0.6, REDUCES: 0.2},
    {PRODUCTS: 4.0, NORMS: 0.3, REDUCES: 0.4},
)


def measured(terms: dict[str, float], products: float, norms: float, reduces: float) -> float:
    return products * terms[PRODUCTS] + norms * terms[NORMS] + reduces * terms[REDUCES]


def test_nothing_changes_without_rows_and_with_rows_that_are_right() -> None:
    for rows in ([], [(terms, sum(terms.values())) for terms in TERMS]):
        factors = calibrate(rows)
        assert factors.values == pytest.approx((1.0,) * len(GROUPS))
        assert factors.seconds(TERMS[0]) == pytest.approx(1.4)


@pytest.mark.parametrize("true", [(1.2, 1.2, 1.2), (1.1, 1.5, 0.8), (0.8, 0.9, 2.0)])
def test_rows_that_are_left_out_are_predicted_well(true: tuple[float, float, float]) -> None:
    factors = calibrate([(terms, measured(terms, *true)) for terms in TERMS[:3]])
    seconds = measured(TERMS[3], *true)
    before = abs(sum(TERMS[3].values()) / seconds - 1)
    assert abs(factors.seconds(TERMS[3]) / seconds - 1) < before / 2


def test_one_row_sets_one_factor_and_two_set_two() -> None:
    rows = [(terms, measured(terms, 1.1, 1.5, 0.8)) for terms in TERMS]
    one, two = calibrate(rows[:1]).values, calibrate(rows[:2]).values
    assert one[0] != 1
    assert one[1:] == (1.0, 1.0)
    assert two[1] != 1
    assert two[2] == 1.0


SECONDS = {PRODUCTS: st.floats(0.1, 10), NORMS: st.floats(0.01, 10), REDUCES: st.floats(0.01, 10)}


@given(st.lists(st.tuples(st.fixed_dictionaries(SECONDS), st.floats(0.4, 2.5)), max_size=6))
@example(
    [
        ({PRODUCTS: 1, NORMS: 1, REDUCES: 3}, 1.5),
        ({PRODUCTS: 1, NORMS: 2, REDUCES: 2}, 0.4375),
        ({PRODUCTS: 3, NORMS: 1, REDUCES: 2}, 2.5),
    ]
)
@settings(deadline=None, max_examples=60)
def test_factors_are_always_positive_and_their_penalty_is_a_minimum(off: list[tuple[dict[str, float], float]]) -> None:
    rows = [(terms, factor * sum(terms.values())) for terms, factor in off]
    found = calibrate(rows)
    assert all(0 < value < math.inf for value in found.values)
    if not rows:
        return
    for place in range(min(len(rows), len(GROUPS))):
        for change in (0.98, 1.02):
            moved = list(found.values)
            moved[place] *= change
            assert cost(found.values, rows) <= cost(tuple(moved), rows) * (1 + 1e-6)


def cost(values: tuple[float, ...], rows: list[tuple[dict[str, float], float]]) -> float:
    """What is minimised, written out again from its definition."""
    penalty = sum((math.log(value) / width) ** 2 for value, (_, _, width) in zip(values, GROUPS, strict=True))
    misses = [math.log(Factors(values=values).seconds(terms) / seconds) / 0.03 for terms, seconds in rows]
    return penalty + sum(miss**2 for miss in misses)
