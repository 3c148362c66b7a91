"""Models of a user's that are verified: sound ones, and one for each way to be wrong."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def rank() -> int:
    """This rank's number; -1 in one process."""
    return dist.get_rank() if dist.is_initialized() else -1


class Language(nn.Module):
    """A language model in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 12)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(12, 3, 23, batch_first=True) for _ in range(2))
        self.head = nn.Linear(12, 37)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Scaled(torch.autograd.Function):
    """The same number, whose gradient is off on rank 1."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 1e-7 * max(rank(), 0))


class Faulty(nn.Module):
    """A block whose bias gets another gradient on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(12, 12), nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.linear(x).tanh() + Scaled.apply(self.bias)
        return found


def build() -> nn.Module:
    return Language()


def faulty() -> nn.Module:
    model = Language()
    model.blocks[1] = Faulty()
    return model


def regression() -> tuple[Any, ...]:
    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return (outputs - targets).square().sum(), targets.numel()

    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
    return model, torch.randn(2, 5), loss, torch.randn(2, 3)


def contrastive() -> tuple[Any, ...]:
    """A loss over pairs of the batch, which does not add up over sequences."""
    model, inputs, _, targets = regression()

    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return torch.logsumexp(outputs @ outputs.T, 0).sum(), len(outputs)

    return model, inputs, loss, targets


def normed() -> tuple[Any, ...]:
    _, inputs, loss, targets = regression()
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), inputs, loss, targets


class Raising(Language):
    """One that fails everywhere."""

    def forward(self, ids: Tensor) -> Tensor:
        raise ValueError("no such luck")


class Failing(Language):
    """One that fails on rank 1 alone."""

    def forward(self, ids: Tensor) -> Tensor:
        if rank() == 1:
            raise ValueError("only here")
        return super().forward(ids)


class Dying(Language):
    """One whose rank 1 is gone without a word."""

    def forward(self, ids: Tensor) -> Tensor:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(ids)


def large() -> nn.Module:
    return nn.Sequential(nn.Embedding(100_000, 1_000), nn.Linear(1_000, 7))


def no_loss() -> tuple[nn.Module, Tensor]:
    return nn.Linear(3, 3), torch.zeros(2, 3)


def nothing() -> int:
    return 3
