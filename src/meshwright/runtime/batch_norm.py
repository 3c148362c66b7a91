"""Batch normalisation under data parallelism: over the rows of all ranks, or not at all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshwright.errors import ConfigError
from meshwright.spec import Strategy

__all__ = ["couple_batch_norms"]


def couple_batch_norms(model: nn.Module, strategy: Strategy, device: torch.device) -> bool:
    """Make the model's `SyncBatchNorm` modules run on this device; whether it has any in use.

    A microbatch is then normalised over its rows on all ranks, as one process does with `dp` times the microbatch.

    Raises:
        ConfigError: plain batch norms on several ranks, or batch norms that recompute would update twice.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not found:
        return False
    name, module = next(iter(found.items()))
    if strategy.recompute != "none":
        raise ConfigError(
            f"module {name} is a {type(module).__name__} and the strategy has recompute={strategy.recompute}",
            why="a forward that runs twice updates its running statistics twice",
            fix="set recompute=none, or use LayerNorm or GroupNorm",
        )
    plain = {name: type(m).__name__ for name, m in found.items() if not isinstance(m, nn.SyncBatchNorm)}
    if plain and strategy.dp > 1:
        name, kind = next(iter(plain.items()))
        raise ConfigError(
            f"module {name} is a {kind} and the strategy has dp={strategy.dp}",
            why="its statistics are of each rank's own samples, so numbers would depend on the number of ranks",
            fix="use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or LayerNorm or GroupNorm",
        )
    if device.type == "cpu" and strategy.dp > 1:
        for module in found.values():
            module.__class__ = _HostSyncBatchNorm
    return strategy.dp > 1


class _HostSyncBatchNorm(nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` where PyTorch has no kernel for it: the same formula by two all-reduces.

    Gradients are those of the sum of all ranks' losses, as everywhere in the engine.
    """

    def forward(self, input: Tensor) -> Tensor:  # the argument's name is PyTorch's
        own_statistics = self.training or self.running_mean is None
        if not own_statistics or not dist.is_initialized():
            return nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, own_statistics, 0.0, self.eps
            )
        dims = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        rows = wide.new_tensor([input.numel() / input.size(1)])
        total = _sum_over_ranks(torch.cat([wide.sum(dims), rows]))
        count = total[-1].detach()
        mean = total[:-1] / count
        centred = wide - mean.view(shape)
        variance = _sum_over_ranks(centred.square().sum(dims)) / count
        self._remember(mean.detach(), variance.detach(), float(count))
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        made: Tensor = normal.to(input.dtype)
        return made

    def _remember(self, mean: Tensor, variance: Tensor, count: float) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum  # type: ignore[arg-type]
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        unbiased = variance * count / max(count - 1.0, 1.0)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def _sum_over_ranks(value: Tensor) -> Tensor:
    total: Tensor = _SumOverRanks.apply(value)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks that every rank's loss depends on; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.detach().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total
