"""Optimizers and learning rates of a job."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from meshwright.runtime import Engine
from meshwright.spec import Job, OptimizerSpec, Strategy
from meshwright.train.optim import learning_rate_factor, optimizer_factory, scheduler_factory
from tests.harness.ranks import run_one, run_ranks

STEPS = 12
SPEC = OptimizerSpec(learning_rate=0.4, min_learning_rate=0.1, schedule="cosine", warmup_steps=3)


def learning_rates(dp: int, zero: int, microbatch: int, poisoned: int | None) -> tuple[list[float], list[bool]]:
    """The learning rate in force at each step, and which steps were skipped."""
    job = Job(global_batch=8, sequence=1, optimizer=SPEC)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    engine = Engine(
        model,
        lambda outputs, targets: ((outputs - targets).square().sum(), targets.numel()),
        optimizer_factory(SPEC),
        job,
        Strategy(dp=dp, zero=zero, microbatch=microbatch),
        scheduler=scheduler_factory(SPEC, STEPS),
    )
    rates, skipped = [], []
    for step in range(STEPS):
        inputs = torch.full((8, 3), float("nan") if step == poisoned else 1.0)
        rates.append(engine.optimizer.param_groups[0]["lr"])
        skipped.append(engine.step((inputs, torch.zeros(8, 2))).skipped)
    return rates, skipped


@pytest.mark.parametrize(("zero", "microbatch"), [(0, 1), (3, 2)])
def test_D28_learning_rate_after_k_steps_is_the_same_on_four_ranks(zero: int, microbatch: int) -> None:
    alone, _ = run_one(learning_rates, 1, 0, 8, None)
    for rates, _ in run_ranks(4, learning_rates, 4, zero, microbatch, None):
        assert rates == alone
    assert alone == [pytest.approx(0.4 * learning_rate_factor(SPEC, step, STEPS)) for step in range(STEPS)]


def test_D28_a_skipped_step_takes_no_step_of_the_schedule() -> None:
    alone, _ = run_one(learning_rates, 1, 0, 8, None)
    for rates, skipped in run_ranks(2, learning_rates, 2, 1, 4, 4):
        assert skipped == [step == 4 for step in range(STEPS)]
        assert rates == alone[:5] + alone[4:-1]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_shape_of_the_learning_rate(schedule: str) -> None:
    spec = OptimizerSpec(learning_rate=2.0, min_learning_rate=0.2, schedule=schedule, warmup_steps=4)  # type: ignore[arg-type]
    factors = [learning_rate_factor(spec, step, 20) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert all(a >= b for a, b in itertools.pairwise(factors[4:]))
    assert learning_rate_factor(spec, 100, 20) == factors[-1]


def test_runs_as_short_as_their_warm_up() -> None:
    spec = OptimizerSpec(schedule="cosine", warmup_steps=5)
    assert [learning_rate_factor(spec, step, 2) for step in range(2)] == [0.2, 0.4]
    assert learning_rate_factor(OptimizerSpec(schedule="linear"), 0, 1) == 1.0


def test_adamw_is_fused_and_sgd_keeps_its_momentum() -> None:
    weight = nn.Parameter(torch.ones(3))
    adamw = optimizer_factory(OptimizerSpec(beta1=0.8, weight_decay=0.1))([weight])
    assert adamw.defaults["fused"] is True
    assert adamw.defaults["betas"] == (0.8, 0.95)
    assert adamw.defaults["weight_decay"] == 0.1
    sgd = optimizer_factory(OptimizerSpec(name="sgd", momentum=0.9))([weight])
    assert sgd.defaults["momentum"] == 0.9
