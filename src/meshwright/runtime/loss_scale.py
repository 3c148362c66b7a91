"""Loss scaling: what keeps float16 gradients inside the range of their dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["LossScale"]

_FIRST = 2.0**16
_PATIENCE = 2000
#: Where halving ends: gradients that are not finite even so are the model's own fault.
_LEAST = 2.0**-24


class LossScale:
    """The factor on every loss before its backward: 1, or for float16 one that follows the gradients.

    It halves when gradients are not finite (that step is skipped on all ranks) and doubles after 2,000 steps in a row
    without such a one. Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2; the constants are
    those of `torch.amp.GradScaler`, for the mean over a microbatch: the engine's losses are sums.

    Attributes:
        factor: of the next step; a power of two, so that dividing by it changes no digit.
        started: whether it is known; before the first backward of all it is not.
    """

    def __init__(self, *, dynamic: bool) -> None:
        self.dynamic, self.started = dynamic, not dynamic
        self.factor = 1.0
        self._steps = 0

    def start(self, weight: float) -> None:
        """Begin for losses that are sums over so much weight a microbatch, the same on every rank."""
        self.factor, self.started = _FIRST / 2.0 ** math.ceil(math.log2(max(weight, 1.0))), True

    def update(self, *, finite: bool) -> None:
        """After a step: whether its gradients were finite. The same on every rank, as the norm is."""
        if not self.dynamic:
            return
        self._steps = self._steps + 1 if finite else 0
        if not finite:
            self.factor = max(self.factor / 2, _LEAST)
        elif self._steps == _PATIENCE:
            self.factor, self._steps = 2 * self.factor, 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"dynamic": self.dynamic and self.started, "factor": self.factor, "steps": self._steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; one of another dtype has nothing to go on from."""
        if self.dynamic and state.get("dynamic"):
            self.factor, self._steps, self.started = float(state["factor"]), int(state["steps"]), True
