"""What happens to gradients between backward and optimizer: the global norm, the division by the weight, the clip."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

__all__ = ["clip_factor", "scale", "sum_of_squares"]


def sum_of_squares(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Sum of the squares of all elements, float64, on the gradients' device."""
    norms = [torch.linalg.vector_norm(g.detach(), dtype=torch.float64) for g in gradients.values() if g.numel()]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(norms).square().sum()


def clip_factor(norm: float, clip_norm: float) -> float:
    """What to multiply gradients by so that their norm is at most `clip_norm` (0: no clipping).

    The 1e-6 is that of `torch.nn.utils.clip_grad_norm_`: a clipped step is the one that plain PyTorch takes.
    """
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0


def scale(gradients: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply all gradients in place."""
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
