"""The player: goes through a rank's schedule and does each compute action with what stands around it."""

from __future__ import annotations

from typing import Protocol

from meshwright.runtime.trace import Tracer
from meshwright.schedule import Action, Schedule

__all__ = ["Playable", "play"]

_MAKES_GRADIENTS = ("backward", "backward-weight")


class Playable(Protocol):
    """What can be played: the stages of a model that this rank has."""

    def forward(self, stage: int, microbatch: int, *, release: bool) -> None:
        """Run a microbatch forward through a stage; `release`: its units are released after use."""

    def backward(self, stage: int, microbatch: int, *, reduce: bool, release: bool, last: bool) -> None:
        """Run its backward; `reduce`: gradients are reduced in it, `last`: none of the stage follows in this step."""

    def backward_input(self, stage: int, microbatch: int, *, release: bool) -> None:
        """The half of its backward that the stage before waits for."""

    def backward_weight(self, stage: int, microbatch: int, *, reduce: bool, release: bool, last: bool) -> None:
        """The other half, which makes gradients."""

    def send(self, action: Action) -> None:
        """Send an activation or a gradient to another rank."""

    def receive(self, action: Action) -> None:
        """Receive one."""


def play(schedule: Schedule, rank: int, playable: Playable, tracer: Tracer | None = None) -> None:
    """Play a rank's actions; the tracer is told when each begins and ends.

    Gathers happen where the schedule has them: at the first use of each unit that is not gathered. What follows a
    compute action (reduces, releases) is handed to it, so that each unit is reduced and released as soon as it is done.
    """
    actions = schedule.ranks[rank]
    last = {action.stage: index for index, action in enumerate(actions) if action.kind in _MAKES_GRADIENTS}
    for index, action in enumerate(actions):
        if action.kind in ("gather", "reduce", "release"):
            continue
        if tracer is not None:
            tracer.begin()
        _do(action, _after(actions, index), playable, last=index == last.get(action.stage))
        if tracer is not None:
            tracer.end(action)


def _do(action: Action, after: set[str], playable: Playable, *, last: bool) -> None:
    stage, microbatch, reduce, release = action.stage, action.microbatch, "reduce" in after, "release" in after
    if action.kind == "send":
        playable.send(action)
    elif action.kind == "receive":
        playable.receive(action)
    elif action.kind == "forward":
        playable.forward(stage, microbatch, release=release)
    elif action.kind == "backward-input":
        playable.backward_input(stage, microbatch, release=release)
    else:
        run = playable.backward if action.kind == "backward" else playable.backward_weight
        run(stage, microbatch, reduce=reduce, release=release, last=last)


def _after(actions: tuple[Action, ...], index: int) -> set[str]:
    """The kinds of what stands between a compute action and the next action of another sort."""
    found: set[str] = set()
    for action in actions[index + 1 :]:
        if action.kind not in ("reduce", "release"):
            break
        found.add(action.kind)
    return found
