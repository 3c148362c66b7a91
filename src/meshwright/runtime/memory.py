"""Counting memory: bytes of unique tensor storages by category, at rest and at unit boundaries in a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.runtime._torch import TorchDispatchMode, WeakIdKeyDictionary, storage_key
from meshwright.runtime.tensors import map_values
from meshwright.runtime.zero import Zero

__all__ = ["MemoryMeter", "state_storages"]

Storages = Iterable[torch.UntypedStorage]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_storages(model: nn.Module, optimizer: Optimizer) -> dict[str, list[torch.UntypedStorage]]:
    """Storages that stay between steps: `parameters` (with buffers) and `optimizer` states."""
    held = [*model.parameters(), *model.buffers()]
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return {
        "parameters": [_local(tensor.detach()).untyped_storage() for tensor in held],
        "optimizer": [_local(tensor).untyped_storage() for tensor in states],
    }


class _LiveStorages(TorchDispatchMode):
    """Remembers the storage of every tensor that an operation makes, for as long as it lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes without annotations
        self.alive: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        map_values(self._see, result)
        return result

    def _see(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            self.alive[tensor.untyped_storage()] = True
        return tensor


class MemoryMeter:
    """Counts a step's memory at its unit boundaries and keeps the moment with the largest total.

    Use as a context around the forwards and backwards of a step; `note()` counts a moment. Categories: `parameters`
    (stored, with buffers), `optimizer`, `gathered` (there only for computing), `gradients` (whole, partial, reduced, in
    flight), `activations` (all else that an operation of the step made and that is alive, logits included), `total`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, zero: Zero) -> None:
        self._zero = zero
        self._states = {
            kind: {storage_key(storage): storage for storage in storages}
            for kind, storages in state_storages(model, optimizer).items()
        }
        self._live = _LiveStorages()
        self.peak: dict[str, int] = {}
        self.largest: dict[str, int] = {}

    def __enter__(self) -> MemoryMeter:
        self._zero.moment = self.note
        self._live.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        self._live.__exit__(*details)  # type: ignore[no-untyped-call]
        self._zero.moment = None

    def note(self) -> None:
        """Count this moment."""
        categories: dict[str, Storages] = {
            "parameters": self._states["parameters"].values(),
            "optimizer": self._states["optimizer"].values(),
            "gathered": self._zero.gathered_storages(),
            "gradients": self._zero.gradient_storages(),
            "activations": list(self._live.alive.keys()),
        }
        seen: set[int] = set()
        counted: dict[str, int] = {}
        for kind, storages in categories.items():
            total = 0
            for storage in storages:
                if storage_key(storage) not in seen:
                    seen.add(storage_key(storage))
                    total += storage.nbytes()
            counted[kind] = total
        counted["total"] = sum(counted.values())
        for kind, size in counted.items():
            self.largest[kind] = max(self.largest.get(kind, 0), size)
        if counted["total"] > self.peak.get("total", -1):
            self.peak = counted


def bytes_of(storages: Storages) -> int:
    """Bytes of storages, each counted once."""
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())
