"""The collectives of tensor parallelism as autograd functions: what goes over the wire forward, and what backward.

Activations are batch x tokens x width, and cut along the tokens where sequence parallelism cuts them. The pairs are
those of Shoeybi et al. (arXiv 1909.08053) and, for sequences, Korthikanti et al. (arXiv 2205.05198).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright.runtime.collectives import Traffic

__all__ = ["Wire"]


class Wire:
    """The tensor-parallel group of this rank, and the sequence that goes through it.

    Attributes:
        sequence_parallel: activations between the divided matrices are cut along the tokens, where gradients are made.
        length: tokens of the sequence that was cut last; the last ranks' parts are padded to equal ones.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, *, sequence_parallel: bool) -> None:
        self.group, self.traffic = group, traffic
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sequence_parallel = sequence_parallel
        self.length = 0

    @property
    def cuts_sequences(self) -> bool:
        """Whether sequences are cut now: not in evaluation and generation, where nothing is kept for backward."""
        return self.sequence_parallel and torch.is_grad_enabled()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """An activation that all ranks have, handed to divided matrices: its gradients are summed."""
        return _applied(_Enter, x, self)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' partial results; each gets the gradient as it is."""
        return _applied(_Leave, x, self)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Parts of a sequence, handed whole to divided matrices: gathered; gradients are summed and cut."""
        return _applied(_Gather, x, self)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' partial results of a whole sequence, summed and cut; gradients are gathered."""
        return _applied(_Scatter, x, self)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of a sequence that all ranks have; gradients are gathered."""
        self.length = x.shape[1]
        return _applied(_Split, x, self)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """A whole sequence of parts, for what all ranks compute alike: of the gradient each takes its part."""
        return _applied(_Join, x, self)

    def gather_columns(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """Outputs side by side, for what all ranks compute alike; `widths`: those of all ranks."""
        return _applied(_Columns, x, self, widths)

    def take_columns(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """This rank's channels of an activation that all ranks have; gradients are gathered."""
        return _applied(_Take, x, self, widths)

    # --- the collectives themselves -----------------------------------------------------------------------------------

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce into a new tensor."""
        out = x.clone(memory_format=torch.contiguous_format)
        self.traffic.count("tp_all_reduce")
        dist.all_reduce(out, group=self.group)
        return out

    def gathered(self, part: torch.Tensor, length: int) -> torch.Tensor:
        """batch x tokens of a part x width to batch x `length` tokens x width, without the padding."""
        part = part.contiguous()
        self.traffic.count("tp_all_gather")
        out = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        dist.all_gather_single(out, part, group=self.group)
        ordered = out.view(self.size, *part.shape).transpose(0, 1)
        whole = ordered.reshape(part.shape[0], -1, *part.shape[2:])
        return whole if whole.shape[1] == length else whole.narrow(1, 0, length).contiguous()

    def summed_part(self, whole: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter along the tokens."""
        padded = self._padded(whole)
        parts = padded.view(padded.shape[0], self.size, -1, *padded.shape[2:]).transpose(0, 1).contiguous()
        self.traffic.count("tp_reduce_scatter")
        out = torch.empty_like(parts[0])
        dist.reduce_scatter_single(out, parts.flatten(0, 1), group=self.group)
        return out

    def own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's tokens."""
        padded = self._padded(whole)
        share = padded.shape[1] // self.size
        # A copy also where the part lies in one piece: as a view it would keep the whole.
        return padded.narrow(1, self.rank * share, share).clone(memory_format=torch.contiguous_format)

    def side_by_side(self, part: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """All-gather along the last dim, of parts of any width."""
        most = max(widths)
        padded = F.pad(part, (0, most - part.shape[-1])).contiguous()
        self.traffic.count("tp_all_gather")
        out = padded.new_empty((self.size, *padded.shape))
        dist.all_gather_single(out.flatten(0, 1) if padded.dim() > 1 else out.flatten(), padded, group=self.group)
        return torch.cat([piece[..., :width] for piece, width in zip(out, widths, strict=True)], dim=-1)

    def _padded(self, whole: torch.Tensor) -> torch.Tensor:
        missing = -whole.shape[1] % self.size
        if not missing:
            return whole
        return torch.cat([whole, whole.new_zeros((whole.shape[0], missing, *whole.shape[2:]))], dim=1)


def _applied(function: Any, *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)  # torch leaves its functions without annotations
    return result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire) -> torch.Tensor:
        ctx.wire = wire
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.wire.sum(gradient), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire) -> torch.Tensor:
        return wire.sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire) -> torch.Tensor:
        ctx.wire = wire
        return wire.gathered(x, wire.length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.wire.summed_part(gradient), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire) -> torch.Tensor:
        ctx.wire, ctx.length = wire, x.shape[1]
        return wire.summed_part(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.wire.gathered(gradient, ctx.length), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire) -> torch.Tensor:
        ctx.wire, ctx.length = wire, x.shape[1]
        return wire.own_part(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.wire.gathered(gradient, ctx.length), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire) -> torch.Tensor:
        ctx.wire = wire
        return wire.gathered(x, wire.length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.wire.own_part(gradient), None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire, widths: list[int]) -> torch.Tensor:
        ctx.wire, ctx.widths = wire, widths
        return wire.side_by_side(x, widths)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        start = sum(ctx.widths[: ctx.wire.rank])
        return gradient.narrow(-1, start, ctx.widths[ctx.wire.rank]), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Wire, widths: list[int]) -> torch.Tensor:
        ctx.wire, ctx.widths = wire, widths
        return x.narrow(-1, sum(widths[: wire.rank]), widths[wire.rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.wire.side_by_side(gradient, ctx.widths), None, None
