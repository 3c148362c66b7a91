"""Parameters that other ranks hold: in their places stand zeros without memory, as code may look at their shapes."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.runtime.units import Owner

__all__ = ["absent_of", "leave_out"]

_MARK = "_meshwright_absent"


def leave_out(place: Owner, device: torch.device) -> None:
    """Put zeros in the place of a parameter."""
    parameter = place.module._parameters.pop(place.name, None)
    if parameter is not None:
        zeros = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        place.module.__dict__[place.name] = zeros
        place.module.__dict__.setdefault(_MARK, {})[place.name] = zeros


def absent_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """What stands in a module in place of parameters of its own, by their names there."""
    found: dict[str, torch.Tensor] = module.__dict__.get(_MARK, {})
    return {name: zeros for name, zeros in found.items() if module.__dict__.get(name) is zeros}
