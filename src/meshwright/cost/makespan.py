"""How long a schedule takes, and nothing else: what `simulate` finds as the makespan, at a tenth of its time.

A schedule's compute actions are put once into an order in which each comes after what it waits for. Playing them is then
one loop over numbers, whatever the seconds are; `tests/cost/test_makespan.py` holds it to `simulate`, to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshwright.errors import PlanError
from meshwright.schedule import FOLDED, compute_orders
from meshwright.schedule.orders import Orders
from meshwright.schedule.units import Zero

__all__ = ["Program", "Seconds", "program", "stage_ranks"]

_KINDS = ("forward", "backward", "backward-input", "backward-weight")


class _Step(NamedTuple):
    """One compute action.

    Attributes:
        work: its place in the seconds of all kinds and stages.
        needs, gives: the numbers of the messages it waits for, and sends; the last number stands for none.
        wire: the wire it sends on; `message` its place in the seconds of messages.
        mark: the place of what is gathered and reduced around it; 0 for nothing.
    """

    rank: int
    work: int
    needs: int
    gives: int
    wire: int
    message: int
    mark: int


class _Mark(NamedTuple):
    """What is gathered and reduced around a compute action.

    Attributes:
        gathers: its stage is gathered before it; `first`: no action comes before, that could have begun the gather.
        ahead: the stage that is gathered for the next action of the rank; -1 for none.
        reduces: its stage is reduced after it.
    """

    stage: int
    gathers: bool
    first: bool
    ahead: int
    reduces: bool


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """What is played, by stage, in seconds.

    Attributes:
        computes: of all forwards, then of all backwards, input halves and weight halves.
        gather, reduce: of all units of the stage.
        units: how many units share those equally.
        arrives, wire: until a message has arrived, and is off the wire: to the next stage, then to the one before.
        overlap: gathers and reductions run beside compute.
    """

    computes: Sequence[float]
    gather: Sequence[float]
    reduce: Sequence[float]
    units: Sequence[int]
    arrives: Sequence[float]
    wire: Sequence[float]
    overlap: bool = True


@dataclass(frozen=True)
class Program:
    """A schedule in an order in which it can be played.

    Attributes:
        gathers, reduces: by rank, how often each of its stages is.
    """

    ranks: int
    places: int
    wires: int
    steps: tuple[_Step, ...]
    marks: tuple[_Mark, ...]
    gathers: tuple[Counter[int], ...]
    reduces: tuple[Counter[int], ...]

    def makespan_s(self, seconds: Seconds) -> float:
        """Seconds from the first action to the end of the last. One loop with no calls, for there are many steps."""
        computes, until, on_wire = seconds.computes, seconds.arrives, seconds.wire
        gather, reduce, units, overlap = seconds.gather, seconds.reduce, seconds.units, seconds.overlap
        marks, ranks = self.marks, self.ranks
        now, free = [0.0] * ranks, [0.0] * ranks
        # Of the action that comes next on a rank: when its first unit is gathered, and when all are.
        first, every = [0.0] * ranks, [0.0] * ranks
        wires, arrived = [0.0] * self.wires, [-1.0] * (self.places + 1)
        none = self.places
        for rank, work, needs, gives, wire, message, mark in self.steps:
            start, here = arrived[needs], now[rank]
            if not mark:
                end = (start if start > here else here) + computes[work]
            else:
                stage, gathers, begins, ahead, reduces = marks[mark]
                count = units[stage]
                if gathers and (begins or not overlap):
                    begun = max(free[rank], here)
                    free[rank] = begun + gather[stage]
                    first[rank] = first[rank] or begun + gather[stage] / count
                    every[rank] = free[rank]
                    here = here if overlap else free[rank]
                length = computes[work]
                share = length / count
                start = max(start, here, first[rank])
                end = max(start + length, every[rank] + share) if every[rank] else start + length
                first[rank] = every[rank] = 0.0
                if ahead >= 0 and overlap:
                    begun = max(free[rank], start)
                    free[rank] = begun + gather[ahead]
                    first[rank] = begun + gather[ahead] / units[ahead]
                    every[rank] = free[rank]
                if reduces and overlap:
                    begun = max(free[rank], start + share)
                    free[rank] = max(begun + reduce[stage], end + reduce[stage] / count)
                elif reduces:
                    end += reduce[stage]
            now[rank] = end
            if gives != none:
                leaves = wires[wire]
                if leaves < end:
                    leaves = end
                wires[wire] = leaves + on_wire[message]
                arrived[gives] = leaves + until[message]
        return max(*now, *free)


def stage_ranks(schedule: str, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The pipeline rank of each stage: dealt out in turn, or laid out as a V."""
    count = ranks * virtual_stages
    folded = schedule in FOLDED
    return tuple(n % ranks if n < ranks or not folded else count - 1 - n for n in range(count))


@lru_cache(maxsize=512)
def program(
    name: str, ranks: int, microbatches: int, virtual: int, zero: tuple[int, int, int], variant: tuple[str, str]
) -> Program:
    """A schedule that prices of many strategies share; whether it is sound is not looked at.

    Args:
        zero: the stage, the size of the shard group, and that of the group that reduces gradients.
        variant: when units are gathered, and when reduced.

    Raises:
        UnsupportedCombination: the schedule is not defined for these numbers.
        PlanError: its ranks wait for each other.
    """
    plain, orders = _plain(name, ranks, microbatches, virtual)
    units = Zero(zero=zero[0], shard=zero[1], dp=zero[2], gather=variant[0], reduce=variant[1], window=ranks)
    marks, by_rank = [_Mark(0, False, False, -1, False)], []
    gathers, reduces = [], []
    numbers = {marks[0]: 0}
    for order in orders:
        gathered, reduced = units.around(order)
        line, last = [0] * len(order), len(order) - 1
        for index, action in enumerate(order):
            ahead = order[index + 1].stage if index < last and index + 1 in gathered else -1
            if ahead >= 0 or index in gathered or index in reduced:
                mark = _Mark(action.stage, index in gathered, index == 0, ahead, index in reduced)
                if mark not in numbers:
                    numbers[mark] = len(marks)
                    marks.append(mark)
                line[index] = numbers[mark]
        by_rank.append(iter(line))
        gathers.append(Counter(order[index].stage for index in gathered))
        reduces.append(Counter(order[index].stage for index in reduced))
    steps = plain.steps
    if len(marks) > 1:
        steps = tuple(_Step(*step[:-1], next(by_rank[step[0]])) for step in steps)
    return Program(ranks, plain.places, plain.wires, steps, tuple(marks), tuple(gathers), tuple(reduces))


@lru_cache(maxsize=128)
def _plain(name: str, ranks: int, microbatches: int, virtual: int) -> tuple[Program, Orders]:
    """A schedule without what is gathered and reduced, and its compute orders."""
    orders = compute_orders(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual)
    lies, m = stage_ranks(name, ranks, len({a.stage for order in orders for a in order}) // ranks), microbatches
    stages, places = len(lies), len(lies) * m
    none, last, steps = 2 * places, len(lies) - 1, list[_Step]()
    # What is made once, by the number of the message that carries it, on the same rank too.
    made = bytearray(2 * places + 1)
    made[:m] = made[2 * places - m : 2 * places] = b"\1" * m
    made[none] = 1
    ready, position, waiting = list(range(ranks)), [0] * ranks, dict[int, int]()
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while position[rank] < len(order):
            kind, stage, microbatch, _, _, _ = order[position[rank]]
            number, needs, gives, onward = _KINDS.index(kind), none, none, True
            if kind == "forward":
                needs = stage * m + microbatch
                gives = needs + m if stage < last else none
            elif kind != "backward-weight":
                needs, onward = places + stage * m + microbatch, False
                gives = needs - m if stage else none
            if not made[needs]:
                waiting[needs] = rank
                break
            position[rank] += 1
            peer = lies[stage + 1 if onward else stage - 1] if gives != none else rank
            message = stage if onward else stages + stage
            comes = needs if needs != none and _comes(lies, stage, onward) else none
            sent = gives if peer != rank else none
            steps.append(_Step(rank, number * stages + stage, comes, sent, rank * ranks + peer, message, 0))
            made[gives] = 1
            if gives in waiting:
                ready.append(waiting.pop(gives))
    if waiting:
        raise PlanError(
            f"schedule {name} stops: ranks {', '.join(map(str, sorted(waiting.values())))} wait for ever",
            why="what they wait for is never sent, or they wait for each other",
            fix="validate the schedule, which names the fault",
        )
    return Program(ranks, none, ranks * ranks, tuple(steps), (), (), ()), orders


def _comes(lies: tuple[int, ...], stage: int, onward: bool) -> bool:
    """Whether what an action of a stage needs comes from another rank."""
    before = stage - 1 if onward else stage + 1
    return 0 <= before < len(lies) and lies[before] != lies[stage]
