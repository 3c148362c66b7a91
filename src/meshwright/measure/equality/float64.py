"""Makes float64 checks possible on models that compute parts of themselves in float32 whatever their dtype.

Hugging Face norms, softmaxes and losses cast up to float32; in a float64 model that is a cast down, which costs 1e-7
and would hide every error below it. Inside `float32_upcasts_stay_float64`, a float64 tensor that is asked for in
float32 stays float64. It is used on both sides of a comparison.

The methods themselves are replaced for a while: a `TorchFunctionMode` is off inside backward, where recompute runs
forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

__all__ = ["float32_upcasts_stay_float64"]

#: Functions of a tensor that name the dtype of their result, or in which they compute.
_WITH_DTYPE: tuple[tuple[Any, str], ...] = (
    (Tensor, "to"),
    (Tensor, "type"),
    (Tensor, "sum"),
    (Tensor, "mean"),
    (Tensor, "softmax"),
    (Tensor, "log_softmax"),
    (torch, "softmax"),
    (torch, "log_softmax"),
    (torch.nn.functional, "softmax"),
    (torch.nn.functional, "log_softmax"),
)


def _wider(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # tensor subclasses are told the function, and know it by its name
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return function(tensor, *args, **kwargs)

    return call


@contextmanager
def float32_upcasts_stay_float64() -> Iterator[None]:
    """Inside, no float64 tensor becomes float32 by `.float()`, `.to(torch.float32)` or `dtype=torch.float32`."""
    narrow = Tensor.float

    @wraps(narrow)
    def keep(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else narrow(tensor)

    with ExitStack() as patches:
        for owner, name in _WITH_DTYPE:
            patches.enter_context(patch.object(owner, name, _wider(getattr(owner, name))))
        patches.enter_context(patch.object(Tensor, "float", keep))
        yield
