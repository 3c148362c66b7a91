"""The collectives of a step: called in one place, counted by kind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from meshwright.runtime._torch import AllGather, ReduceScatter, WeakIdKeyDictionary

__all__ = ["CountedAllGather", "CountedReduceScatter", "Traffic"]


class Traffic:
    """Counts collectives by kind (`all_gather`, `reduce_scatter`, `all_reduce`, `statistics`, `send`, `receive`), and
    tells who listens.

    `buffer_moment` is called inside each reduce-scatter, when its buffers are alive: a moment to count memory.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.buffer_moment: Callable[[], None] | None = None
        #: Told of each collective of ZeRO's when it began and when its call returned (`time.perf_counter`).
        self.watch: Callable[[str, float, float], None] | None = None
        #: Buffers of the reduce-scatter that is being made.
        self.reduce_buffers: list[torch.Tensor] = []
        #: Storages of gathers that are not yet copied out (units gathered ahead), for as long as they live.
        self.gather_buffers: Any = WeakIdKeyDictionary()

    def count(self, kind: str) -> None:
        """One more collective of a kind."""
        self.counts[kind] += 1

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Count a collective that is called inside, and tell who watches."""
        self.count(kind)
        start_s = time.perf_counter()
        yield
        if self.watch is not None:
            self.watch(kind, start_s, time.perf_counter())

    def take(self) -> dict[str, int]:
        """The counts since the last call."""
        counts, self.counts = dict(self.counts), Counter()
        return counts


class CountedAllGather(AllGather):
    """FSDP2's all-gather of one unit, counted."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A temporary buffer: the whole unit in the compute dtype."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self._traffic.gather_buffers[buffer.untyped_storage()] = True
        return buffer

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather the shards of a unit from its shard group."""
        with self._traffic.timed("all_gather"):
            work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class CountedReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter of one unit's gradients, counted; where it blocks, its input is freed at once."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A temporary buffer: the unit's gradients in the reduce dtype, or this rank's share of them."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self._traffic.reduce_buffers.append(buffer)
        return buffer

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum a unit's gradients over its shard group; each rank keeps its share."""
        if self._traffic.buffer_moment is not None:
            self._traffic.buffer_moment()
        with self._traffic.timed("reduce_scatter"):
            work: dist.Work | None = dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        if work is None and input_tensor.device.type == "cpu":
            input_tensor.untyped_storage().resize_(0)
        self._traffic.reduce_buffers.clear()
        return work
