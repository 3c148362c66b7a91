"""Gathers, releases and reduces of ZeRO's units, placed around the compute actions of a rank.

By variant, for a stage of U units and m microbatches, with c compute actions a microbatch (2, or 3 where the backward
is split: its weight half reads the weights once more), and per unit and step:

| zero | gather | gathers | released |
|---|---|---|---|
| 0 (and a shard group of 1) | none | 0 | never |
| 1, 2 | none | 1, before the first forward | after the last backward |
| 3 | step | 1, before the first forward | after the last backward |
| 3 | chunk | 1 for each run of compute actions that stay on the stage | after the run |
| 3 | unit | c m, before every compute action | after every compute action |

| zero | reduce | reduces | whole gradients between actions |
|---|---|---|---|
| 0 (dp > 1), 1 | end | 1, at the last backward | from the first backward to the last |
| 2, 3 | window | one every w microbatches, and at the last backward | within a window |
| 2, 3 | microbatch | m | never |

The first stage has nobody to hand a gradient to: its backward-input does nothing, and needs no units; all of its backward
is in the weight half, so that c is 2 there.

Gradients are there once a backward or a backward-weight has run. The run of `chunk` does not end where a rank turns
from forwards to backwards on one stage: with one stage a rank it is the whole step. Looped breadth-first thus gathers
each stage twice a step, and the stage that a rank turns on once.
"""

from __future__ import annotations

from meshwright.errors import ConfigError
from meshwright.schedule.action import COMPUTE, Action

__all__ = ["Zero", "needs_units"]


def needs_units(action: Action) -> bool:
    """Whether a compute action computes with weights: all do but the first stage's backward-input, which is nothing."""
    return action.stage > 0 or action.kind != "backward-input"


class Zero:
    """How the units of every stage are gathered and reduced.

    Args:
        zero: ZeRO stage, 0 to 3.
        shard: size of the shard group; a group of 1 shards nothing.
        dp: data-parallel degree; alone there is nothing to reduce.
        gather: ZeRO-3 only; auto is `unit` there and `none` below.
        reduce: auto is `microbatch` for ZeRO-2 and 3, `end` below.
        window: microbatches between reduces when `reduce` is window.

    Raises:
        ConfigError: an unknown word, or one that contradicts `zero`.
    """

    def __init__(self, *, zero: int, shard: int, dp: int, gather: str, reduce: str, window: int) -> None:
        if zero not in (0, 1, 2, 3) or shard < 1 or dp < shard or dp % shard or window < 1:
            raise ConfigError(
                f"zero={zero} shard={shard} dp={dp} window={window} is no ZeRO variant",
                why="zero is 0 to 3, shard divides dp, and a window has at least one microbatch",
                fix="mend the value that is out of range",
            )
        if gather == "auto":
            gather = "unit" if zero == 3 else "none"
        if reduce == "auto":
            reduce = "microbatch" if zero >= 2 else "end"
        gathers = ("unit", "chunk", "step") if zero == 3 else ("none",)
        reduces = ("microbatch", "window") if zero >= 2 else ("end",)
        if gather not in gathers or reduce not in reduces:
            raise ConfigError(
                f"gather={gather} with reduce={reduce} is not ZeRO-{zero}",
                why=f"ZeRO-{zero} gathers by {' or '.join(gathers)} and reduces by {' or '.join(reduces)}",
                fix="leave gather and reduce out",
            )
        self.sharded = zero > 0 and shard > 1
        self.gather = "step" if gather == "none" else gather
        self.reduces = dp > 1
        every = {"microbatch": 1, "window": window}.get(reduce, 0)
        #: Microbatches between reduces; 0 is one reduce at the end.
        self.every = every if self.sharded else 0

    def place(self, actions: list[Action], holding: frozenset[int]) -> list[Action]:
        """A rank's actions with the unit actions among them, one action for all units of a stage (unit None).

        Args:
            actions: compute actions, sends and receives of one rank.
            holding: the stages that have units.
        """
        if not (self.sharded or self.reduces):
            return actions
        computes = [
            i
            for i, action in enumerate(actions)
            if action.kind in COMPUTE and action.stage in holding and needs_units(action)
        ]
        gathers, releases = self._gathers(actions, computes) if self.sharded else (set(), set())
        reduces = self._reduces(actions, computes) if self.reduces else set()
        placed = []
        for index, action in enumerate(actions):
            if index in gathers:
                placed.append(Action("gather", action.stage, action.microbatch))
            placed.append(action)
            if index in reduces:
                placed.append(Action("reduce", action.stage, action.microbatch))
            if index in releases:
                placed.append(Action("release", action.stage, action.microbatch))
        return placed

    def around(self, computes: list[Action]) -> tuple[set[int], set[int]]:
        """Of a rank's compute actions those before which their stage is gathered, and after which it is reduced, by
        their places, where every stage has units."""
        every = [index for index, action in enumerate(computes) if needs_units(action)]
        gathers = self._gathers(computes, every)[0] if self.sharded else set()
        return gathers, self._reduces(computes, every) if self.reduces else set()

    def _gathers(self, actions: list[Action], computes: list[int]) -> tuple[set[int], set[int]]:
        """Before which actions stages are gathered, and after which they are released."""
        if self.gather == "unit":
            return set(computes), set(computes)
        if self.gather == "chunk":
            turns = [k for k in range(1, len(computes)) if actions[computes[k]].stage != actions[computes[k - 1]].stage]
            begins, ends = [0, *turns], [*(k - 1 for k in turns), len(computes) - 1]
            return {computes[k] for k in begins if computes}, {computes[k] for k in ends if computes}
        first = {actions[i].stage: i for i in reversed(computes)}
        last = {actions[i].stage: i for i in computes}
        return set(first.values()), set(last.values())

    def _reduces(self, actions: list[Action], computes: list[int]) -> set[int]:
        """After which actions gradients are reduced."""
        made: dict[int, list[int]] = {}
        for i in computes:
            if actions[i].kind in ("backward", "backward-weight"):
                made.setdefault(actions[i].stage, []).append(i)
        found = {line[-1] for line in made.values()}
        if self.every:
            found.update(i for line in made.values() for i in line[self.every - 1 :: self.every])
        return found
