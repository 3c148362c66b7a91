"""Actions and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "Kind", "Schedule", "Window", "windows"]

Kind = Literal[
    "forward", "backward", "backward-input", "backward-weight", "send", "receive", "gather", "release", "reduce"
]
_COMPUTE = ("forward", "backward", "backward-input", "backward-weight")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does. `unit` is None for a whole stage, `peer` is the other rank of a send or receive."""

    kind: Kind
    stage: int
    microbatch: int
    unit: int | None = None
    peer: int | None = None


@dataclass(frozen=True)
class Schedule:
    """Every rank's actions, in order, for `microbatches` microbatches and `units` ZeRO units a stage."""

    name: str
    microbatches: int
    units: int
    ranks: tuple[tuple[Action, ...], ...]

    def count(self, kind: Kind, rank: int = 0) -> int:
        """How many actions of a kind a rank has."""
        return sum(action.kind == kind for action in self.ranks[rank])


@dataclass(frozen=True, slots=True)
class Window:
    """A compute action with the unit actions around it: what is gathered for it, and what it reduces and releases."""

    action: Action
    gathers: tuple[int, ...]
    reduces: tuple[int, ...]
    releases: tuple[int, ...]


def windows(actions: tuple[Action, ...]) -> Iterator[Window]:
    """Group a rank's actions around its compute actions: gathers stand before one, reduces and releases after it."""
    gathers: list[int] = []
    current: Action | None = None
    after: dict[str, list[int]] = {"reduce": [], "release": []}
    for action in actions:
        if action.kind in ("reduce", "release") and action.unit is not None:
            after[action.kind].append(action.unit)
            continue
        if current is not None:
            yield Window(current, tuple(gathers), tuple(after["reduce"]), tuple(after["release"]))
            current, gathers, after = None, [], {"reduce": [], "release": []}
        if action.kind == "gather" and action.unit is not None:
            gathers.append(action.unit)
        elif action.kind in _COMPUTE:
            current = action
    if current is not None:
        yield Window(current, tuple(gathers), tuple(after["reduce"]), tuple(after["release"]))
