"""Every schedule by name, with its messages and its ZeRO units."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from meshwright.collector import collector_paused
from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.schedule.action import Schedule
from meshwright.schedule.orders import (
    Order,
    Orders,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    looped_bfs,
    one_forward_one_backward,
)
from meshwright.schedule.transfers import with_transfers
from meshwright.schedule.units import Zero
from meshwright.schedule.v_shaped import dualpipe_v, zb_v
from meshwright.schedule.validate import validate

__all__ = [
    "FOLDED",
    "SCHEDULES",
    "assemble",
    "compute_order",
    "compute_orders",
    "make_schedule",
    "single_stage",
    "stage_rank",
    "stage_ranks",
]


class _Shape(Struct, frozen=True, kw_only=True):
    """How a schedule is made: the order of a rank by (ranks, microbatches, stages a rank, rank), and how many stages a
    rank has.

    `virtual` is 0 for any number. `folded` schedules lay stages out as a V, the others deal them out in turn.
    """

    order: Callable[[int, int, int, int], Order]
    virtual: int = 0
    folded: bool = False


_SHAPES: dict[str, _Shape] = {
    "single": _Shape(order=lambda p, m, v, rank: one_forward_one_backward(p, m, rank), virtual=1),
    "gpipe": _Shape(order=lambda p, m, v, rank: gpipe(p, m, rank), virtual=1),
    "1f1b": _Shape(order=lambda p, m, v, rank: one_forward_one_backward(p, m, rank), virtual=1),
    "interleaved-1f1b": _Shape(order=interleaved),
    "looped-bfs": _Shape(order=looped_bfs),
    "zb-h1": _Shape(order=lambda p, m, v, rank: interleaved_zero_bubble(p, m, 1, rank), virtual=1),
    "interleaved-zb": _Shape(order=interleaved_zero_bubble),
    "zb-v": _Shape(order=lambda p, m, v, rank: zb_v(p, m, rank), virtual=2, folded=True),
    "dualpipev": _Shape(order=lambda p, m, v, rank: dualpipe_v(p, m, rank), virtual=2, folded=True),
}

#: The names of all schedules, as `Strategy.schedule` knows them.
SCHEDULES = tuple(_SHAPES)
#: Those whose first and last stage lie on one rank.
FOLDED = tuple(name for name, shape in _SHAPES.items() if shape.folded)


@collector_paused()
def compute_orders(name: str, *, ranks: int, microbatches: int, virtual_stages: int = 1) -> Orders:
    """Per rank, the compute actions of a schedule in order, without messages and units.

    Raises:
        ConfigError: the name is not known, or a number is not positive.
        UnsupportedCombination: the schedule is not defined for these numbers; the text names the nearest that are.
    """
    shape, virtual = _shape(name, ranks, microbatches, virtual_stages)
    return [shape.order(ranks, microbatches, virtual, rank) for rank in range(ranks)]


@collector_paused()
def compute_order(name: str, *, ranks: int, microbatches: int, virtual_stages: int = 1, rank: int) -> Order:
    """The same of one rank alone."""
    shape, virtual = _shape(name, ranks, microbatches, virtual_stages)
    return shape.order(ranks, microbatches, virtual, rank)


@collector_paused()
def make_schedule(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    virtual_stages: int = 1,
    units: int | Sequence[int] = 1,
    zero: int = 0,
    shard: int = 1,
    dp: int = 1,
    gather: str = "auto",
    reduce: str = "auto",
    window: int = 0,
    check: bool = True,
) -> Schedule:
    """A schedule by name, validated.

    Unit actions stand for all units of a stage at once (unit None); `Schedule.exact` writes them out one by one.

    Args:
        name: one of `SCHEDULES`.
        ranks: pipeline ranks.
        microbatches: microbatches a step on each data-parallel rank.
        virtual_stages: stages a rank. zb-v and dualpipev always have 2, whether 1 or 2 is given.
        units: ZeRO units of each stage that hold parameters: one number for all stages, or one a stage.
        zero: ZeRO stage.
        shard: size of the shard group.
        dp: data-parallel degree.
        gather: when ZeRO-3 gathers: unit, chunk or step; auto is unit.
        reduce: when ZeRO-2 and 3 reduce: microbatch or window; auto is microbatch. Below it is end.
        window: microbatches between two reduces of a stage under reduce=window; 0 is as many as there are ranks, which
            is what a rank runs through one stage before it goes to the next.
        check: validate it; a search that only plays it need not.

    Raises:
        ConfigError: the name is not known, a number is not positive, or gather or reduce contradicts zero.
        UnsupportedCombination: the schedule is not defined for these numbers; the text names the nearest that are.
    """
    orders = compute_orders(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)
    lies = stage_ranks(name, ranks, _SHAPES[name].virtual or virtual_stages)
    zero_units = Zero(zero=zero, shard=shard, dp=dp, gather=gather, reduce=reduce, window=window or ranks)
    return assemble(name, orders, lies, microbatches=microbatches, units=units, zero=zero_units, check=check)


def single_stage(*, zero: int, shard: int, dp: int, microbatches: int, units: int) -> Schedule:
    """The schedule of one stage, unit by unit: all microbatches one after the other.

    Per step, with U units and m microbatches: ZeRO-0 (and a shard group of 1) gathers nothing and reduces each unit's
    bucket once (nothing when dp is 1); ZeRO-1 gathers U and reduces U; ZeRO-2 gathers U and reduces mU; ZeRO-3 gathers
    2mU and reduces mU.

    Args:
        zero: ZeRO stage.
        shard: size of the shard group.
        dp: data-parallel degree.
        microbatches: microbatches per step on each rank.
        units: ZeRO units that hold parameters; unit 0 is the root unit.
    """
    return make_schedule(
        "single", ranks=1, microbatches=microbatches, units=units, zero=zero, shard=shard, dp=dp
    ).exact()


def assemble(
    name: str,
    orders: Orders,
    stage_ranks: tuple[int, ...],
    *,
    microbatches: int,
    units: int | Sequence[int],
    zero: Zero,
    check: bool = True,
) -> Schedule:
    """A schedule from its compute orders: messages and unit actions are placed and the whole is validated (`check`).

    Raises:
        PlanError: the orders cannot run.
        ConfigError: units are not given for every stage.
    """
    if not isinstance(units, int):
        units = tuple(units)
        if len(units) != len(stage_ranks):
            raise ConfigError(
                f"units are given for {len(units)} stages, but schedule {name} has {len(stage_ranks)}",
                fix="give one number for all stages, or one a stage",
            )
    counts = (units,) * len(stage_ranks) if isinstance(units, int) else units
    if min(counts) < 0:
        raise ConfigError(f"units={min(counts)} is negative", fix="give 0 or more units a stage")
    holding = frozenset(stage for stage, count in enumerate(counts) if count)
    if len(orders) > 1:
        orders = with_transfers(name, orders, stage_ranks, microbatches)
    ranks = tuple(tuple(zero.place(actions, holding)) for actions in orders)
    schedule = Schedule(name, microbatches, units, ranks, stage_ranks)
    if check:
        validate(schedule)
    return schedule


def stage_rank(schedule: Schedule, stage: int) -> int:
    """The rank that holds a stage."""
    return schedule.stage_ranks[stage]


def stage_ranks(name: str, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The pipeline rank of each stage of a schedule: dealt out in turn, or laid out as a V."""
    count, folded = ranks * virtual_stages, name in FOLDED
    return tuple(n % ranks if n < ranks or not folded else count - 1 - n for n in range(count))


def _shape(name: str, ranks: int, microbatches: int, virtual_stages: int) -> tuple[_Shape, int]:
    """How a schedule is made for these numbers, and its stages a rank."""
    shape = _SHAPES.get(name)
    if shape is None:
        raise ConfigError(f"schedule={name} is not known", fix=f"choose one of {', '.join(SCHEDULES)}")
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if value < 1:
            raise ConfigError(f"{what}={value} is not a positive number", fix=f"set {what} to 1 or more")
    if name == "single" and ranks > 1:
        raise UnsupportedCombination(
            f"schedule single on {ranks} ranks",
            why="it is the schedule of one stage",
            fix="use 1 rank, or schedule 1f1b",
        )
    if shape.virtual and virtual_stages not in (1, shape.virtual):
        others = "interleaved-1f1b, looped-bfs or interleaved-zb"
        raise UnsupportedCombination(
            f"schedule {name} with {virtual_stages} virtual stages",
            why=f"it has {shape.virtual} stage{'s' * (shape.virtual > 1)} a rank",
            fix=f"use virtual_stages={shape.virtual}, or schedule {others}",
        )
    return shape, shape.virtual or virtual_stages
