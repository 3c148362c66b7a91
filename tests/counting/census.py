"""Counts memory and collectives without asking the runtime: whatever tensors Python can see, whatever c10d is called.

A census looks at every tensor object there is (and its `.grad`) and adds up their storages, each once. What autograd
keeps inside C++ is not seen: that leaves out activations, which do not belong to the table of ZeRO.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.runtime import Engine

__all__ = ["Census", "CollectiveCounter", "bytes_by_storage", "optimizer_bytes", "parameter_bytes"]


def bytes_by_storage(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage under these tensors, by its address."""
    found = {}
    for tensor in tensors:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage.device.type != "meta" and storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def all_tensors() -> Iterator[Tensor]:
    """Every tensor that Python sees, and the gradients of the leaves among them."""
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not thing.is_sparse:
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def parameter_bytes(engine: Engine) -> dict[int, int]:
    """This rank's stored parameters."""
    return bytes_by_storage([p.detach() for group in engine.optimizer.param_groups for p in group["params"]])


def optimizer_bytes(engine: Engine) -> dict[int, int]:
    """This rank's optimizer states, without the step counters (four bytes for each parameter)."""
    states = [
        t for state in engine.optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()
    ]
    return bytes_by_storage(states)


class Census:
    """Takes down, at named moments of a step, the bytes of all that was not there when the step began."""

    def __init__(self, engine: Engine, blocks: Sequence[nn.Module] = ()) -> None:
        self.moments: dict[str, int] = {}
        self.microbatch = -1
        self._before: dict[int, int] = {}
        engine.model.register_forward_pre_hook(self._model_begins, prepend=True)
        engine.model.register_forward_hook(lambda *_: self.take(f"forward {self.microbatch} end"))
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._block_begins(index))

    def begin(self) -> None:
        """Start over, before a step."""
        self.moments, self.microbatch, self._before = {}, -1, self._count()

    def take(self, moment: str) -> None:
        """Count now."""
        self.moments[moment] = sum(size for place, size in self._count().items() if place not in self._before)

    def _count(self) -> dict[int, int]:
        gc.collect()
        # Threads of asynchronous collectives let go of their tensors a little after those are done.
        time.sleep(0.003)
        return bytes_by_storage(tensor for tensor in all_tensors() if tensor.dtype != torch.uint8)

    def _model_begins(self, module: nn.Module, args: Any) -> None:
        self.microbatch += 1
        self.take(f"before {self.microbatch}")

    def _block_begins(self, index: int) -> Callable[..., None]:
        # Recompute would call it in backward again; the counted models do not recompute.
        return lambda *_: self.take(f"forward {self.microbatch} block {index}")


class CollectiveCounter(TorchDispatchMode):
    """Counts the operations of c10d by name and group size; `census` is taken inside each reduce-scatter."""

    def __init__(self, census: Census | None = None) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._census = census

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.split(".")[0].strip("_")
            self.calls[name] += 1
            if self._census is not None and name == "reduce_scatter_base":
                self._census.take(f"reduce {self._census.microbatch} {self.calls[name] - 1}")
        return func(*args, **(kwargs or {}))
