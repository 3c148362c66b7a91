"""Memory counted the same way for everybody: bytes of live tensors at every operation, and of the process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["LiveTensors", "peak_resident", "resident"]

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


class LiveTensors(TorchDispatchMode):
    """Counts the storages of all tensors that live, after every operation inside of the context.

    Tensors that are there when it begins count from the start; those of subclasses (DTensors) by the local tensors that
    they hold. What a kernel or a collective allocates inside of itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes without annotations
        self._alive: Any = WeakIdKeyDictionary()
        self.peak = 0
        gc.collect()
        for thing in gc.get_objects():
            if type(thing) in _PLAIN:
                self._see(thing)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # the subclass goes first, and its own operations come here
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._see, result)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._alive))
        return result

    def _see(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) in _PLAIN and not tensor.is_meta:
            self._alive[tensor.untyped_storage()] = True
        return tensor


def resident() -> int:
    """Bytes of this process in memory, after what is free was given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def peak_resident(act: Callable[[], object]) -> int:
    """The most bytes of this process that are in memory while it acts."""
    resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    act()
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
