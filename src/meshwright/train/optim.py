"""From an OptimizerSpec to factories of PyTorch's own optimizers and learning-rate schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from meshwright.spec import OptimizerSpec

__all__ = ["learning_rate_factor", "optimizer_factory", "scheduler_factory"]


def optimizer_factory(spec: OptimizerSpec) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """`parameters -> optimizer`; parameters may be tensors or groups. AdamW is fused: on CPUs 4-9 times the loop."""

    def build(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        if spec.name == "sgd":
            return torch.optim.SGD(
                parameters, lr=spec.learning_rate, momentum=spec.momentum, weight_decay=spec.weight_decay
            )
        given = list(parameters)
        return torch.optim.AdamW(
            given,
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            fused=all(tensor.is_floating_point() for tensor in _tensors(given)),
        )

    return build


def scheduler_factory(spec: OptimizerSpec, steps: int) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """`optimizer -> scheduler` for a run of `steps` optimizer steps; to be stepped once per optimizer step."""

    def build(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: learning_rate_factor(spec, step, steps))

    return build


def learning_rate_factor(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`, as a factor of `spec.learning_rate`.

    Linear warm-up over `warmup_steps` (the first step has 1/warmup_steps of it), then constant, or a linear or cosine
    decay that reaches `min_learning_rate` at the last step.
    """
    if step < spec.warmup_steps:
        return (step + 1) / spec.warmup_steps
    if spec.schedule == "constant" or spec.learning_rate == 0:
        return 1.0
    progress = min(1.0, (step - spec.warmup_steps) / max(1, steps - 1 - spec.warmup_steps))
    left = 1 - progress if spec.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    floor = min(1.0, spec.min_learning_rate / spec.learning_rate)
    return floor + (1 - floor) * left


def _tensors(given: list[Any]) -> Iterable[Tensor]:
    for entry in given:
        yield from entry["params"] if isinstance(entry, dict) else [entry]
