"""Which columns of the vocabulary each tensor-parallel rank holds, and the exchanges between them, differentiable.

Every rank of the group computes the same loss from the same rows, so the gradient of anything whole is whole and equal
on every rank: gathering and taking columns are each other's backward, and what is summed over ranks passes its gradient
on as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from meshwright.runtime.collectives import Traffic

__all__ = ["Columns", "applied", "gather_columns", "replicated", "sum_over_ranks", "take_columns"]


@dataclass(frozen=True)
class Columns:
    """How logits lie over a group: each rank holds a range of columns of the vocabulary, in the order of ranks.

    Attributes:
        widths: columns of each rank, padding left out; may differ, and be 0.
        group: the ranks.
        traffic: counts the collectives, as `tp_all_reduce` and `tp_all_gather`.
        rank: this one's number in the group.
        start: this rank's first column.
    """

    widths: tuple[int, ...]
    group: dist.ProcessGroup
    traffic: Traffic = field(compare=False, repr=False)
    rank: int = field(init=False)
    start: int = field(init=False)

    def __post_init__(self) -> None:
        rank = dist.get_rank(self.group)
        object.__setattr__(self, "widths", tuple(self.widths))
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "start", sum(self.widths[:rank]))

    @property
    def vocabulary(self) -> int:
        """Columns of all ranks together."""
        return sum(self.widths)

    @property
    def width(self) -> int:
        """Columns of this rank."""
        return self.widths[self.rank]

    def find(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which columns of the vocabulary are this rank's, and where they lie in its own; 0 for all others."""
        position = index - self.start
        inside = (position >= 0) & (position < self.width)
        return inside, position.masked_fill(~inside, 0)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """The tensor, summed (or `op`) over the group in place."""
        if tensor.numel():  # all ranks have the same rows, so none of them waits
            self.traffic.count("tp_all_reduce")
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def all_gather(self, local: torch.Tensor) -> torch.Tensor:
        """Local [..., Vl] of every rank, side by side: [..., V]. Widths are made equal inside the collective."""
        leading, widest = local.shape[:-1], max(self.widths)
        if not leading.numel() * widest:
            return local.new_empty((*leading, self.vocabulary))
        sent = local.new_zeros((*leading, widest))
        sent[..., : self.width] = local
        received = local.new_empty(len(self.widths) * sent.numel())
        self.traffic.count("tp_all_gather")
        dist.all_gather_single(received, sent.view(-1), group=self.group)
        parts = received.view(len(self.widths), *sent.shape).unbind()
        return torch.cat([part[..., :width] for part, width in zip(parts, self.widths, strict=True)], dim=-1)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's columns of [..., V], as memory of their own."""
        return whole.narrow(-1, self.start, self.width).clone()


def applied(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    """The tensor that an autograd function makes of these arguments."""
    result: torch.Tensor = function.apply(*args)
    return result


def gather_columns(local: torch.Tensor, columns: Columns) -> torch.Tensor:
    """[..., Vl] to [..., V]; backward takes this rank's columns of the gradient."""
    return applied(_Gather, local, columns)


def take_columns(whole: torch.Tensor, columns: Columns) -> torch.Tensor:
    """[..., V] to [..., Vl]; backward gathers the gradient of all ranks' columns."""
    return applied(_Take, whole, columns)


def sum_over_ranks(part: torch.Tensor, columns: Columns) -> torch.Tensor:
    """The sum of every rank's `part`; each of them has the sum's gradient."""
    return applied(_Sum, part, columns)


def replicated(tensor: torch.Tensor, columns: Columns) -> torch.Tensor:
    """A tensor that all ranks have alike, before it meets their columns: backward sums its gradient over them."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    return applied(_Replicated, tensor, columns)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, columns: Columns) -> torch.Tensor:
        ctx.columns = columns
        return columns.all_gather(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return applied(_Take, gradient, ctx.columns), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, columns: Columns) -> torch.Tensor:
        ctx.columns = columns
        return columns.take(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return applied(_Gather, gradient, ctx.columns), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, columns: Columns) -> torch.Tensor:
        return columns.all_reduce(part.clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, columns: Columns) -> torch.Tensor:
        ctx.columns = columns
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return applied(_Sum, gradient, ctx.columns), None
