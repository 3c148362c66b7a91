"""Gradients that are sent in bfloat16: rounded once on their way, and never summed over microbatches in it (D26)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright import UnsupportedCombination
from meshwright.runtime import Engine
from meshwright.spec import Job, Strategy
from tests.harness.ranks import run_ranks

MICROBATCHES = 16


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(7, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5))


def loss(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs.float(), labels, reduction="sum"), labels.numel()


def gradients(zero: int, reduced: Any, compute: Any, microbatches: int, shard: int) -> tuple[dict[str, Tensor], int]:
    ranks = torch.distributed.get_world_size()
    job = Job(global_batch=2 * ranks * microbatches, reduce_dtype=reduced, compute_dtype=compute)
    strategy = (
        Strategy(dp=ranks, zero=zero, microbatch=2, shard=shard)
        if shard
        else Strategy(dp=ranks, zero=zero, microbatch=2)
    )
    engine = Engine(model(), loss, lambda p: torch.optim.SGD(p, lr=0.1), job, strategy)
    found: dict[str, Tensor] = {}

    def keep(seen: dict[str, Tensor | None]) -> None:
        kept = {key: value for key, value in seen.items() if value is not None}
        found.update({k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in kept.items()})

    engine.on_gradients = keep
    generator = torch.Generator().manual_seed(1)
    rows = job.global_batch
    engine.step((torch.randn(rows, 7, generator=generator), torch.randint(0, 5, (rows,), generator=generator)))
    return found, engine.category_peaks["gradients"]


def error(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    difference = sum(float((found[name] - right[name]).square().sum()) for name in right)
    return (difference / sum(float(g.square().sum()) for g in right.values())) ** 0.5


@pytest.mark.parametrize(
    ("zero", "world", "microbatches", "shard"),
    [
        (0, 2, MICROBATCHES, 0),
        (0, 3, 2, 0),
        (1, 3, 1, 0),
        (2, 2, MICROBATCHES, 0),
        (2, 4, 1, 2),
        (3, 3, MICROBATCHES, 0),
    ],
)
def test_D26_gradients_in_bfloat16_are_rounded_where_they_are_sent_alone(
    zero: int, world: int, microbatches: int, shard: int
) -> None:
    exact = run_ranks(world, gradients, zero, "float32", "float32", microbatches, shard)
    narrow = run_ranks(world, gradients, zero, "bfloat16", "float32", microbatches, shard)
    for (right, _), (found, _) in zip(exact, narrow, strict=True):
        # A rounding to 8 bits on each rank, and one for each sum of two ranks.
        assert 1e-5 < error(found, right) < 2**-9 * world
    if zero == 3:
        assert narrow[0][1] < exact[0][1], "buffers of a reduce are half as large"


@pytest.mark.parametrize(("zero", "dp", "shard"), [(1, 2, 2), (1, 4, 2), (2, 4, 2), (3, 4, 2)])
def test_D26_sums_of_microbatches_in_bfloat16_are_refused(zero: int, dp: int, shard: int) -> None:
    job = Job(global_batch=2 * dp, reduce_dtype="bfloat16")
    with pytest.raises(UnsupportedCombination, match="several microbatches"):
        Engine(model(), loss, lambda p: torch.optim.SGD(p, lr=0.1), job, Strategy(dp=dp, zero=zero, shard=shard))
