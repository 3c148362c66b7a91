"""Actions and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

__all__ = ["COMPUTE", "Action", "Kind", "Schedule", "Window", "new_action", "windows"]

Kind = Literal[
    "forward", "backward", "backward-input", "backward-weight", "send", "receive", "gather", "release", "reduce"
]
#: Kinds that compute. `backward` is the whole backward pass, `backward-input` and `backward-weight` are its two halves.
COMPUTE: tuple[Kind, ...] = ("forward", "backward", "backward-input", "backward-weight")
_DESCENDING = ("backward", "backward-input", "backward-weight")


class Action(NamedTuple):
    """One thing a rank does. A tuple, because a schedule may have hundreds of thousands of them.

    Stages are numbered through the whole pipeline, microbatches within one data-parallel rank.

    Attributes:
        kind: what is done.
        stage: the stage of this rank that does it.
        microbatch: for which microbatch; for gather, release and reduce: that of the compute action they stand at.
        unit: for gather, release and reduce: the ZeRO unit; None stands for every unit of the stage.
        peer: for send and receive: the other rank.
        peer_stage: for send and receive: the stage at the other end. It is `stage + 1` for the activation that is sent
            and for the gradient that is received, `stage - 1` for the other two.
    """

    kind: Kind
    stage: int
    microbatch: int
    unit: int | None = None
    peer: int | None = None
    peer_stage: int | None = None


#: `Action` from a tuple of all its fields, in a third of the time.
new_action: Callable[[tuple[Kind, int, int, int | None, int | None, int | None]], Action] = partial(
    tuple.__new__, Action
)


@dataclass(frozen=True)
class Schedule:
    """Every rank's actions, in order, for `microbatches` microbatches.

    `units` is the number of ZeRO units of each stage, one number for all stages or one a stage. A gather, release or
    reduce with unit None stands for one of each unit of its stage, in the order of the pass: first unit first around
    a forward, last unit first around a backward. `exact` writes them out.

    `stage_ranks` is the rank of each stage; where it is not given it is found from the compute actions, with -1 for a
    number that no rank runs.
    """

    name: str
    microbatches: int
    units: int | tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    stage_ranks: tuple[int, ...] = ()

    def units_of(self, stage: int) -> int:
        """ZeRO units of a stage."""
        return self.units if isinstance(self.units, int) else self.units[stage]

    def __post_init__(self) -> None:
        if self.stage_ranks:
            return
        found = {a[1]: rank for rank, actions in enumerate(self.ranks) for a in actions if a[0] in COMPUTE}
        stage_ranks = [found.get(stage, -1) for stage in range(len(found) + (max(found, default=0) >= len(found)))]
        object.__setattr__(self, "stage_ranks", tuple(stage_ranks))

    def count(self, kind: Kind, rank: int = 0) -> int:
        """How many actions of a kind a rank has, each unit counted."""
        found = [action for action in self.ranks[rank] if action.kind == kind]
        if kind not in ("gather", "release", "reduce"):
            return len(found)
        return sum(self.units_of(action.stage) if action.unit is None else 1 for action in found)

    def exact(self) -> Schedule:
        """The same schedule with one gather, release and reduce for each unit."""
        ranks = tuple(tuple(self._unit_by_unit(actions)) for actions in self.ranks)
        return Schedule(self.name, self.microbatches, self.units, ranks, self.stage_ranks)

    def _unit_by_unit(self, actions: tuple[Action, ...]) -> Iterator[Action]:
        computes = [index for index, action in enumerate(actions) if action.kind in COMPUTE]
        following = iter([*computes, None])
        after = next(following)
        descending = False
        for index, action in enumerate(actions):
            if index == after:
                descending = action.kind in _DESCENDING
                after = next(following)
            if action.unit is not None or action.kind not in ("gather", "release", "reduce"):
                yield action
                continue
            backwards = descending
            if action.kind == "gather" and after is not None:
                backwards = actions[after].kind in _DESCENDING
            order = range(self.units_of(action.stage))
            for unit in reversed(order) if backwards else order:
                yield Action(action.kind, action.stage, action.microbatch, unit)


@dataclass(frozen=True, slots=True)
class Window:
    """A compute action with the unit actions around it: what is gathered for it, and what it reduces and releases."""

    action: Action
    gathers: tuple[int, ...]
    reduces: tuple[int, ...]
    releases: tuple[int, ...]


def windows(actions: tuple[Action, ...]) -> Iterator[Window]:
    """Group a rank's actions around its compute actions: gathers stand before one, reduces and releases after it.

    Units are those written out (see `Schedule.exact`); sends and receives are passed over.
    """
    gathers: list[int] = []
    current: Action | None = None
    after: dict[str, list[int]] = {"reduce": [], "release": []}
    for action in actions:
        if action.kind in ("send", "receive"):
            continue
        if action.kind in ("reduce", "release"):
            if action.unit is not None:
                after[action.kind].append(action.unit)
            continue
        if current is not None:
            yield Window(current, tuple(gathers), tuple(after["reduce"]), tuple(after["release"]))
            current, gathers, after = None, [], {"reduce": [], "release": []}
        if action.kind == "gather":
            if action.unit is not None:
                gathers.append(action.unit)
        else:
            current = action
    if current is not None:
        yield Window(current, tuple(gathers), tuple(after["reduce"]), tuple(after["release"]))
