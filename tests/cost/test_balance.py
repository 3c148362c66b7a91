"""How stages are cut: the slowest is as fast as can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.balance import balanced_layers, balanced_ranks


def slowest(sizes: tuple[int, ...], layers: list[float], beside: list[float], paces: list[float]) -> float:
    start, most = 0, 0.0
    for size, more, pace in zip(sizes, beside, paces, strict=True):
        most = max(most, (more + sum(layers[start : start + size])) / pace)
        start += size
    return most


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_cut_is_better(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 4))
    layers = data.draw(st.lists(st.floats(0.1, 5), min_size=stages, max_size=8))
    beside = data.draw(st.lists(st.floats(0, 4), min_size=stages, max_size=stages))
    paces = data.draw(st.lists(st.floats(0.3, 1), min_size=stages, max_size=stages))
    found = balanced_layers(layers, beside, paces)
    assert sum(found) == len(layers)
    assert min(found) >= 1
    cuts = itertools.combinations(range(1, len(layers)), stages - 1)
    every = [tuple(b - a for a, b in itertools.pairwise((0, *cut, len(layers)))) for cut in cuts]
    best = min(slowest(sizes, layers, beside, paces) for sizes in every)
    assert slowest(found, layers, beside, paces) == pytest.approx(best, rel=1e-6)


def test_seven_layers_on_two_stages() -> None:
    assert sorted(balanced_layers([1.0] * 7, [0.0, 0.0])) == [3, 4]
    assert balanced_layers([1.0] * 7, [0.0, 1.0]) == (4, 3)  # the head takes as long as a layer


def test_equals_are_even_and_later_stages_hold_more() -> None:
    assert balanced_layers([1.0] * 10, [0.0] * 4) == (2, 2, 3, 3)


def test_a_faster_device_holds_more_layers() -> None:
    assert balanced_layers([1.0] * 12, [0.0, 0.0], [1.0, 0.5]) == (8, 4)


def test_ranks_with_several_stages_are_balanced_as_ranks() -> None:
    # Stages 0 to 7 dealt out to 4 ranks; the head takes as long as two layers.
    sizes = balanced_ranks([1.0] * 32, [0.0] * 7 + [2.0], [0, 1, 2, 3, 0, 1, 2, 3])
    loads = [sizes[rank] + sizes[rank + 4] for rank in range(4)]
    loads[3] += 2
    assert sum(sizes) == 32
    assert max(loads) == 9
    assert min(sizes) >= 1
