"""What a run leaves behind for comparison. All tensors are whole, on the CPU and named by their global name."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Run", "Step"]


@dataclass
class Step:
    """One optimizer step.

    `gradients` are those of the loss (all sums over the global weight) before clipping, None where a parameter got
    none; `updates` are the differences that the optimizer step made to the parameters.
    """

    loss: float
    weight: float
    grad_norm: float
    clipped_norm: float
    gradients: dict[str, Tensor | None]
    updates: dict[str, Tensor]
    collectives: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)


@dataclass
class Run:
    """All steps of a run, and the parameters that it began with."""

    initial: dict[str, Tensor]
    steps: list[Step]
