"""Computing in a narrower dtype than parameters are stored in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.runtime.tensors import map_values
from meshwright.runtime.units import Owner, Unit

__all__ = ["ComputeCopies", "cast_inputs"]


def cast_inputs(modules: Sequence[nn.Module], dtype: torch.dtype) -> list[RemovableHandle]:
    """Cast the floating-point inputs of these modules to the compute dtype before each forward.

    Returns:
        Handles that take the casts away again.
    """

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return map_values(cast, args), map_values(cast, kwargs)

    return [module.register_forward_pre_hook(before, with_kwargs=True) for module in modules]


class ComputeCopies:
    """Copies of whole parameters in the compute dtype, in the parameters' places while they exist.

    This is what ZeRO-0 computes with when parameters are stored wider: P parameters cost cP bytes during a step.
    """

    def __init__(self, units: Sequence[Unit], dtype: torch.dtype) -> None:
        self._places: dict[str, tuple[Owner, ...]] = {
            name: where for unit in units for name, where in unit.parameters.items()
        }
        self._dtype = dtype
        self.stored: dict[str, nn.Parameter] = {}
        self.copies: dict[str, nn.Parameter] = {}

    def __enter__(self) -> dict[str, nn.Parameter]:
        if self.copies:
            raise RuntimeError(
                "compute copies are already in place"
            )  # an internal error: taken from copies, all would stop to train
        for name, where in self._places.items():
            stored: nn.Parameter = getattr(where[0].module, where[0].name)
            self.stored[name] = stored
            copy = (
                nn.Parameter(stored.detach().to(self._dtype), stored.requires_grad)
                if stored.is_floating_point()
                else stored
            )
            self.copies[name] = copy
            for owner in where:
                setattr(owner.module, owner.name, copy)
        return self.copies

    def __exit__(self, *_: object) -> None:
        for name, where in self._places.items():
            for owner in where:
                setattr(owner.module, owner.name, self.stored[name])
        self.stored, self.copies = {}, {}
