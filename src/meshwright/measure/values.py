"""Tensors inside whatever a module takes and returns: containers, mappings, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from meshwright.runtime._torch import storage_key

__all__ = ["Storages", "TensorForm", "bytes_of", "find_tensors", "map_values", "storages_of", "tensor_bytes"]

Storages = dict[int, torch.UntypedStorage]


class TensorForm(NamedTuple):
    """All of a tensor but its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        """The form of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, *, filled: bool = False) -> torch.Tensor:
        """A new tensor of this form, a leaf of the autograd graph.

        Its values are arbitrary, or `filled` with normal random numbers, and with zeros and ones where they are whole.
        """
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        if filled and self.dtype.is_floating_point:
            made.normal_()
        elif filled:
            made.random_(0, 2)
        return made.requires_grad_(self.requires_grad)


def find_tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, in order, as often as it occurs."""
    return list(_walk(value))


def _walk(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _walk(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name))


def map_values(function: Callable[[Any], Any], value: Any, kind: type = torch.Tensor) -> Any:
    """A copy with `function` applied to every `kind` in nested tuples, lists, mappings and dataclasses."""
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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        duplicate = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(duplicate, field.name, map_values(function, getattr(value, field.name), kind))
        return duplicate
    return value


def storages_of(tensors: Iterable[torch.Tensor]) -> Storages:
    """The storages of tensors by identity, each once. They are held, so that no identity is given twice."""
    found: Storages = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:  # a sparse tensor has no storage of its own
            storage = tensor.untyped_storage()
            found[storage_key(storage)] = storage
    return found


def bytes_of(storages: Storages) -> int:
    """Bytes of storages."""
    return sum(storage.nbytes() for storage in storages.values())


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements of different tensors."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
