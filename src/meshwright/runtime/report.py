"""What one optimizer step reports."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepReport"]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step, the same on every rank.

    `loss` is the sum of all losses over the global weight, over all microbatches and ranks. `grad_norm` is the global
    gradient norm before clipping, `clipped_norm` after it. A step with non-finite gradients (or no weight at all) is
    `skipped`: no parameter, optimizer state or learning rate changes. `loss_scale` is what losses were multiplied by
    before their backward (1 but for float16; gradients are divided by it again). `tokens` counts the global batch.
    `step_s` is this rank's wall time in seconds. `peak_bytes` maps categories of memory to this rank's bytes at the
    moment of the step with the largest total, as of the last step that was measured. `collectives` counts this rank's
    by kind.
    """

    step: int
    loss: float
    weight: float
    grad_norm: float
    clipped_norm: float
    skipped: bool
    loss_scale: float
    tokens: int
    step_s: float
    peak_bytes: dict[str, int]
    collectives: dict[str, int]
