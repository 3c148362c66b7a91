"""Schedules by name: any numbers are either a valid, complete schedule or refused with numbers that are one."""

from __future__ import annotations

import gc
import re
from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.schedule import SCHEDULES, Schedule, compute_orders, in_flight, make_schedule, stage_rank, validate
from meshwright.spec.strategy import Schedule as ScheduleName

PIPELINES = [name for name in SCHEDULES if name != "single"]
V_SHAPED = ("zb-v", "dualpipev")
SPLIT = ("zb-h1", "interleaved-zb", "zb-v", "dualpipev")
ONE_STAGE = ("gpipe", "1f1b", "zb-h1")


def test_the_names_are_those_of_a_strategy() -> None:
    assert get_args(ScheduleName) == SCHEDULES


@given(
    name=st.sampled_from(PIPELINES),
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 14),
    virtual=st.integers(1, 4),
    data=st.data(),
)
def test_any_numbers_are_valid_or_refused_with_legal_ones(
    name: str, ranks: int, microbatches: int, virtual: int, data: st.DataObject
) -> None:
    virtual = {**dict.fromkeys(ONE_STAGE, 1), **dict.fromkeys(V_SHAPED, 2)}.get(name, virtual)
    try:
        schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual)
    except UnsupportedCombination as refused:
        legal = [int(number) for number in re.findall(r"\d+", refused.fix.split("microbatches")[0])]
        assert legal
        assert microbatches not in legal
        for number in legal:
            make_schedule(name, ranks=ranks, microbatches=number, virtual_stages=virtual)
        return
    _complete(schedule, ranks * virtual, microbatches)


def _complete(schedule: Schedule, stages: int, microbatches: int) -> None:
    """Counted without the validator: each stage's work, and a message for every boundary between two ranks."""
    seen = Counter((a.kind, a.stage) for actions in schedule.ranks for a in actions)
    ranks = schedule.stage_ranks
    assert len(ranks) == stages
    for stage in range(stages):
        assert seen["forward", stage] == microbatches
        assert seen["backward", stage] + seen["backward-input", stage] == microbatches
        assert seen["backward-weight", stage] == seen["backward-input", stage]
        neighbours = [at for at in (stage - 1, stage + 1) if 0 <= at < stages and ranks[at] != ranks[stage]]
        assert seen["send", stage] == seen["receive", stage] == microbatches * len(neighbours)
        assert stage_rank(schedule, stage) == ranks[stage]


def test_only_schedules_that_split_the_backward_have_its_halves() -> None:
    for name in PIPELINES:
        kinds = {a.kind for line in compute_orders(name, ranks=3, microbatches=6) for a in line}
        assert ("backward-weight" in kinds) == (name in SPLIT)


def test_the_v_lays_the_first_and_the_last_stage_on_one_rank() -> None:
    for name in V_SHAPED:
        schedule = make_schedule(name, ranks=3, microbatches=6)
        assert schedule.stage_ranks == (0, 1, 2, 2, 1, 0)
        assert not [a for a in schedule.ranks[2] if a.kind == "send" and a.peer == 2]
    assert make_schedule("looped-bfs", ranks=3, microbatches=6, virtual_stages=2).stage_ranks == (0, 1, 2, 0, 1, 2)


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        ("interleaved-1f1b", {"ranks": 4, "microbatches": 9, "virtual_stages": 2}, "use 8 or 10 microbatches"),
        ("interleaved-zb", {"ranks": 4, "microbatches": 13, "virtual_stages": 2}, "use 12 or 15 microbatches"),
        ("dualpipev", {"ranks": 4, "microbatches": 7}, "use 8 or more microbatches, or 3 ranks"),
        ("dualpipev", {"ranks": 1, "microbatches": 1}, "use 2 or more microbatches, or schedule zb-v"),
        ("1f1b", {"ranks": 4, "microbatches": 8, "virtual_stages": 2}, "use virtual_stages=1, or schedule inter"),
        ("zb-v", {"ranks": 4, "microbatches": 8, "virtual_stages": 3}, "use virtual_stages=2, or schedule inter"),
        ("single", {"ranks": 2, "microbatches": 8}, "use 1 rank, or schedule 1f1b"),
    ],
)
def test_numbers_without_a_schedule_name_the_nearest_that_have_one(
    name: str, numbers: dict[str, int], says: str
) -> None:
    with pytest.raises(UnsupportedCombination, match=says):
        make_schedule(name, **numbers)


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        ("1f2b", {"ranks": 2, "microbatches": 2}, "schedule=1f2b is not known"),
        ("1f1b", {"ranks": 0, "microbatches": 2}, "ranks=0 is not a positive number"),
        ("1f1b", {"ranks": 2, "microbatches": 0}, "microbatches=0 is not a positive number"),
        ("1f1b", {"ranks": 2, "microbatches": 2, "units": -1}, "units=-1 is negative"),
    ],
)
def test_wrong_values_are_refused(name: str, numbers: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_schedule(name, **numbers)


def test_a_big_pipeline_is_valid() -> None:
    schedule = make_schedule("1f1b", ranks=64, microbatches=128)
    validate(schedule)
    assert [rank.peak for rank in in_flight(schedule)] == [64 - rank for rank in range(64)]


def test_what_is_in_flight_after_the_input_half_is_counted_if_asked() -> None:
    schedule = make_schedule("zb-h1", ranks=4, microbatches=8)
    assert [rank.peak for rank in in_flight(schedule)] == [4, 4, 4, 4]
    assert [rank.peak for rank in in_flight(schedule, until="backward-input")] == [4, 3, 2, 1]


def test_the_collector_is_on_again_whatever_happens() -> None:
    make_schedule("1f1b", ranks=2, microbatches=2)
    assert gc.isenabled()
    with pytest.raises(UnsupportedCombination):
        make_schedule("dualpipev", ranks=4, microbatches=3)
    assert gc.isenabled()
