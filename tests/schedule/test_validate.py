"""Corrupt schedules, planted one fault at a time, are refused with the fault named; nothing valid is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.simulate import simulate
from meshwright.errors import PlanError
from meshwright.schedule import COMPUTE, Action, Schedule, make_schedule, validate

Lines = list[list[Action]]


def base() -> tuple[Schedule, Lines]:
    """Four stages of two units on two ranks, split backward, ZeRO-3: every kind of action is in it."""
    schedule = make_schedule(
        "interleaved-zb", ranks=2, microbatches=4, virtual_stages=2, units=2, zero=3, shard=2, dp=2
    ).exact()
    return schedule, [list(actions) for actions in schedule.ranks]


def find(lines: Lines, rank: int, kind: str, stage: int, microbatch: int = 0, nth: int = 0) -> int:
    places = [i for i, a in enumerate(lines[rank]) if (a.kind, a.stage, a.microbatch) == (kind, stage, microbatch)]
    return places[nth]


def drop(rank: int, kind: str, stage: int, microbatch: int = 0) -> Callable[[Lines], None]:
    return lambda lines: lines[rank].__delitem__(find(lines, rank, kind, stage, microbatch))


def twice(rank: int, kind: str, stage: int) -> Callable[[Lines], None]:
    def plant(lines: Lines) -> None:
        index = find(lines, rank, kind, stage)
        lines[rank].insert(index + 1, lines[rank][index])

    return plant


def change(rank: int, which: str, at: int, **values: object) -> Callable[[Lines], None]:
    def plant(lines: Lines) -> None:
        index = find(lines, rank, which, at)
        lines[rank][index] = lines[rank][index]._replace(**values)

    return plant


def move(rank: int, kind: str, stage: int, to: int) -> Callable[[Lines], None]:
    """Move an action to the front (0) or the end (-1)."""

    def plant(lines: Lines) -> None:
        action = lines[rank].pop(find(lines, rank, kind, stage))
        lines[rank].insert(to if to == 0 else len(lines[rank]), action)

    return plant


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (drop(0, "forward", 2), "stage 2, microbatch 0"),
        (drop(1, "forward", 3), "its forward has not run"),
        (drop(1, "backward-input", 3), "the gradient is not there yet"),
        (drop(1, "backward-weight", 3, 3), "there is no gradient"),
        (drop(0, "send", 0), "sent"),
        (drop(1, "receive", 1), "the activation of stage 0 is not there"),
        (drop(0, "receive", 2, 1), "the activation of stage 1 is not there"),
        (drop(0, "receive", 0), "the gradient of stage 1 is not there"),
        (drop(0, "gather", 0), "not gathered"),
        (drop(0, "release", 0), "already gathered"),
        (drop(1, "reduce", 3, 3), "are not reduced at the end"),
        (twice(1, "forward", 1), "already run forward"),
        (twice(1, "backward-input", 3), "its forward has not run, or its backward already has"),
        (twice(1, "backward-weight", 3), "or its backward-weight already has"),
        (twice(0, "send", 0), "sent twice"),
        (twice(1, "receive", 1), "received twice"),
        (twice(0, "gather", 0), "already gathered"),
        (twice(0, "release", 0), "not gathered"),
        (twice(1, "reduce", 3), "there is no gradient"),
        (move(1, "backward-weight", 3, 0), "its backward-input has not run"),
        (move(1, "reduce", 3, 0), "there is no gradient"),
        (move(0, "send", 0, 0), "the activation is not there yet"),
        (move(0, "receive", 2, -1), "the activation of stage 1 is not there"),
        (move(0, "release", 0, 0), "not gathered"),
        (change(0, "send", 0, peer=0), "the peer is wrong: stage 1 lies on rank 1"),
        (change(0, "send", 0, peer=7), "the peer is wrong"),
        (change(0, "send", 0, peer_stage=3), "no neighbour"),
        (change(0, "send", 0, peer_stage=None), "no neighbour"),
        (change(0, "send", 0, microbatch=2), "the activation is not there yet"),
        (change(1, "receive", 1, peer_stage=2), "the activation of stage 0 is not there"),
        (change(0, "forward", 0, microbatch=9), "its microbatches 0 to 3"),
        (change(0, "forward", 0, stage=1), "its stages are"),
        (change(0, "gather", 0, unit=5), "the stage has 2 units"),
        (change(1, "backward-input", 3, kind="sideways"), "sideways is no kind of action"),
    ],
)
def test_a_planted_fault_is_refused(plant: Callable[[Lines], None], says: str) -> None:
    schedule, lines = base()
    validate(schedule)
    plant(lines)
    with pytest.raises(PlanError, match="is not playable") as refused:
        validate(Schedule("planted", schedule.microbatches, schedule.units, tuple(map(tuple, lines))))
    assert says in str(refused.value)


def crossed() -> Schedule:
    """Two ranks in 1F1B that both send before they receive, which only buffered messages survive."""

    def line(text: str, rank: int) -> tuple[Action, ...]:
        kinds = {"F": "forward", "B": "backward", "S": "send", "R": "receive"}
        found = []
        for word in text.split():
            kind, microbatch = kinds[word[0]], int(word[1])
            pair = (1 - rank, 1 - rank) if word[0] in "SR" else (None, None)
            found.append(Action(kind, rank, microbatch, None, *pair))
        return tuple(found)

    first = line("F0 S0 F1 S1 R0 B0 R1 B1", 0)
    second = line("R0 F0 B0 S0 R1 F1 B1 S1", 1)
    return Schedule("crossed", 2, 1, (first, second))


def test_crossed_sends_are_a_deadlock() -> None:
    schedule = crossed()
    with pytest.raises(PlanError, match="deadlock") as refused:
        validate(schedule)
    assert "rank 0 waits at send of stage 0, microbatch 1 with rank 1" in str(refused.value)
    assert "rank 1 waits at send of stage 1, microbatch 0 with rank 0" in str(refused.value)
    # The player finds the same: through with buffered messages (rank 0: two forwards, the way through rank 1 and back,
    # two backwards, and a pause in which rank 1 does its second turn), stuck where both wait.
    assert simulate(schedule, lambda kind, stage: float(kind in COMPUTE)).makespan_s == 6
    with pytest.raises(PlanError, match="wait for ever"):
        simulate(schedule, lambda kind, stage: 1.0, blocking=True)


def test_two_ranks_that_hold_one_stage_are_refused() -> None:
    one = (Action("forward", 0, 0), Action("backward", 0, 0))
    with pytest.raises(PlanError, match="its stages are"):
        validate(Schedule("double", 1, 1, (one, one)))
    with pytest.raises(PlanError, match="each stage from 0 on"):
        validate(Schedule("gap", 1, 1, ((Action("forward", 1, 0), Action("backward", 1, 0)),)))


@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v", "dualpipev"]),
    zero=st.sampled_from([0, 1, 3]),
    data=st.data(),
)
def test_no_action_may_be_missing_or_doubled(name: str, zero: int, data: st.DataObject) -> None:
    schedule = make_schedule(name, ranks=3, microbatches=6, units=2, zero=zero, shard=1 if zero == 0 else 2, dp=2)
    rank = data.draw(st.integers(0, 2))
    line = list(schedule.exact().ranks[rank])
    index = data.draw(st.integers(0, len(line) - 1))
    doubled = data.draw(st.booleans())
    # A reduce may be missing if one follows: gradients add up.
    last = not any(a.kind == "reduce" and a.unit == line[index].unit for a in line[index + 1 :])
    if doubled:
        line.insert(index, line[index])
    elif line[index].kind == "reduce" and not last:
        return
    else:
        del line[index]
    ranks = list(schedule.exact().ranks)
    ranks[rank] = tuple(line)
    with pytest.raises(PlanError, match="is not playable"):
        validate(Schedule("planted", 6, 2, tuple(ranks)))


@given(name=st.sampled_from(["1f1b", "interleaved-1f1b", "zb-v", "dualpipev"]), data=st.data())
def test_a_deadlock_is_called_exactly_where_the_player_gets_stuck(name: str, data: st.DataObject) -> None:
    schedule = make_schedule(name, ranks=3, microbatches=6)
    ranks = [list(actions) for actions in schedule.ranks]
    for _ in range(data.draw(st.integers(1, 6))):
        line = ranks[data.draw(st.integers(0, 2))]
        index = data.draw(st.integers(0, len(line) - 2))
        line[index], line[index + 1] = line[index + 1], line[index]
    shuffled = Schedule("shuffled", 6, 1, tuple(map(tuple, ranks)))
    try:
        validate(shuffled)
    except PlanError as refused:
        if "deadlock" in str(refused):
            with pytest.raises(PlanError, match="wait for ever"):
                simulate(shuffled, lambda kind, stage: 1.0, blocking=True)
        return
    simulate(shuffled, lambda kind, stage: 1.0, blocking=True)
    simulate(shuffled, lambda kind, stage: 1.0)
