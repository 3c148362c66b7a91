"""The loss contract: a sum and its weight, so that the loss of a step is all sums over the global weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.errors import ConfigError
from meshwright.runtime.tensors import map_values

__all__ = ["LossFunction", "MeanLoss", "call_loss"]

#: `(outputs, targets) -> (sum, weight)`: a differentiable scalar and the number (or tensor) it is the sum over.
LossFunction = Callable[[Any, Any], Any]


class MeanLoss:
    """A loss that returns a mean, with how to count what it is the mean over.

    Args:
        mean: `(outputs, targets) -> scalar`, the mean loss of one microbatch.
        weight: `targets -> number or scalar tensor`, what the mean divides by, for example the number of valid labels.

    A microbatch of weight 0 (no valid label) adds nothing, even where its mean is not a number.
    """

    def __init__(self, mean: Callable[[Any, Any], torch.Tensor], *, weight: Callable[[Any], Any]) -> None:
        self.mean = mean
        self._weight = weight

    def __call__(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.as_tensor(self._weight(targets), dtype=torch.float64)
        if weight.numel() == 1 and weight == 0:
            return _nothing(outputs), weight
        mean = self.mean(outputs, targets)
        return mean * weight.to(mean.device, mean.dtype), weight


def _nothing(outputs: Any) -> torch.Tensor:
    """A zero that has gradients, all of them zero."""
    parts: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            parts.append((tensor * 0).sum())
        return tensor

    map_values(look, outputs)
    return torch.stack(parts).sum() if parts else torch.zeros(())


def call_loss(loss: LossFunction, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a loss and check what it returns.

    Returns:
        The scalar sum (differentiable) and the weight (float64 scalar on the same device).

    Raises:
        ConfigError: the loss does not return a scalar sum and a weight.
    """
    result = loss(outputs, targets)
    if not isinstance(result, tuple) or len(result) != 2:
        shown = f"a {type(result).__name__}" if not isinstance(result, tuple) else f"{len(result)} values"
        raise ConfigError(
            f"the loss returned {shown}",
            why="Meshwright divides the sum of all losses by the global weight, so it needs both",
            fix="return (sum, weight), or wrap a mean: MeanLoss(fn, weight=count_of_valid_labels)",
        )
    total, weight = result
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        shape = tuple(total.shape) if isinstance(total, torch.Tensor) else type(total).__name__
        raise ConfigError(f"the loss sum is not a scalar tensor: {shape}", fix="sum it over all elements")
    weight = torch.as_tensor(weight, dtype=torch.float64, device=total.device).detach()
    if weight.numel() != 1:
        raise ConfigError(f"the loss weight is not one number: shape {tuple(weight.shape)}", fix="return one number")
    if torch.is_grad_enabled() and not total.requires_grad:
        raise ConfigError(
            "the loss sum has no gradient",
            why="it does not depend on a trainable parameter",
            fix="compute it from the model's outputs, without detach() or no_grad(), and train at least one parameter",
        )
    return total.reshape(()), weight.reshape(())
