"""The reference of the reference: a training loop in plain PyTorch that shares no code with the runtime.

It holds one whole model in one process and does what the loss contract says: sum the token losses of all microbatches,
divide by the number of all valid tokens, clip once, step.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from meshwright.measure.equality.float64 import float32_upcasts_stay_float64
from meshwright.measure.equality.records import Run, Step
from tests.harness.cases import SEQUENCE, Case, halve, make_optimizer, real_model
from tests.harness.models import VALID_TOKENS, loss_of

__all__ = ["run_plain"]


def run_plain(case: Case, initial: dict[str, Tensor], one_batch: bool = False) -> Run:
    """Trains the case's model from the initial weights, in its dtype, with its microbatches one after the other.

    With `one_batch`, the whole global batch goes through the model at once instead.
    """
    model = real_model(case).train()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(initial[name])
    optimizer = make_optimizer(case, model.parameters())
    scheduler = halve(optimizer) if case.halving else None
    run = Run({name: parameter.detach().clone() for name, parameter in parameters.items()}, [])
    for number in range(case.steps):
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with float32_upcasts_stay_float64() if case.dtype == "float64" else nullcontext():
            loss, weight = _accumulate(
                model, case, number, case.microbatches * case.microbatch if one_batch else case.microbatch
            )
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}
        norm = float(clip_grad_norm_(model.parameters(), case.clip or float("inf")))
        clipped = float(
            torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters.values() if p.grad is not None]))
        )
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        updates = {name: parameter.detach() - before[name] for name, parameter in parameters.items()}
        run.steps.append(Step(loss, weight, norm, clipped, gradients, updates))
    return run


def _accumulate(model: torch.nn.Module, case: Case, number: int, rows: int) -> tuple[float, float]:
    batch = case.batch(number)
    count = case.microbatches * case.microbatch
    weight = float(count * SEQUENCE)
    if case.valid == "unequal":
        weight = float(sum(VALID_TOKENS[index % 4] for index in range(case.microbatches)))
    total = 0.0
    for start in range(0, count, rows):
        outputs, targets = _forward(model, batch, slice(start, start + rows))
        part, _ = loss_of(case.model)(outputs, targets)
        (part / weight).backward()
        total += part.item()
    return total / weight, weight


def _forward(model: torch.nn.Module, batch: Any, cut: slice) -> tuple[Any, Any]:
    if isinstance(batch, dict):
        return model(input_ids=batch["input_ids"][cut]), {"labels": batch["labels"][cut]}
    inputs, targets = batch
    return model(inputs[cut]), targets[cut]
