"""The quick way to a schedule's makespan finds what the simulation finds, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest

from meshwright.cost.makespan import Seconds, program
from meshwright.cost.play import unit_counts
from meshwright.cost.simulate import simulate
from meshwright.errors import UnsupportedCombination
from meshwright.schedule import COMPUTE, SCHEDULES, Kind, Schedule, make_schedule, stage_ranks
from meshwright.spec import Link, Strategy

#: ZeRO stage, shard group and group that reduces; when units are gathered and reduced.
ZERO = [
    ((0, 1, 1), ("auto", "auto")),
    ((0, 1, 2), ("auto", "auto")),
    ((1, 2, 2), ("auto", "auto")),
    ((2, 2, 2), ("auto", "microbatch")),
    ((2, 2, 2), ("auto", "window")),
    ((3, 2, 2), ("unit", "microbatch")),
    ((3, 2, 2), ("chunk", "window")),
    ((3, 2, 2), ("step", "microbatch")),
]
SHAPES = [(1, 3), (2, 4), (2, 5), (3, 6), (4, 13), (5, 20)]


def _virtual(name: str, ranks: int) -> list[int]:
    if name in ("zb-v", "dualpipev"):
        return [2]
    return [2, 3] if name in ("interleaved-1f1b", "interleaved-zb", "looped-bfs") else [1]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("zero", "variant"), ZERO)
@pytest.mark.parametrize("name", SCHEDULES)
def test_it_is_the_makespan_of_the_simulation(
    name: str, zero: tuple[int, int, int], variant: tuple[str, str], overlap: bool
) -> None:
    draw, tried = random.Random(f"{name} {zero} {variant} {overlap}"), 0
    for ranks, microbatches in SHAPES:
        for virtual in _virtual(name, ranks):
            try:
                schedule = make_schedule(
                    name,
                    ranks=ranks,
                    microbatches=microbatches,
                    virtual_stages=virtual,
                    zero=zero[0],
                    shard=zero[1],
                    dp=zero[2],
                    gather=variant[0],
                    reduce=variant[1],
                    units=[draw.randint(1, 5) for _ in range(ranks * virtual)],
                )
            except UnsupportedCombination:
                continue
            found = program(name, ranks, microbatches, virtual, zero, variant)
            for _ in range(3):
                tried += 1
                seconds, table, link, sizes = _seconds(draw, schedule, overlap)
                played = simulate(schedule, table, link=link, message_bytes=sizes.__getitem__, overlap=overlap)
                assert found.makespan_s(seconds) == played.makespan_s, (ranks, microbatches, virtual)
            for rank in range(ranks):
                for kind, counts in (("gather", found.gathers[rank]), ("reduce", found.reduces[rank])):
                    told = [a.stage for a in schedule.ranks[rank] if a.kind == kind]
                    assert {stage: told.count(stage) for stage in told} == counts
    assert tried


def _seconds(
    draw: random.Random, schedule: Schedule, overlap: bool
) -> tuple[Seconds, dict[tuple[Kind, int], float], Callable[[int, int], Link], list[float]]:
    """Random seconds of every action, as the one takes them and as the other does."""
    count = len(schedule.stage_ranks)
    table: dict[tuple[Kind, int], float] = {}
    for kind, most in (*((kind, 1.0) for kind in COMPUTE), ("gather", 0.4), ("reduce", 0.7)):
        table |= {(kind, stage): draw.choice((0.0, 1.0)) * most * draw.random() for stage in range(count)}
    rates = {pair: draw.uniform(1, 50) for pair in product(range(len(schedule.ranks)), repeat=2)}
    sizes = [draw.uniform(0, 5) for _ in range(count)]
    lies, latency = schedule.stage_ranks, draw.uniform(0, 0.1)

    def message(stage: int, other: int) -> tuple[float, float]:
        if not 0 <= other < count:
            return 0.0, 0.0
        wire = sizes[min(stage, other)] / rates[lies[stage], lies[other]]
        return wire + latency, wire

    messages = [message(stage, stage + step) for step in (1, -1) for stage in range(count)]
    seconds = Seconds(
        computes=[table[kind, stage] for kind in COMPUTE for stage in range(count)],
        gather=[table["gather", stage] for stage in range(count)],
        reduce=[table["reduce", stage] for stage in range(count)],
        units=[schedule.units_of(stage) for stage in range(count)],
        arrives=[arrives for arrives, _ in messages],
        wire=[wire for _, wire in messages],
        overlap=overlap,
    )
    return seconds, table, lambda a, b: Link(latency_s=latency, bytes_per_s=rates[a, b], efficiency=1.0), sizes


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_lie_where_the_schedule_lays_them(name: str) -> None:
    ranks = 1 if name == "single" else 4
    for virtual in _virtual(name, ranks):
        made = make_schedule(name, ranks=ranks, microbatches=8, virtual_stages=virtual)
        assert stage_ranks(name, ranks, virtual) == made.stage_ranks


@pytest.mark.parametrize(("zero", "variant"), ZERO)
@pytest.mark.parametrize("name", SCHEDULES)
def test_counts_of_many_microbatches_are_those_of_the_whole_schedule(
    name: str, zero: tuple[int, int, int], variant: tuple[str, str]
) -> None:
    ranks = 1 if name == "single" else 3
    for microbatches, virtual in product((21, 30), _virtual(name, ranks)):
        strategy = Strategy(
            dp=zero[2],
            zero=zero[0],
            shard=zero[1] if zero[0] else 1,
            pp=ranks,
            schedule=name,
            virtual_stages=virtual,
            gather=variant[0],
            reduce=variant[1],
        )
        whole = program(name, ranks, microbatches, virtual, zero, (strategy.gather, strategy.reduce))
        for rank in range(ranks):
            assert unit_counts(strategy, microbatches, rank) == (whole.gathers[rank], whole.reduces[rank])
