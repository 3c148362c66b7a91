"""The schedule of one stage: all microbatches one after the other, with ZeRO's gathers, reduces and releases."""

from __future__ import annotations

from meshwright.schedule.action import Action, Schedule
from meshwright.schedule.validate import validate

__all__ = ["single_stage"]


def single_stage(*, zero: int, shard: int, dp: int, microbatches: int, units: int) -> Schedule:
    """One stage's schedule by the ZeRO table of the design.

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
    sharded = zero > 0 and shard > 1
    actions: list[Action] = []
    forward_order, backward_order = range(units), range(units - 1, -1, -1)

    def each(kind: str, order: range, microbatch: int) -> None:
        actions.extend(Action(kind, 0, microbatch, unit) for unit in order)  # type: ignore[arg-type]

    for k in range(microbatches):
        last = k == microbatches - 1
        if sharded and (k == 0 or zero == 3):
            each("gather", forward_order, k)
        actions.append(Action("forward", 0, k))
        if sharded and zero == 3:
            each("release", forward_order, k)
            each("gather", backward_order, k)
        actions.append(Action("backward", 0, k))
        if (sharded and (last or zero >= 2)) or (not sharded and dp > 1 and last):
            each("reduce", backward_order, k)
        if sharded and (last or zero == 3):
            each("release", backward_order, k)
    schedule = Schedule("single", microbatches, units, (tuple(actions),))
    validate(schedule)
    return schedule
