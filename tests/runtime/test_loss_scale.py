"""float16: dynamic loss scaling, the same on every rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.runtime import Engine
from meshwright.runtime.loss_scale import LossScale
from meshwright.spec import Job, Strategy
from tests.harness.models import MLP, loss_of, make_batch
from tests.harness.ranks import run_one, run_ranks

ROWS = 12


def model() -> nn.Module:
    torch.manual_seed(3)
    return MLP()


def batch(seed: int) -> Any:
    return make_batch("mlp", microbatches=6, microbatch=2, sequence=53, valid="all", seed=seed, dtype=torch.float32)


def job(compute: Any = "float16") -> Job:
    return Job(global_batch=ROWS, compute_dtype=compute)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def engine(zero: int, compute: str = "float16") -> Engine:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    strategy = Strategy(dp=ranks, zero=zero, microbatch=2)
    return Engine(model(), loss_of("mlp"), sgd, job(compute), strategy, measure_memory="never")


def reports(zero: int, compute: str) -> list[tuple[float, float, float, bool]]:
    made = engine(zero, compute)
    steps = [made.step(batch(seed)) for seed in range(4)]
    return [(s.loss, s.grad_norm, s.loss_scale, s.skipped) for s in steps]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_float16_trains_like_float32_within_its_digits(zero: int, world: int) -> None:
    wide = run_one(reports, 0, "float32")
    for steps in run_ranks(world, reports, zero, "float16"):
        assert [skipped for *_, skipped in steps] == [False] * 4
        for (loss, norm, scale, _), (right, wanted, one, _) in zip(steps, wide, strict=True):
            assert (scale, one) == (2.0**9, 1.0)  # 2^16 over the 106 labels of a microbatch, as a power of two
            assert loss == pytest.approx(right, rel=2e-3)
            assert norm == pytest.approx(wanted, rel=2e-3)


class Explodes(nn.Module):
    """Gradients overflow float16 on the ranks whose rows say so, in the second step and the third."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs[..., :9])
        huge = inputs[:, :, 9:].amax().to(outputs.dtype)
        return outputs * (1 + huge - huge.detach()) + (outputs - outputs.detach()) * huge


def overflowing(zero: int) -> tuple[list[tuple[float, bool, float]], list[bool]]:
    ranks = torch.distributed.get_world_size()
    strategy = Strategy(dp=ranks, zero=zero, microbatch=2)
    made = Engine(Explodes(), loss_of("mlp"), sgd, job(), strategy, measure_memory="never")
    seen, moved = [], []
    for step in range(4):
        inputs, labels = batch(step)
        flag = torch.zeros(*inputs.shape[:2], 1)
        flag[-2:] = 60000.0 if step in (1, 2) else 0.0  # rows of the last rank alone
        before = [p.detach().clone() for p in made.model.parameters()]
        report = made.step((torch.cat([inputs, flag], -1), labels))
        changed = any(not torch.equal(local(a), local(b)) for a, b in zip(before, made.model.parameters(), strict=True))
        seen.append((report.loss_scale, report.skipped, report.loss))
        moved.append(changed)
    return seen, moved


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_overflow_on_one_rank_skips_on_all_and_halves_the_scale(zero: int) -> None:
    for seen, moved in run_ranks(2, overflowing, zero):
        assert [scale for scale, *_ in seen] == [2.0**9, 2.0**9, 2.0**8, 2.0**7]
        assert [skipped for _, skipped, _ in seen] == [False, True, True, False]
        assert moved == [True, False, False, True]


def test_the_scale_doubles_after_two_thousand_good_steps_in_a_row() -> None:
    scale = LossScale(dynamic=True)
    scale.start(0.5)
    for _ in range(1999):
        scale.update(finite=True)
    scale.update(finite=False)
    assert scale.factor == 2.0**15
    for _ in range(2000):
        scale.update(finite=True)
    assert scale.factor == 2.0**16
    for _ in range(2000):  # a model whose loss is never a number
        scale.update(finite=False)
    assert scale.factor > 0
    fixed = LossScale(dynamic=False)
    fixed.update(finite=False)
    assert fixed.factor == 1.0


def resumed(folder: str) -> tuple[float, float]:
    made = engine(3)
    made._scale.start(2.0**5)
    made.step(batch(0))
    made.save(Path(folder) / "checkpoint")
    other, wide = engine(2), engine(0, "float32")
    other.load(Path(folder) / "checkpoint")
    wide.load(Path(folder) / "checkpoint")
    return other.step(batch(1)).loss_scale, wide.step(batch(1)).loss_scale


def test_a_checkpoint_keeps_the_scale(tmp_path: Path) -> None:
    assert run_ranks(2, partial(resumed), str(tmp_path)) == [(2.0**11, 1.0)] * 2
