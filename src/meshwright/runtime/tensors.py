"""Tensors inside whatever a module takes and returns: containers, mappings, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["find_tensors", "hidden_gradients", "hidden_tensors", "map_values"]


def find_tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, in order, as often as it occurs."""
    return list(_walk(value))


def map_values(function: Callable[[Any], Any], value: Any, kind: type = torch.Tensor) -> Any:
    """A copy with `function` applied to every `kind` in nested tuples, lists, mappings and dataclasses.

    All else (None, numbers, texts, other objects) stays as it is.
    """
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_values(function, item, kind) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_values(function, item, kind) for item in value)
    if isinstance(value, Mapping):
        copied = copy.copy(value) if hasattr(value, "__setitem__") else dict(value)
        for key, item in value.items():
            copied[key] = map_values(function, item, kind)
        return copied
    if _is_dataclass(value):
        duplicate = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(duplicate, field.name, map_values(function, getattr(value, field.name), kind))
        return duplicate
    return value


def hidden_gradients(value: Any) -> list[str]:
    """Types of objects in a value that hold differentiable tensors where FSDP2 does not look for them.

    It looks into tuples, lists, dicts and dataclasses (PyTorch 2.13), so that a unit's gather before its backward would
    not happen for a tensor inside anything else.
    """
    if value is None or isinstance(value, (torch.Tensor, bool, int, float, str, type)):
        return []
    if isinstance(value, (tuple, list)):
        return [name for item in value for name in hidden_gradients(item)]
    if isinstance(value, dict):
        return [name for item in value.values() for name in hidden_gradients(item)]
    if _is_dataclass(value):
        return [name for field in dataclasses.fields(value) for name in hidden_gradients(getattr(value, field.name))]
    inside = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return [type(value).__name__] if any(tensor.requires_grad for tensor in _walk(dict(inside))) else []


def hidden_tensors(value: Any) -> list[tuple[str, torch.Tensor]]:
    """Tensors inside of objects that `map_values` does not look into, each with the object's type."""
    if value is None or isinstance(value, (torch.Tensor, bool, int, float, str, type)):
        return []
    if isinstance(value, (tuple, list)):
        return [found for item in value for found in hidden_tensors(item)]
    if isinstance(value, Mapping):
        return [found for item in value.values() for found in hidden_tensors(item)]
    if _is_dataclass(value):
        return [found for field in dataclasses.fields(value) for found in hidden_tensors(getattr(value, field.name))]
    return [(type(value).__name__, tensor) for tensor in _walk(dict(getattr(value, "__dict__", {})))]


def _walk(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _walk(item)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
