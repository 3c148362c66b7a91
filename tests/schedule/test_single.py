"""One stage's schedule: counts of the ZeRO table, order, and a validator that refuses what cannot run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import PlanError
from meshwright.schedule import Action, Schedule, single_stage, validate, windows


@given(
    zero=st.integers(0, 3),
    shard=st.integers(2, 8),
    replicas=st.integers(1, 4),
    m=st.integers(1, 6),
    u=st.integers(1, 9),
)
def test_counts_are_those_of_the_zero_table(zero: int, shard: int, replicas: int, m: int, u: int) -> None:
    dp = shard * replicas
    schedule = single_stage(zero=zero, shard=shard if zero else 1, dp=dp, microbatches=m, units=u)
    gathers = {0: 0, 1: u, 2: u, 3: 2 * m * u}[zero]
    reduces = {0: u, 1: u, 2: m * u, 3: m * u}[zero]
    assert schedule.count("gather") == schedule.count("release") == gathers
    assert schedule.count("reduce") == reduces
    assert schedule.count("forward") == schedule.count("backward") == m


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_one_rank_neither_gathers_nor_reduces(zero: int) -> None:
    schedule = single_stage(zero=zero, shard=1, dp=1, microbatches=3, units=4)
    assert [action.kind for action in schedule.ranks[0]] == ["forward", "backward"] * 3


def test_windows_hand_each_compute_action_what_stands_around_it() -> None:
    schedule = single_stage(zero=3, shard=2, dp=2, microbatches=1, units=2)
    forward, backward = windows(schedule.ranks[0])
    assert (forward.action.kind, forward.gathers, forward.reduces, forward.releases) == ("forward", (0, 1), (), (0, 1))
    assert (backward.action.kind, backward.gathers) == ("backward", (1, 0))
    assert (backward.reduces, backward.releases) == ((1, 0), (1, 0))


F, B = Action("forward", 0, 0), Action("backward", 0, 0)


@pytest.mark.parametrize(
    ("actions", "says"),
    [
        ((B, F), "its forward has not run"),
        ((F,), "does not run backward"),
        ((F, F, B), "already run forward"),
        ((F, B, B), "its backward already has"),
        ((Action("reduce", 0, 0, 0), F, B), "no gradient"),
        ((Action("gather", 0, 0, 0), Action("gather", 0, 0, 0), F, B), "already gathered"),
        ((Action("release", 0, 0, 0), F, B), "not gathered"),
        ((Action("gather", 0, 0, 0), F, B), "still gathered"),
        ((Action("gather", 0, 0, 7), F, B), "has 1 units"),
        ((F, Action("send", 0, 0, peer=1), B), "do not match"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(actions: tuple[Action, ...], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        validate(Schedule("broken", 1, 1, (actions,)))
