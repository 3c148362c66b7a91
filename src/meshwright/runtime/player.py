"""The player: goes through a rank's schedule and does each compute action with what stands around it."""

from __future__ import annotations

from typing import Protocol

from meshwright.errors import PlanError
from meshwright.schedule import Schedule, windows

__all__ = ["Stage", "play"]


class Stage(Protocol):
    """What can be played: one stage of a model on this rank."""

    def forward(self, microbatch: int, *, release: bool) -> None:
        """Run a microbatch forward; `release`: its units are released after use."""

    def backward(self, microbatch: int, *, reduce: bool, release: bool, last: bool) -> None:
        """Run its backward; `reduce`: gradients are reduced in it, `last`: no other follows in this step."""


def play(schedule: Schedule, rank: int, stage: Stage) -> None:
    """Play a rank's actions on its stage.

    Gathers happen where the schedule has them: at the first use of each unit that is not gathered. What follows a
    compute action (reduces, releases) is handed to it, so that each unit is reduced and released as soon as it is done.
    """
    groups = list(windows(schedule.ranks[rank]))
    backwards = [index for index, window in enumerate(groups) if window.action.kind == "backward"]
    for index, window in enumerate(groups):
        action = window.action
        if action.kind == "forward":
            stage.forward(action.microbatch, release=bool(window.releases))
        elif action.kind == "backward":
            stage.backward(
                action.microbatch,
                reduce=bool(window.reduces),
                release=bool(window.releases),
                last=index == backwards[-1],
            )
        else:
            raise PlanError(f"{action} cannot be played", why="a single stage has forward and backward actions only")
