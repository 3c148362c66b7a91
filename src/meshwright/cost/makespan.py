"""How long a schedule takes, and nothing else: what `simulate` finds as the makespan, at a tenth of its time.

A schedule's compute actions are put once into an order in which each comes after what it waits for. Playing them is
then one loop over numbers, whatever the seconds; `tests/cost/test_makespan.py` holds it to `simulate`, to the last bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from meshwright.collector import collector_paused
from meshwright.errors import PlanError
from meshwright.schedule import COMPUTE, compute_orders, stage_ranks
from meshwright.schedule.orders import Orders
from meshwright.schedule.units import Zero

__all__ = ["Program", "Seconds", "program"]

#: One compute action: its rank; its place in the seconds of all kinds and stages; the numbers of the message it waits
#: for (the last one for none) and of the one it sends (-1 for none); the wire that goes over, and its place in the
#: seconds of messages.
Step = tuple[int, int, int, int, int, int]


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


class Seconds(Struct, frozen=True, kw_only=True):
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


class Program(Struct, frozen=True):
    """A schedule in an order in which it can be played.

    Attributes:
        marks: by step, the place in `around` of what is gathered and reduced around it; 0 for nothing.
        gathers, reduces: by rank, how often each of its stages is.
    """

    ranks: int
    messages: int
    steps: list[Step]
    marks: list[int]
    around: tuple[_Mark, ...]
    gathers: tuple[Counter[int], ...]
    reduces: tuple[Counter[int], ...]

    def makespan_s(self, seconds: Seconds) -> float:
        """Seconds from the first action to the end of the last. One loop with no calls, for there are many steps."""
        computes, until, on_wire = seconds.computes, seconds.arrives, seconds.wire
        gather, reduce, units, overlap = seconds.gather, seconds.reduce, seconds.units, seconds.overlap
        around, ranks = self.around, self.ranks
        now, free = [0.0] * ranks, [0.0] * ranks
        # Of the action that comes next on a rank: when its first unit is gathered, and when all are.
        first, every = [0.0] * ranks, [0.0] * ranks
        wires, arrived = [0.0] * ranks**2, [-1.0] * (self.messages + 1)
        for (rank, work, needs, gives, wire, message), mark in zip(self.steps, self.marks, strict=True):
            start, here = arrived[needs], now[rank]
            if not mark:
                end = (start if start > here else here) + computes[work]
            else:
                stage, gathers, begins, ahead, reduces = around[mark]
                count, issued = units[stage], free[rank]
                if gathers and (begins or not overlap):
                    begun = issued if issued > here else here
                    issued = every[rank] = begun + gather[stage]
                    first[rank] = first[rank] or begun + gather[stage] / count
                    here = here if overlap else issued
                length = computes[work]
                share = length / count
                if start < here:
                    start = here
                if start < first[rank]:
                    start = first[rank]
                end, gathered = start + length, every[rank]
                if gathered and gathered + share > end:
                    end = gathered + share
                first[rank] = every[rank] = 0.0
                if ahead >= 0 and overlap:
                    begun = issued if issued > start else start
                    issued = every[rank] = begun + gather[ahead]
                    first[rank] = begun + gather[ahead] / units[ahead]
                if reduces and overlap:
                    length = reduce[stage]
                    begun = issued if issued > start + share else start + share
                    issued = begun + length
                    if issued < end + length / count:
                        issued = end + length / count
                elif reduces:
                    end += reduce[stage]
                free[rank] = issued
            now[rank] = end
            if gives >= 0:
                leaves = wires[wire]
                if leaves < end:
                    leaves = end
                wires[wire] = leaves + on_wire[message]
                arrived[gives] = leaves + until[message]
        return max(*now, *free)


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
    around = {_Mark(0, False, False, -1, False): 0}
    lines, gathers, reduces = [], [], []
    for order in orders:
        gathered, reduced = units.around(order)
        line, last = [0] * len(order), len(order) - 1
        for index in sorted({*gathered, *reduced, *(index - 1 for index in gathered if index)}):
            ahead = order[index + 1].stage if index < last and index + 1 in gathered else -1
            mark = _Mark(order[index].stage, index in gathered, index == 0, ahead, index in reduced)
            line[index] = around.setdefault(mark, len(around))
        lines.append(iter(line))
        gathers.append(Counter(order[index].stage for index in gathered))
        reduces.append(Counter(order[index].stage for index in reduced))
    marks = [next(lines[step[0]]) for step in plain.steps] if len(around) > 1 else plain.marks
    return replace(plain, marks=marks, around=tuple(around), gathers=tuple(gathers), reduces=tuple(reduces))


@lru_cache(maxsize=128)
@collector_paused()
def _plain(name: str, ranks: int, microbatches: int, virtual: int) -> tuple[Program, Orders]:
    """A schedule without what is gathered and reduced, and its compute orders."""
    orders = compute_orders(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual)
    count = sum(len({action.stage for action in order}) for order in orders)
    none = 2 * count * microbatches
    kinds = _kinds(stage_ranks(name, ranks, count // ranks), ranks, microbatches)
    # What is made, by the number of the message that carries it, on the same rank too.
    made = bytearray(none)
    made[:microbatches] = made[none - microbatches :] = b"\1" * microbatches
    ready, position, waiting, steps = list(range(ranks)), [0] * ranks, dict[int, int](), list[Step]()
    while ready:
        rank = ready.pop()
        order = orders[rank]
        for at in range(position[rank], len(order)):
            kind, stage, k, _, _, _ = order[at]
            work, needs, gives, comes, sent, wire, message = kinds[kind, stage]
            if needs >= 0 and not made[needs + k]:
                waiting[needs + k], position[rank] = rank, at
                break
            steps.append((rank, work, comes + k if comes >= 0 else none, sent + k if sent >= 0 else -1, wire, message))
            if gives >= 0:
                made[gives + k] = 1
                if gives + k in waiting:
                    ready.append(waiting.pop(gives + k))
    if waiting:
        raise PlanError(
            f"schedule {name} stops: ranks {', '.join(map(str, sorted(waiting.values())))} wait for ever",
            why="what they wait for is never sent, or they wait for each other",
            fix="validate the schedule, which names the fault",
        )
    return Program(ranks, none, steps, [0] * len(steps), (), (), ()), orders


def _kinds(lies: tuple[int, ...], ranks: int, m: int) -> dict[tuple[str, int], tuple[int, ...]]:
    """By kind and stage, but for the microbatch: what an action computes; the messages it needs and gives, the same
    where they go between ranks, -1 for none; the wire, and the place of what it sends in the seconds of messages."""
    count, found = len(lies), dict[tuple[str, int], tuple[int, ...]]()
    for stage, rank in enumerate(lies):
        for number, kind in enumerate(COMPUTE):
            work = number * count + stage
            if kind == "backward-weight":
                found[kind, stage] = work, -1, -1, -1, -1, 0, 0
                continue
            base, onward = (0, 1) if kind == "forward" else (count * m, -1)
            other, before = stage + onward, stage - onward
            needs = base + stage * m
            gives = base + other * m if 0 <= other < count else -1
            comes = needs if 0 <= before < count and lies[before] != rank else -1
            sent = gives if gives >= 0 and lies[other] != rank else -1
            wire = rank * ranks + lies[other] if sent >= 0 else 0
            found[kind, stage] = work, needs, gives, comes, sent, wire, stage if onward > 0 else count + stage
    return found
