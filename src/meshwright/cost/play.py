"""A step's schedule played with durations: the shortest way to its makespan.

A schedule that has become steady takes as long for every further round of as many microbatches as pipeline ranks, so
that only its first rounds are played. That is exact for 1F1B, and within 2% for schedules with several stages a rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from msgspec import Struct

from meshwright.cost.compute import Phases
from meshwright.cost.links import Group, Placement
from meshwright.cost.makespan import Program, Seconds, program
from meshwright.cost.simulate import Played, simulate
from meshwright.cost.stages import Stage
from meshwright.cost.states import shard_group
from meshwright.schedule import FOLDED, Kind, Schedule, make_schedule, stage_ranks
from meshwright.spec import Link, Strategy

__all__ = ["HALVES", "SPLIT", "Play", "StageTimes", "least_s", "program_of", "rounds_left_out", "unit_counts"]

#: Rounds of as many microbatches as pipeline ranks after which a schedule repeats itself; one laid out as a V needs
#: twice as many.
_STEADY = 2
_ALL_IN_FLIGHT = ("gpipe", "looped-bfs")
#: Schedules that split the backward: the last thing a rank does may be a weight half, which nobody waits for.
SPLIT = ("zb-h1", "interleaved-zb", "zb-v", "dualpipev")
#: Those of them that split every backward.
HALVES = SPLIT[:3]


class StageTimes(Struct, frozen=True, kw_only=True):
    """Seconds by stage: the compute of one microbatch, and a gather and a reduction of all the stage's units."""

    phases: tuple[Phases, ...]
    gather: tuple[float, ...]
    reduce: tuple[float, ...]

    def table(self, *, gathers: bool = True, reduces: bool = True) -> Mapping[tuple[Kind, int], float]:
        """As the simulation takes them, with or without gathers and reductions."""
        found: dict[tuple[Kind, int], float] = {}
        for stage, (phases, gather, reduce) in enumerate(zip(self.phases, self.gather, self.reduce, strict=True)):
            found["forward", stage] = phases.forward
            found["backward", stage] = phases.backward
            found["backward-input", stage] = phases.input
            found["backward-weight", stage] = phases.weight
            found["gather", stage] = gather if gathers else 0.0
            found["reduce", stage] = reduce if reduces else 0.0
        return found


class Play(Struct, frozen=True, kw_only=True, dict=True):
    """The schedule of a strategy and what its actions take.

    Args:
        units: ZeRO units of each stage.
        overlap: gathers and reductions run beside compute.
        blocking: sender and receiver of a message wait for each other.
    """

    strategy: Strategy
    placement: Placement
    stages: tuple[Stage, ...]
    units: tuple[int, ...]
    times: StageTimes
    microbatches: int
    overlap: bool
    blocking: bool = False

    def makespan_s(self, *, gathers: bool = True, reduces: bool = True, messages: bool = True) -> float:
        """Seconds from the first forward to the last reduction, with or without what communicates."""
        rounds, few = self.repeated
        what = (gathers, reduces, messages)
        end = self._end_s(few, *what)
        if not rounds:
            return end
        further = end - self._end_s(few - self.strategy.pp, *what)
        return max(end + rounds * further, least_s(self.strategy, self.times.phases, self.microbatches))

    def played(self) -> Played:
        """The whole step, action by action."""
        return self._simulated(self.microbatches, True, True, True)

    @cached_property
    def repeated(self) -> tuple[int, int]:
        """Rounds of as many microbatches as pipeline ranks that need not be played, and the microbatches that are."""
        rounds = rounds_left_out(self.strategy, self.microbatches)
        return rounds, self.microbatches - rounds * self.strategy.pp

    def _end_s(self, microbatches: int, gathers: bool, reduces: bool, messages: bool) -> float:
        if self.blocking and messages and self.strategy.pp > 1:
            return self._simulated(microbatches, gathers, reduces, messages).makespan_s
        nothing = (0.0,) * len(self.stages)
        arrives, wire = self._messages if messages and self.strategy.pp > 1 else (2 * nothing, 2 * nothing)
        phases = self.times.phases
        seconds = Seconds(
            computes=[
                *(one.forward for one in phases),
                *(one.backward for one in phases),
                *(one.input for one in phases),
                *(one.weight for one in phases),
            ],
            gather=self.times.gather if gathers else nothing,
            reduce=self.times.reduce if reduces else nothing,
            units=self.units,
            arrives=arrives,
            wire=wire,
            overlap=self.overlap,
        )
        return program_of(self.strategy, microbatches).makespan_s(seconds)

    @cached_property
    def _messages(self) -> tuple[list[float], list[float]]:
        """Until a message of each stage has arrived, and is off the wire: to the next stage, then to the one before."""
        s, last = self.strategy, len(self.stages) - 1
        lies = stage_ranks(s.schedule, s.pp, s.virtual_stages)
        edges = [stage.blocks[-1].output_bytes * s.microbatch for stage in self.stages]
        arrives, wire = [0.0] * (2 * last + 2), [0.0] * (2 * last + 2)
        for stage in range(last):
            for source, target, place in ((stage, stage + 1, stage), (stage + 1, stage, last + 1 + stage + 1)):
                link = self._link(lies[source], lies[target])
                wire[place] = edges[stage] / link.bytes_per_s
                arrives[place] = wire[place] + link.latency_s
        return arrives, wire

    def _simulated(self, microbatches: int, gathers: bool, reduces: bool, messages: bool) -> Played:
        edges = [stage.blocks[-1].output_bytes * self.strategy.microbatch for stage in self.stages]
        return simulate(
            self._schedule(microbatches),
            self.times.table(gathers=gathers, reduces=reduces),
            link=self._link if messages and self.strategy.pp > 1 else None,
            message_bytes=lambda edge: edges[edge],
            overlap=self.overlap,
            blocking=self.blocking and messages,
        )

    def _schedule(self, microbatches: int) -> Schedule:
        s = self.strategy
        zero, variant = _collected(s)
        found = make_schedule(
            s.schedule,
            ranks=s.pp,
            microbatches=microbatches,
            virtual_stages=s.virtual_stages,
            zero=zero[0],
            shard=zero[1],
            dp=zero[2],
            gather=variant[0],
            reduce=variant[1],
            check=False,
        )
        return replace(found, units=self.units)  # where units are placed does not depend on how many there are

    @cached_property
    def _group(self) -> Group:
        return self.placement.group("pp")

    def _link(self, source: int, target: int) -> Link:
        """The link between two pipeline ranks: neighbours on one node, or not."""
        group = self._group
        near = source // group.inside == target // group.inside
        link = group.within if near else group.between
        return Link(latency_s=link.latency_s, bytes_per_s=link.bytes_per_s * link.efficiency, efficiency=1.0)


def rounds_left_out(strategy: Strategy, microbatches: int) -> int:
    """Rounds of as many microbatches as pipeline ranks that need not be played: each takes as long as the last."""
    rounds = 2 * _STEADY if strategy.schedule in FOLDED else _STEADY
    steady = (rounds + 1) * strategy.pp + 1
    if microbatches <= steady or (strategy.schedule in _ALL_IN_FLIGHT and strategy.pp > 1):
        return 0
    return (microbatches - steady) // strategy.pp


def program_of(strategy: Strategy, microbatches: int) -> Program:
    """The schedule of a strategy as it is played."""
    return program(strategy.schedule, strategy.pp, microbatches, strategy.virtual_stages, *_collected(strategy))


def unit_counts(strategy: Strategy, microbatches: int, rank: int) -> tuple[dict[int, int], dict[int, int]]:
    """How often a pipeline rank gathers, and how often it reduces, the units of each of its stages in a step.

    Once a schedule is steady, each further round of as many microbatches as ranks adds the same to every count.
    """
    rounds = rounds_left_out(strategy, microbatches)
    most = program_of(strategy, microbatches - rounds * strategy.pp)
    less = program_of(strategy, microbatches - (rounds + 1) * strategy.pp) if rounds else most
    gathers, reduces = (
        {stage: count + rounds * (count - few[stage]) for stage, count in many.items()}
        for many, few in ((most.gathers[rank], less.gathers[rank]), (most.reduces[rank], less.reduces[rank]))
    )
    return gathers, reduces


def _collected(strategy: Strategy) -> tuple[tuple[int, int, int], tuple[str, str]]:
    """Of ZeRO what a schedule depends on: the stage, the group that shards, the one that reduces; when each is done."""
    sharded, replicated = shard_group(strategy) > 1, strategy.dp * strategy.cp > 1
    zero = (strategy.zero if sharded else 0, 1 + sharded, 1 + replicated)
    return zero, (strategy.gather, strategy.reduce) if sharded else ("auto", "auto")


def least_s(strategy: Strategy, phases: Sequence[Phases], microbatches: int) -> float:
    """Seconds below which no schedule of these stages ends: of each pipeline rank what it computes, what passes before
    the first microbatch reaches it, and after the last one's backward leaves it. A rank that splits its backward may do
    weight halves last, for which nobody waits.

    Args:
        phases: of one microbatch on each stage.
    """
    split = strategy.schedule in SPLIT
    loads, entries, passed = [0.0] * strategy.pp, [math.inf] * strategy.pp, 0.0
    for rank, one in zip(stage_ranks(strategy.schedule, strategy.pp, strategy.virtual_stages), phases, strict=True):
        loads[rank] += one.forward + one.input + one.weight
        entries[rank] = min(entries[rank], passed)
        passed += one.forward + (0.0 if split else one.backward)
    return max(microbatches * load + entry for load, entry in zip(loads, entries, strict=True))
