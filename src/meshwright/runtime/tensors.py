"""Tensors inside nested Python values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["map_tensors"]


def map_tensors(function: Any, value: Any) -> Any:
    """Apply a function to every tensor in nested tuples, lists and mappings; all else stays as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    if type(value) is not dict and isinstance(value, Mapping):
        try:
            return type(value)((key, map_tensors(function, item)) for key, item in value.items())  # type: ignore[call-arg]
        except TypeError:
            pass  # a mapping that is built in another way, a defaultdict for example
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value
