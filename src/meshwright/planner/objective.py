"""Objectives: what the best plan is best at."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from meshwright.spec.checks import require_choice

__all__ = ["OBJECTIVES", "Objective", "find_objective"]

Name = Literal["time", "devices", "cost"]
#: Digits of a step's seconds that count: what differs in later ones costs the same.
_DIGITS = 9


class Objective(Struct, frozen=True):
    """What is made as small as can be, as numbers that are compared in order; `text` says it in words.

    `time` is the step's seconds. `devices` is the number of devices, then the step's seconds. `cost` is device-seconds
    a step: tokens a step are given, so that it orders plans as device-hours, or money, per token do.
    """

    name: Name
    text: str

    def value(self, devices: int, step_s: float) -> tuple[float, ...]:
        """The numbers of a strategy of so many devices. Not smaller for a larger `step_s`, so that a lower bound of the
        time gives one of the objective."""
        if self.name == "devices":
            return float(devices), _rounded(step_s)
        return (_rounded(devices * step_s if self.name == "cost" else step_s),)


OBJECTIVES: dict[str, Objective] = {
    "time": Objective("time", "the fastest step"),
    "devices": Objective("devices", "the fewest devices that fit, then the fastest step"),
    "cost": Objective("cost", "the fewest device-hours per token"),
}


def find_objective(name: str) -> Objective:
    """An objective by its name.

    Raises:
        ConfigError: it is not known.
    """
    require_choice("objective", name, tuple(OBJECTIVES))
    return OBJECTIVES[name]


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")
