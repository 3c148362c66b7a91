"""ZeRO's unit actions under pipelining: what is communicated in a step, and what is held between compute actions.

The oracle is the table of variants in bytes: a stage of P parameters with weights of 2 and gradients of 4 bytes each,
in units of unequal sizes. The schedule's actions are gone through one by one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.schedule import COMPUTE, SCHEDULES, Schedule, make_schedule, validate, windows

UNITS = (7, 5, 11)
P = sum(UNITS)
WEIGHT, GRADIENT = 2 * P, 4 * P
RANKS, M = 3, 8
#: Compute actions of a microbatch: where the backward is split, its weight half reads the weights once more.
PASSES = {"gpipe": 2, "1f1b": 2, "interleaved-1f1b": 2, "looped-bfs": 2, "zb-h1": 3, "interleaved-zb": 3, "zb-v": 3}


class Traffic(NamedTuple):
    """Of one stage and step: bytes gathered and reduced, and the most that is held between two compute actions."""

    gathered: int
    reduced: int
    weights_between: int
    gradients_between: int


def traffic(schedule: Schedule, stage: int) -> Traffic:
    """Play one stage's unit actions with bytes."""
    gathered = reduced = weights_between = gradients_between = 0
    held: set[int] = set()
    fresh: set[int] = set()
    for window in _windows_of_rank(schedule, stage):
        # What is gathered for this compute action was not there before it.
        weights_between = max(weights_between, sum(UNITS[unit] for unit in held))
        gradients_between = max(gradients_between, sum(UNITS[unit] for unit in fresh))
        for kind, at, unit in window:
            if at != stage:
                continue
            if kind in ("backward", "backward-weight"):
                fresh |= set(range(len(UNITS)))
            elif kind == "gather":
                assert unit not in held
                held.add(unit)
                gathered += UNITS[unit]
            elif kind == "release":
                held.remove(unit)
            elif kind == "reduce":
                fresh.remove(unit)
                reduced += UNITS[unit]
    assert not held
    assert not fresh
    return Traffic(2 * gathered, 4 * reduced, 2 * weights_between, 4 * gradients_between)


def _windows_of_rank(schedule: Schedule, stage: int) -> list[list[tuple[str, int, int]]]:
    """A rank's actions cut before the gathers of each compute action."""
    found: list[list[tuple[str, int, int]]] = [[]]
    for action in schedule.exact().ranks[schedule.stage_ranks[stage]]:
        closed = any(kind in COMPUTE for kind, _, _ in found[-1])
        if closed and (action.kind == "gather" or action.kind in COMPUTE):
            found.append([])
        found[-1].append((action.kind, action.stage, action.unit if action.unit is not None else -1))
    return found


def variant(name: str, zero: int, **choices: str | int) -> Schedule:
    virtual = 2 if name in ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "zb-v") else 1
    shard = 4 if zero else 1
    choices = {"ranks": RANKS, "microbatches": M, "virtual_stages": virtual, "units": len(UNITS)} | choices
    return make_schedule(name, zero=zero, shard=shard, dp=4, **choices)


@pytest.mark.parametrize("name", PASSES)
def test_every_variant_moves_and_holds_what_the_table_says(name: str) -> None:
    for stage in range(RANKS):
        assert traffic(variant(name, 0), stage) == (0, GRADIENT, 0, GRADIENT)
        assert traffic(variant(name, 1), stage) == (WEIGHT, GRADIENT, WEIGHT, GRADIENT)
        assert traffic(variant(name, 2), stage) == (WEIGHT, M * GRADIENT, WEIGHT, 0)
        windowed = math.ceil(M / 3) * GRADIENT
        assert traffic(variant(name, 2, reduce="window", window=3), stage) == (WEIGHT, windowed, WEIGHT, GRADIENT)
        # The first stage does all of its backward in the weight half.
        passes = PASSES[name] if stage else 2
        assert traffic(variant(name, 3), stage) == (passes * M * WEIGHT, M * GRADIENT, 0, 0)
        assert traffic(variant(name, 3, gather="step"), stage) == (WEIGHT, M * GRADIENT, WEIGHT, 0)
        assert traffic(variant(name, 3, gather="step", reduce="window"), stage)[1] == windowed


@pytest.mark.parametrize("name", PASSES)
def test_chunks_are_gathered_once_a_run_of_their_stage(name: str) -> None:
    schedule = variant(name, 3, gather="chunk")
    for stage in range(len(schedule.stage_ranks)):
        order = [a.stage for a in schedule.ranks[schedule.stage_ranks[stage]] if a.kind in COMPUTE]
        runs = sum(at == stage and (i == 0 or order[i - 1] != stage) for i, at in enumerate(order))
        assert traffic(schedule, stage).gathered == runs * WEIGHT


def test_breadth_first_gathers_a_chunk_once_a_pass() -> None:
    """Whatever the number of microbatches; the last stage of a rank turns without being released."""
    for microbatches in (4, 40):
        schedule = variant("looped-bfs", 3, gather="chunk", virtual_stages=3, microbatches=microbatches)
        assert [traffic(schedule, stage).gathered // WEIGHT for stage in range(9)] == [2, 2, 2, 2, 2, 2, 1, 1, 1]


def test_with_one_stage_a_rank_a_chunk_is_the_step() -> None:
    for name in ("gpipe", "1f1b", "zb-h1"):
        assert traffic(variant(name, 3, gather="chunk"), 1) == traffic(variant(name, 3, gather="step"), 1)


def test_a_shard_group_of_one_reduces_once_and_gathers_nothing() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=4, units=3, zero=3, shard=1, dp=4)
    assert (schedule.count("gather"), schedule.count("reduce")) == (0, 3)


def test_stages_may_have_different_numbers_of_units() -> None:
    schedule = make_schedule("1f1b", ranks=3, microbatches=2, units=(4, 0, 1), zero=3, shard=2, dp=2)
    assert [schedule.count("gather", rank) for rank in range(3)] == [16, 0, 4]
    assert [len(schedule.exact().ranks[rank]) for rank in range(3)] == [4 + 4 + 40, 4 + 8, 4 + 4 + 10]
    with pytest.raises(ConfigError, match="units are given for 2 stages"):
        make_schedule("1f1b", ranks=3, microbatches=2, units=(4, 0))


@pytest.mark.parametrize(
    ("zero", "choices", "says"),
    [
        (2, {"reduce": "end"}, "reduce=end is not ZeRO-2"),
        (3, {"reduce": "end"}, "is not ZeRO-3"),
        (3, {"gather": "none"}, "gather=none with"),
        (1, {"gather": "unit"}, "is not ZeRO-1"),
        (0, {"reduce": "microbatch"}, "is not ZeRO-0"),
        (3, {"gather": "units"}, "gathers by unit or chunk or step"),
        (4, {}, "zero=4"),
    ],
)
def test_a_name_that_is_no_variant_is_refused(zero: int, choices: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        variant("1f1b", zero, **choices)


@given(
    name=st.sampled_from([name for name in SCHEDULES if name not in ("single", "dualpipev")]),
    zero=st.integers(1, 3),
    units=st.integers(1, 4),
    data=st.data(),
)
def test_exact_actions_are_counted_valid_and_in_the_order_of_the_pass(
    name: str, zero: int, units: int, data: st.DataObject
) -> None:
    gather = data.draw(st.sampled_from(["unit", "chunk", "step"] if zero == 3 else ["none"]))
    reduce = data.draw(st.sampled_from(["microbatch", "window"] if zero >= 2 else ["end"]))
    schedule = variant(name, zero, units=units, microbatches=6, gather=gather, reduce=reduce)
    exact = schedule.exact()
    validate(exact)
    for rank, actions in enumerate(exact.ranks):
        for kind in ("gather", "release", "reduce", "forward", "send"):
            assert exact.count(kind, rank) == schedule.count(kind, rank)
        for window in windows(actions):
            up, down = tuple(range(units)), tuple(reversed(range(units)))
            order = up if window.action.kind == "forward" else down
            assert window.gathers in ((), order)
            assert window.reduces in ((), down)
            assert window.releases in ((), order)
