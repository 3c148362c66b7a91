"""Signatures: which calls of which blocks are alike, so that one of them is measured for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from meshwright.measure.values import TensorForm, storages_of
from meshwright.runtime.tensors import find_tensors

__all__ = ["Signatures"]

_DEPTH = 4
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, type)
_BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"} | {"forward"}
#: Names under which a layer notes its own place; the value is left out where it is this place.
_PLACES = ("idx", "index", "id", "number", "num", "layer")


class Signatures:
    """Makes the signature of a block's call; equal signatures cost the same.

    It holds the module's classes and plain attributes, the forms of its parameters and buffers, and the forms of the
    call's tensors with which of them share memory. Attributes that are neither plain nor containers count by identity.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Any] = {}
        self._objects: dict[int, tuple[object, Any]] = {}

    def of(self, block: nn.Module, place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The signature, hashable. `place` is the block's place among the blocks, from 0."""
        if id(block) not in self._blocks:
            self._blocks[id(block)] = self._module(block, place)
        tensors = find_tensors((args, kwargs))
        keys = [next(iter(storages_of([tensor])), -1) for tensor in tensors]
        forms = tuple((TensorForm.of(tensor), keys.index(key)) for tensor, key in zip(tensors, keys, strict=True))
        plain = self._plain((args, dict(kwargs)), place, _DEPTH)
        return (self._blocks[id(block)], forms, plain, torch.is_grad_enabled())

    def _module(self, block: nn.Module, place: int) -> Any:
        parts = []
        for name, module in block.named_modules():
            own = {key: value for key, value in vars(module).items() if key not in _BOOKKEEPING}
            held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            forms = tuple((key, TensorForm.of(tensor)) for key, tensor in held)
            parts.append((name, type(module), forms, self._plain(own, place, _DEPTH)))
        return tuple(parts)

    def _plain(self, value: Any, place: int, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return "tensor"  # calls compare tensors by their forms
        if isinstance(value, _PLAIN):
            return (type(value).__name__, value)
        if isinstance(value, (FunctionType, nn.Module)) or depth == 0:
            return (type(value), id(value))
        if isinstance(value, partial):
            return tuple(self._plain(part, place, depth - 1) for part in (value.func, value.args, value.keywords))
        if isinstance(value, Mapping):
            entries = value.items()
            return tuple((str(key), self._entry(str(key), item, place, depth - 1)) for key, item in entries)
        if isinstance(value, (Sequence, set, frozenset)):
            return tuple(self._plain(item, place, depth - 1) for item in value)
        return self._object(value, place, depth)

    def _entry(self, name: str, value: Any, place: int, depth: int) -> Any:
        if name.rsplit("_", 1)[-1] in _PLACES and type(value) is int and value in (place, place + 1):
            return "place"
        return self._plain(value, place, depth)

    def _object(self, value: Any, place: int, depth: int) -> Any:
        known = self._objects.get(id(value))
        if known is None:
            inside = self._plain(dict(vars(value)), -1, depth - 1) if hasattr(value, "__dict__") else id(value)
            known = self._objects[id(value)] = (value, (type(value), inside))  # held: no identity is given twice
        return known[1]
