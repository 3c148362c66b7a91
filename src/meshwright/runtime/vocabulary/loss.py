"""Losses of logits that are divided over ranks along the vocabulary: no rank ever has all columns of a row.

Each needs a few numbers per row from the other ranks: the largest logit, the sum of exponentials, the target's logit
(vocabulary-parallel cross entropy: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3). All functions here take
and return plain local tensors; rows and targets are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from meshwright.runtime.vocabulary.columns import Columns, applied

__all__ = ["cross_entropy", "log_softmax", "logsumexp", "nll_loss", "pick", "require_columns"]

_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    local: torch.Tensor, target: torch.Tensor, columns: Columns, *, ignore_index: int, reduction: str
) -> torch.Tensor:
    """As `torch.nn.functional.cross_entropy` of the whole logits.

    Two all-reduces in forward, none in backward; what is kept for backward is `local` itself and two numbers a row.

    Args:
        local: this rank's columns [N, Vl] or [Vl].
        target: columns of the vocabulary [N] or a scalar.
        ignore_index: targets of this value add nothing and have no gradient.
        reduction: `mean` over targets that count (not a number where there is none), `sum`, or `none`.

    Returns:
        A scalar, or [N], in the dtype of `local`.

    Raises:
        IndexError: a target outside of the vocabulary (on a GPU the loss is not a number: looking would wait for it).
    """
    return _reduced(partial(applied, _CrossEntropy), local, target, columns, ignore_index, reduction)


def nll_loss(
    local: torch.Tensor, target: torch.Tensor, columns: Columns, *, ignore_index: int, reduction: str
) -> torch.Tensor:
    """As `torch.nn.functional.nll_loss` of whole log probabilities; arguments and result as for `cross_entropy`."""

    def rows(logs: torch.Tensor, index: torch.Tensor, columns: Columns) -> torch.Tensor:
        return -_pick(logs, index.unsqueeze(-1), columns).squeeze(-1)

    return _reduced(rows, local, target, columns, ignore_index, reduction)


def log_softmax(local: torch.Tensor, columns: Columns) -> torch.Tensor:
    """Logarithms of the softmax over the whole vocabulary [..., Vl]; one all-reduce of row sums in backward."""
    return applied(_LogSoftmax, local, columns)


def logsumexp(local: torch.Tensor, columns: Columns) -> torch.Tensor:
    """Logarithm of the sum of exponentials of each row [..., Vl] -> [...]."""
    return applied(_LogSumExp, local, columns)


def pick(local: torch.Tensor, index: torch.Tensor, columns: Columns) -> torch.Tensor:
    """The elements at columns `index` [..., K] of the whole rows [..., V], as `torch.gather` along the last dim."""
    return _checked(_pick(local, index, columns), index, columns)


def require_columns(index: torch.Tensor, columns: Columns) -> torch.Tensor:
    """Which of `index` are columns of the vocabulary.

    Raises:
        IndexError: some are not (on the CPU alone: a GPU would have to be waited for).
    """
    right = (index >= 0) & (index < columns.vocabulary)
    if index.device.type == "cpu" and not bool(right.all()):
        wrong = int(index[~right].flatten()[0])
        raise IndexError(f"Target {wrong} is out of bounds: the vocabulary has {columns.vocabulary} entries.")
    return right


def _checked(values: torch.Tensor, index: torch.Tensor, columns: Columns) -> torch.Tensor:
    checked: torch.Tensor = values.where(require_columns(index, columns), torch.nan)
    return checked


def _reduced(
    of_rows: Callable[[torch.Tensor, torch.Tensor, Columns], torch.Tensor],
    local: torch.Tensor,
    target: torch.Tensor,
    columns: Columns,
    ignore_index: int,
    reduction: str,
) -> torch.Tensor:
    """Losses of rows, put together; computed in float32 or wider."""
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction} is not a valid value for reduction")
    counted = target != ignore_index
    right = require_columns(target.where(counted, 0), columns) if columns.vocabulary else ~counted
    rows = of_rows(local.reshape(target.numel(), local.shape[-1]), target.flatten(), columns).reshape(target.shape)
    # Not a multiplication: what does not count may be infinite.
    rows = rows.where(right, torch.nan).where(counted, 0.0)
    if reduction == "none":
        return rows.to(local.dtype)
    total = rows.sum()
    return (total / counted.sum() if reduction == "mean" else total).to(local.dtype)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _largest(local: torch.Tensor, columns: Columns) -> torch.Tensor:
    """The largest of each whole row [..., Vl] -> [...], in float32 or wider."""
    if local.shape[-1]:
        peak = local.amax(-1).to(_wide(local))
    else:
        peak = local.new_full(local.shape[:-1], -torch.inf, dtype=_wide(local))
    return columns.all_reduce(peak, dist.ReduceOp.MAX)


def _gather(local: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """`local` at positions [..., K]; zeros where this rank has no column to point at."""
    return torch.gather(local, -1, position) if local.shape[-1] else local.new_zeros(position.shape)


def _softmax(local: torch.Tensor, peak: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    """exp(local - peak - log), with `peak` taken off first: it may be large beside the rest."""
    return torch.sub(local, peak.unsqueeze(-1)).sub_(log.unsqueeze(-1)).exp_()


class _CrossEntropy(torch.autograd.Function):
    """local [N, Vl], target [N] -> loss of each row [N]; rows whose target no rank has are of no use."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, target: torch.Tensor, columns: Columns) -> torch.Tensor:
        peak = _largest(local, columns)
        inside, position = columns.find(target)
        own = _gather(local, position.unsqueeze(-1)).squeeze(-1).to(peak.dtype) - peak
        sums = torch.stack([(local - peak.unsqueeze(-1)).exp_().sum(-1), own.where(inside, 0.0)])
        total, picked = columns.all_reduce(sums)
        log = total.log()
        ctx.save_for_backward(local, peak, log, target)
        ctx.columns = columns
        return torch.sub(log, picked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        local, peak, log, target = ctx.saved_tensors
        result = _softmax(local, peak, log)
        if local.shape[-1]:
            inside, position = ctx.columns.find(target)
            result.scatter_add_(-1, position.unsqueeze(-1), -inside.to(result.dtype).unsqueeze(-1))
        return result.mul_(gradient.unsqueeze(-1)).to(local.dtype), None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, columns: Columns) -> torch.Tensor:
        peak = _largest(local, columns)
        centred = local - peak.unsqueeze(-1)
        log = columns.all_reduce(centred.exp().sum(-1)).log()
        result = centred.sub_(log.unsqueeze(-1)).to(local.dtype)
        ctx.save_for_backward(result)
        ctx.columns = columns
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (result,) = ctx.saved_tensors
        total = ctx.columns.all_reduce(gradient.sum(-1, dtype=_wide(gradient)))
        shares = result.to(total.dtype).exp().mul_(total.unsqueeze(-1))
        return (gradient - shares).to(gradient.dtype), None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, columns: Columns) -> torch.Tensor:
        peak = _largest(local, columns)
        peak.masked_fill_(peak.isinf(), 0.0)  # infinity less infinity would be no number
        log = columns.all_reduce((local - peak.unsqueeze(-1)).exp_().sum(-1)).log()
        ctx.save_for_backward(local, peak, log)
        return (log + peak).to(local.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        local, peak, log = ctx.saved_tensors
        return _softmax(local, peak, log).mul_(gradient.unsqueeze(-1)).to(local.dtype), None


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, index: torch.Tensor, columns: Columns) -> torch.Tensor:
        inside, position = columns.find(index)
        ctx.save_for_backward(inside, position)
        ctx.shape = local.shape
        return columns.all_reduce(_gather(local, position).where(inside, 0.0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inside, position = ctx.saved_tensors
        result = gradient.new_zeros(ctx.shape)
        if result.shape[-1]:
            result.scatter_add_(-1, position, gradient.where(inside, 0.0))
        return result, None, None


def _pick(local: torch.Tensor, index: torch.Tensor, columns: Columns) -> torch.Tensor:
    return applied(_Pick, local, index, columns)
