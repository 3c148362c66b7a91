"""Question: all that a plan is asked for, so that it can be asked again with one thing changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from meshwright.cost.pricer import Pricer
from meshwright.planner.objective import find_objective
from meshwright.planner.pins import Pins
from meshwright.planner.rule import Candidate
from meshwright.planner.search import Result, search
from meshwright.planner.space import Space
from meshwright.spec import Cluster, Job, Layout, ModelSpec, Objective, Strategy
from meshwright.spec.families import Described

__all__ = ["Question", "Remembered", "permits", "shortage", "usable_bytes"]


@dataclass(frozen=True)
class Remembered:
    """A described model that is described once for each layout, whoever asks."""

    described: Described
    _found: dict[Layout, ModelSpec] = field(default_factory=dict, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.described.name

    def at(self, layout: Layout) -> ModelSpec:
        """The model under a layout. Raises what the model raises."""
        if layout not in self._found:
            self._found[layout] = self.described.at(layout)
        return self._found[layout]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, machines, a job, what is pinned, and what the best has least of.

    `executable` keeps to what this version runs.
    """

    model: Described
    cluster: Cluster
    job: Job
    pins: Pins
    objective: Objective = "time"
    executable: bool = False

    @cached_property
    def pricer(self) -> Pricer:
        """The prices that all answers to it share."""
        return Pricer(self.model, self.cluster, self.job)

    @cached_property
    def space(self) -> Space:
        """The legal strategies. Raises ConfigError where the pins cannot be right."""
        return Space(self.pricer, self.pins, executable=self.executable)

    def answer(self, most: int) -> Result:
        """The best strategies, and what there is to say of the rest. Raises what `search` raises."""
        return search(self.pricer, self.space, find_objective(self.objective), most=most)


def permits(pins: Pins, strategy: Strategy) -> bool:
    """Whether a strategy satisfies all pins (one that derives a value, `shard=0`, satisfies any)."""
    for key in pins.keys:
        value: Any = strategy
        for part in key.split("."):
            value = getattr(value, part)
        if not all(pin.value in (0, "auto") or pin.allows(value) for pin in pins.of(key)):
            return False
    return True


def usable_bytes(candidate: Candidate) -> int:
    """Bytes that a plan may take of the smallest device that a candidate uses."""
    return candidate.pricer.budget_bytes(candidate.strategy)


def shortage(candidate: Candidate) -> dict[str, int]:
    """Bytes that are short, by what is too small: a `device`, the `host memory` or the `disk` of a node."""
    found = candidate.pricer.memory(candidate.strategy)
    short = {"device": found.short_bytes, "host memory": found.host_short_bytes, "disk": found.disk_short_bytes}
    return {name: size for name, size in short.items() if size > 0}
