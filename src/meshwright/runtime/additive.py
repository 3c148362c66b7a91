"""Whether a loss can be taken apart: its sum over rows must not depend on which rows are looked at together."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.errors import ConfigError
from meshwright.runtime.loss import LossFunction, call_loss
from meshwright.runtime.seeds import preserved_random_state
from meshwright.runtime.tensors import find_tensors, map_values

__all__ = ["require_additive"]

#: Relative; a loss that compares rows with each other is off by far more.
_CLOSE = 1e-2


def require_additive(loss: LossFunction, outputs: Any, targets: Any, count: int) -> None:
    """Refuse a loss of two rows that is not the sum of the losses of each: it would depend on the microbatch and ranks.

    A loss is not tried where there is one row, where outputs are not a row for each, where it draws random numbers, or
    where it fails on fewer rows. It is called four times on two rows, without gradients. One that says so itself
    (`loss.additive = True`) is not tried either.

    Args:
        loss: the engine's.
        outputs: of a microbatch.
        targets: of the same rows.
        count: how many rows there are.

    Raises:
        ConfigError: with the three values.
    """
    tensors = find_tensors(outputs)
    if count < 2 or getattr(loss, "additive", False):
        return
    if not tensors or any(tensor.dim() == 0 or tensor.shape[0] != count for tensor in tensors):
        return

    def of(start: int, stop: int) -> tuple[float, float]:
        parts = [map_values(lambda tensor: tensor.detach()[start:stop], part) for part in (outputs, targets)]
        total, weight = call_loss(loss, *parts)
        return float(total), float(weight)

    try:
        with torch.no_grad(), preserved_random_state(tensors[0].device):
            both, again, first, second = of(0, 2), of(0, 2), of(0, 1), of(1, 2)
    except Exception:  # whatever a loss of the user's does with rows it was not made for; the step itself will tell
        return
    if both != again or not all(map(_finite, (*both, *first, *second))):
        return
    for name, index in (("sum", 0), ("weight", 1)):
        parts, scale = first[index] + second[index], abs(first[index]) + abs(second[index]) + abs(both[index])
        if abs(parts - both[index]) > _CLOSE * scale:
            raise ConfigError(
                f"the loss of two rows has the {name} {both[index]:.6g}, each by itself "
                f"{first[index]:.6g} and {second[index]:.6g}, which is {parts:.6g} together",
                why="rows are spread over microbatches and ranks, so its value would depend on how they are",
                fix="return the sum over rows and their number; weigh what is added to it (a penalty) by that number; "
                "a loss that compares rows with each other (contrastive) needs them in one row. Where rows are not "
                "along the first dim of the outputs this test is wrong: set loss.additive = True",
            )


def _finite(value: float) -> bool:
    return value - value == 0
