"""Stacks of matrices (experts) with fewer entries than ranks: cut on their second dim, the same numbers, no padding."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.runtime import Engine
from meshwright.spec import Job, Strategy, shard_dim
from tests.harness.ranks import run_ranks

EXPERTS, WIDTH, INNER = 3, 8, 12


class Experts(nn.Module):
    """All experts on every row: what is tested is where their weights lie."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.up, self.down):
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("bei,ewi->bw", torch.einsum("bw,eiw->bei", x, self.up).tanh(), self.down)


def squares(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
    return (outputs - targets).square().sum(), targets.numel()


def engine(world: int, zero: int) -> Engine:
    return Engine(
        lambda: nn.Sequential(*(Experts() for _ in range(3))),
        squares,
        partial(torch.optim.AdamW, lr=0.01, eps=1e-4),
        Job(global_batch=8, param_dtype="float64", compute_dtype="float64", reduce_dtype="float64", clip_norm=0.5),
        Strategy(dp=world, zero=zero, microbatch=2),
        measure_memory="never",
    )


def run(world: int, zero: int, folder: Path | None) -> tuple[list[float], int]:
    """Losses and norms of three steps, and this rank's parameter elements; the state is saved at the end."""
    made, found = engine(world, zero), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        batch = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
        report = made.step((batch, batch.flip(0)))
        found += [report.loss, report.grad_norm]
    if folder is not None:
        made.save(folder)
    return found, made.bytes_at_rest()["parameters"] // 8


def reload(world: int, zero: int, folder: Path) -> float:
    made = engine(world, zero)
    made.load(folder)
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return made.step((batch, batch)).loss


def test_the_dim_that_is_cut() -> None:
    assert shard_dim((3, 12, 8), 4) == 1
    assert shard_dim((3, 12, 8), 3) == 0
    assert shard_dim((3, 10, 8), 4) == 0, "the second dim does not divide either: padded on the first"
    assert shard_dim((3, 8), 4) == 0
    assert shard_dim((7,), 4) == 0


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_stack_gives_the_numbers_of_one_process_and_is_not_padded(zero: int, tmp_path: Path) -> None:
    alone, whole = run_ranks(1, run, 1, 0, None)[0]
    for found, held in run_ranks(4, run, 4, zero, tmp_path / "saved"):
        assert found == pytest.approx(alone, rel=1e-12)
        assert held == whole // 4
    expected = run_ranks(1, reload, 1, 0, tmp_path / "saved")[0]
    assert run_ranks(4, reload, 4, zero, tmp_path / "saved") == pytest.approx([expected] * 4, rel=1e-12)
    assert run_ranks(2, reload, 2, 3, tmp_path / "saved") == pytest.approx([expected] * 2, rel=1e-12)
