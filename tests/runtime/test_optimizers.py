"""Optimizers under ZeRO: elementwise ones give the same numbers on any number of ranks, others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, lr_scheduler

from meshwright.errors import ConfigError
from meshwright.runtime import Engine
from meshwright.spec import Job, Strategy
from tests.harness.every import some
from tests.harness.models import MLP, loss_of, make_batch
from tests.harness.ranks import run_one, run_ranks

RATE, STEPS, ROWS = 0.01, 3, 12


class Lion(Optimizer):
    """A user's own elementwise optimizer. Chen et al., arXiv 2302.06675."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = RATE) -> None:
        super().__init__(parameters, {"lr": lr})
        self.slow, self.fast = 0.9, 0.99

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                # Smooth where the published one takes a sign, which rounding could turn.
                parameter.sub_(group["lr"] * torch.tanh(100 * (self.slow * mean + (1 - self.slow) * parameter.grad)))
                mean.lerp_(parameter.grad, 1 - self.fast)


class Normalised(Lion):
    """One that is not: it divides by the norm of the tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


class Mixed(Lion):
    """Elementwise in its first group, and not in its second."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    whole = parameter.grad.norm() if group.get("whole") else 1.0
                    parameter.sub_(group["lr"] * parameter.grad / whole)


def mixed(parameters: Iterable[nn.Parameter]) -> Optimizer:
    held = list(parameters)
    return Mixed([{"params": held[:1]}, {"params": held[1:], "whole": True}])


class Broken(Lion):
    """One that cannot be tried apart."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("only on my own parameters")


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=RATE, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw-loop": partial(torch.optim.AdamW, lr=RATE, eps=1e-4, foreach=False),
    "adamw-foreach": partial(torch.optim.AdamW, lr=RATE, eps=1e-4, foreach=True, amsgrad=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=RATE, eps=1e-4, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=RATE, eps=1e-4, initial_accumulator_value=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=RATE, eps=1e-3, momentum=0.5, centered=True),
    "nadam": partial(torch.optim.NAdam, lr=RATE, eps=1e-4, decoupled_weight_decay=True, weight_decay=0.1),
    "own": Lion,
}
SCHEDULERS: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=[RATE, 3 * RATE], total_steps=10),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 5)],
        milestones=[2],
    ),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.9**step]),
}


def grouped(make: Callable[[Any], Optimizer], parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Matrices decay; vectors (biases, norms) do not and learn three times as fast."""
    held = list(parameters)
    matrices, vectors = [p for p in held if p.ndim > 1], [p for p in held if p.ndim < 2]
    made = make([{"params": matrices}, {"params": vectors, "lr": 3 * RATE}])
    if "weight_decay" in made.defaults:
        made.param_groups[0]["weight_decay"], made.param_groups[1]["weight_decay"] = 0.1, 0.0
    return made


def model() -> nn.Module:
    torch.manual_seed(3)
    return MLP().double()


def batches() -> list[Any]:
    return [
        make_batch("mlp", microbatches=6, microbatch=2, sequence=53, valid="unequal", seed=s, dtype=torch.float64)
        for s in range(STEPS)
    ]


def trained(name: str, scheduler: str, zero: int) -> tuple[dict[str, Tensor], list[float]]:
    """Whole parameters after three steps, and the learning rates then."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    job = Job(global_batch=ROWS, param_dtype="float64", compute_dtype="float64", reduce_dtype="float64", clip_norm=0.5)
    engine = Engine(
        model(),
        loss_of("mlp"),
        partial(grouped, OPTIMIZERS[name]),
        job,
        Strategy(dp=ranks, zero=zero, microbatch=2),
        scheduler=SCHEDULERS[scheduler],
        measure_memory="never",
    )
    for batch in batches():
        engine.step(batch)
    values = {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        for key, value in engine.named_parameters().items()
    }
    return values, [group["lr"] for group in engine.optimizer.param_groups]


def plain(name: str, scheduler: str) -> tuple[dict[str, Tensor], list[float]]:
    """The same by a plain loop over whole batches."""
    module, loss = model(), loss_of("mlp")
    optimizer = grouped(OPTIMIZERS[name], module.parameters())
    schedule = SCHEDULERS[scheduler](optimizer)
    for inputs, targets in batches():
        optimizer.zero_grad()
        total, weight = loss(module(inputs), targets)
        (total / weight).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    return dict(module.named_parameters()), [group["lr"] for group in optimizer.param_groups]


def assert_same(name: str, scheduler: str, world: int, zero: int) -> None:
    wanted, rates = run_one(plain_values, name, scheduler)
    for found, learned in run_ranks(world, trained, name, scheduler, zero):
        assert learned == rates
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.linalg.vector_norm(found[key] - value) <= 1e-9 * torch.linalg.vector_norm(value), key


def plain_values(name: str, scheduler: str) -> tuple[dict[str, Tensor], list[float]]:
    values, rates = plain(name, scheduler)
    return {key: value.detach() for key, value in values.items()}, rates


@pytest.mark.parametrize(
    ("name", "world", "zero"),
    some([*((name, 3, 3) for name in OPTIMIZERS), ("sgd", 2, 1), ("own", 2, 1)], [(name, 2, 1) for name in OPTIMIZERS]),
)
def test_elementwise_optimizers_with_groups_equal_a_plain_loop(name: str, world: int, zero: int) -> None:
    assert_same(name, "step", world, zero)


@pytest.mark.parametrize("name", ["adamw-foreach", "own"])
@pytest.mark.parametrize(("world", "zero"), [(2, 0), (3, 2)])
def test_the_same_under_the_other_stages(name: str, world: int, zero: int) -> None:
    assert_same(name, "step", world, zero)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_step_once_a_step_whatever_the_ranks(scheduler: str) -> None:
    assert_same("sgd", scheduler, 3, 3)


def refusal(make: Callable[[Any], Optimizer], zero: int) -> str:
    strategy = Strategy(dp=torch.distributed.get_world_size(), zero=zero)
    try:
        Engine(model(), loss_of("mlp"), make, Job(global_batch=2), strategy)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (partial(torch.optim.Adafactor, lr=RATE), "Adafactor under zero=3"),
        (Normalised, "Normalised under zero=3"),
        (mixed, "Mixed under zero=3"),
        (Broken, "only on my own parameters"),
        (torch.optim.LBFGS, "LBFGS"),
        (torch.optim.SparseAdam, "SparseAdam"),
    ],
)
def test_optimizers_that_look_beyond_an_element_are_refused_by_name(make: Any, says: str) -> None:
    assert all(says in found for found in run_ranks(2, refusal, make, 3))


def test_without_shards_they_are_not_refused() -> None:
    assert run_ranks(2, refusal, partial(torch.optim.Adafactor, lr=RATE), 0) == ["", ""]
    assert run_ranks(2, refusal, Normalised, 0) == ["", ""]
