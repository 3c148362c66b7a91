"""Errors, ranking and regret, on numbers made by hand."""

from __future__ import annotations

import pytest

from meshwright.cost.published.metrics import Point, concordance, errors, regret


def point(predicted: float, published: float, **fixed: str) -> Point:
    return Point(predicted=predicted, published=published, **fixed)


def test_errors_are_absolute_and_signed() -> None:
    found = errors([point(1.1, 1.0), point(1.6, 2.0), point(4.0, 4.0)])
    assert found is not None
    assert found.count == 3
    assert found.median_absolute == pytest.approx(0.1)
    assert found.mean_absolute == pytest.approx(0.1)
    assert found.median_signed == pytest.approx(0.0)
    assert found.mean_signed == pytest.approx(-0.1 / 3)
    assert errors([]) is None


def test_pairs_are_of_alike_points_that_differ_by_more_than_5_percent() -> None:
    same = [point(1.0, 1.0, alike="a"), point(0.9, 1.04, alike="a"), point(0.5, 2.0, alike="a")]
    other = [point(1.0, 1.0, alike="b"), point(2.0, 3.0, alike="b"), point(9.0, 9.0)]
    # 1.0 and 1.04 are too near; 0.5 is predicted below both others, and wrong twice; b is right.
    found = concordance([*same, *other])
    assert found is not None
    assert found[0] == 3
    assert found[1] == pytest.approx(1 / 3)
    assert concordance(same[:2]) is None


def test_equal_predictions_count_as_half() -> None:
    assert concordance([point(1.0, 1.0, alike="a"), point(1.0, 2.0, alike="a")]) == (1, 0.5)


def test_regret_is_what_the_first_choice_costs() -> None:
    found = regret(
        [
            point(1.0, 1.2, group="g", choice="tp=2"),
            point(1.1, 1.0, group="g", choice="tp=4"),
            point(5.0, 5.0, group="h", choice="tp=2"),
            point(6.0, 6.0, group="h", choice="tp=4"),
            point(1.0, 9.0, group="alone", choice="tp=2"),
            point(1.0, 9.0, group="twice", choice="tp=2"),
            point(1.0, 8.0, group="twice", choice="tp=2"),
        ]
    )
    assert found is not None
    assert found.groups == 2
    assert found.mean == pytest.approx(0.1)
    assert found.largest == pytest.approx(0.2)


def test_a_strategy_measured_several_times_counts_once() -> None:
    again = [point(1.0, value, group="g", choice="tp=2") for value in (1.0, 1.1, 9.0)]
    found = regret([*again, point(2.0, 1.0, group="g", choice="tp=4")])
    assert found is not None
    assert found.largest == pytest.approx(0.1)
