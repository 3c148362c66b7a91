"""Recording: the steps of an engine, as a run to be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from meshwright.measure.equality.float64 import float32_upcasts_stay_float64
from meshwright.measure.equality.records import Run, Step, piece
from meshwright.runtime import Engine

__all__ = ["record", "values"]


def record(engine: Engine, batches: Iterable[Any], *, float64: bool) -> Run:
    """Take a step for each batch; this rank's parts of all gradients and updates.

    Args:
        engine: at its beginning.
        batches: global batches, or this rank's rows, as the engine takes them.
        float64: whether float32 upcasts inside the model stay float64.
    """
    captured: dict[str, Any] = {}

    def capture(gradients: dict[str, Tensor | None]) -> None:
        captured.clear()
        captured.update(_parts(engine, gradients))

    engine.on_gradients = capture
    before = values(engine)
    run = Run(before, [])
    for batch in batches:
        with float32_upcasts_stay_float64() if float64 else nullcontext():
            report = engine.step(batch)
        after = values(engine)
        run.steps.append(
            Step(
                loss=report.loss,
                weight=report.weight,
                grad_norm=report.grad_norm,
                clipped_norm=report.clipped_norm,
                gradients=dict(captured),
                updates={name: after[name] - before[name] for name in after},
                collectives=report.collectives,
            )
        )
        before = after
    return run


def values(engine: Engine) -> dict[str, Any]:
    """This rank's parts of the engine's parameters."""
    return _parts(engine, engine.named_parameters())


def _parts(engine: Engine, tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    zero = engine._zero
    return {
        name: None if tensor is None else piece(zero.held(name, tensor), zero.mesh) for name, tensor in tensors.items()
    }
