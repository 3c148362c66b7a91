"""The validator: a schedule that cannot run is an error before it is played, never a hang."""

from __future__ import annotations

from meshwright.errors import PlanError
from meshwright.schedule.action import Action, Schedule

__all__ = ["validate"]


def validate(schedule: Schedule) -> None:
    """Check the order of a schedule's actions.

    Every microbatch runs forward once and then backward once on each stage; a unit is released only while gathered and
    gathered only while released; what was gathered is released at the end; reduces follow a backward; sends and
    receives are matched between ranks.

    Raises:
        PlanError: naming the rank, the action and what is wrong with it.
    """
    for rank, actions in enumerate(schedule.ranks):
        _check_compute(schedule, rank, actions)
        _check_units(schedule, rank, actions)
    _check_pairs(schedule)


def _bad(schedule: Schedule, rank: int, action: Action | None, why: str) -> PlanError:
    at = f" at {action}" if action else ""
    return PlanError(
        f"schedule {schedule.name} is not playable: rank {rank}{at}",
        why=why,
        fix="this is a fault of the schedule's maker",
    )


def _check_compute(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> None:
    state: dict[tuple[int, int], str] = {}
    for action in actions:
        place = (action.stage, action.microbatch)
        if action.kind == "forward":
            if place in state:
                raise _bad(schedule, rank, action, "this microbatch has already run forward")
            state[place] = "forward"
        elif action.kind == "backward":
            if state.get(place) != "forward":
                raise _bad(schedule, rank, action, "its forward has not run, or its backward already has")
            state[place] = "done"
        elif action.kind == "reduce" and "done" not in state.values():
            raise _bad(schedule, rank, action, "no backward has run, so there is no gradient")
    stages = {stage for stage, _ in state}
    for stage in stages:
        for microbatch in range(schedule.microbatches):
            if state.get((stage, microbatch)) != "done":
                raise _bad(schedule, rank, None, f"microbatch {microbatch} of stage {stage} does not run backward")


def _check_units(schedule: Schedule, rank: int, actions: tuple[Action, ...]) -> None:
    gathered: set[tuple[int, int]] = set()
    for action in actions:
        if action.unit is None:
            continue
        if not 0 <= action.unit < schedule.units:
            raise _bad(schedule, rank, action, f"the stage has {schedule.units} units")
        unit = (action.stage, action.unit)
        if action.kind == "gather":
            if unit in gathered:
                raise _bad(schedule, rank, action, "the unit is already gathered")
            gathered.add(unit)
        elif action.kind == "release":
            if unit not in gathered:
                raise _bad(schedule, rank, action, "the unit is not gathered")
            gathered.remove(unit)
    if gathered:
        raise _bad(schedule, rank, None, f"units {sorted(gathered)} are still gathered at the end of the step")


def _check_pairs(schedule: Schedule) -> None:
    sends = [
        (rank, a.peer, a.stage, a.microbatch)
        for rank, acts in enumerate(schedule.ranks)
        for a in acts
        if a.kind == "send"
    ]
    receives = [
        (a.peer, rank, a.stage, a.microbatch)
        for rank, acts in enumerate(schedule.ranks)
        for a in acts
        if a.kind == "receive"
    ]
    if sorted(sends, key=str) != sorted(receives, key=str):
        raise _bad(schedule, 0, None, "sends and receives do not match between ranks")
