"""Batch normalisation under data parallelism: over the rows of all ranks, or not at all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.runtime._torch import BatchNormBase, NormBase
from meshwright.spec import Strategy

__all__ = ["couple_batch_norms"]


def couple_batch_norms(model: nn.Module, strategy: Strategy, device: torch.device, compute: torch.dtype) -> bool:
    """Make the model's batch norms run on this device; whether some normalise over the rows of several ranks.

    With `SyncBatchNorm` a microbatch is normalised over its rows on all ranks, as one process does with `dp` times the
    microbatch. Norms that are frozen (in evaluation mode inside a model that trains) look at no rows.

    Raises:
        ConfigError: running or plain statistics on several ranks, or statistics that recompute would update twice.
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, NormBase)}
    norms = {name: m for name, m in norms.items() if isinstance(m, BatchNormBase) or m.track_running_stats}
    live = {name: module for name, module in norms.items() if module.training or not model.training}
    for name, module in live.items():
        named = f"module {name} is a {type(module).__name__} and the strategy has"
        if strategy.recompute != "none" and module.track_running_stats:
            raise ConfigError(
                f"{named} recompute={strategy.recompute}",
                why="a forward that runs twice updates its running statistics twice",
                fix="set recompute=none, freeze it (module.eval() before the engine is built), or use GroupNorm",
            )
        if strategy.dp > 1 and not isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                f"{named} dp={strategy.dp}",
                why="its statistics are of each rank's own samples, so numbers would depend on the number of ranks",
                fix="use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or LayerNorm or GroupNorm"
                if isinstance(module, BatchNormBase)
                else "build it with track_running_stats=False",
            )
        if strategy.dp > 1 and not module.track_running_stats:
            raise ConfigError(
                f"{named} dp={strategy.dp}, and it keeps no running statistics",
                why="an evaluation would be of the rows that happen to be looked at together",
                fix="build it with track_running_stats=True, or use GroupNorm",
            )
    if device.type == "cpu":
        for module in norms.values():
            _run_on_host(module, compute)
    return strategy.dp > 1 and bool(live)


def _run_on_host(module: NormBase, compute: torch.dtype) -> None:
    """PyTorch (2.13) has no batch norm over ranks on CPUs, and none whose statistics are of another dtype."""
    mean = module.running_mean
    unlike = mean is not None and mean.dtype != compute
    if isinstance(module, nn.SyncBatchNorm) or (isinstance(module, BatchNormBase) and unlike):
        module.__class__ = _HostSyncBatchNorm if isinstance(module, nn.SyncBatchNorm) else _HostBatchNorm


class _HostBatchNorm(BatchNormBase):
    """Batch norm by its formula, statistics in float32 or wider whatever the input is."""

    def forward(self, input: Tensor) -> Tensor:  # the argument's name is PyTorch's
        dims = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        if self.training or self.running_mean is None or self.running_var is None:
            rows = wide.new_tensor([input.numel() / input.size(1)])
            total = self._sum(torch.cat([wide.sum(dims), rows]))
            count = total[-1].detach()
            mean = total[:-1] / count
            centred = wide - mean.view(shape)
            variance = self._sum(centred.square().sum(dims)) / count
            self._remember(mean.detach(), variance.detach(), float(count))
        else:
            centred = wide - self.running_mean.to(wide.dtype).view(shape)
            variance = self.running_var.to(wide.dtype)
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    def _sum(self, value: Tensor) -> Tensor:
        return value

    def _remember(self, mean: Tensor, variance: Tensor, count: float) -> None:
        tracked = self.num_batches_tracked
        if not self.training or self.running_mean is None or self.running_var is None or tracked is None:
            return
        tracked.add_(1)
        momentum = 1.0 / float(tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        unbiased = variance * count / max(count - 1.0, 1.0)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _HostSyncBatchNorm(_HostBatchNorm, nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` on CPUs: the same formula by two all-reduces.

    Gradients are those of the sum of all ranks' losses, as everywhere in the engine.
    """

    def _sum(self, value: Tensor) -> Tensor:
        return _sum_over_ranks(value) if self.training and dist.is_initialized() else value


def _sum_over_ranks(value: Tensor) -> Tensor:
    total: Tensor = _SumOverRanks.apply(value)  # type: ignore[no-untyped-call]  # torch leaves it without annotations
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
