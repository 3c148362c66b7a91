"""Evaluation: the loss over batches without training."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.runtime.batch import call_model, to_device
from meshwright.runtime.loss import call_loss
from meshwright.runtime.ranks import world_size
from meshwright.runtime.uneven import evaluation_parts, require_no_failure

if TYPE_CHECKING:
    from meshwright.runtime.engine import Engine

__all__ = ["evaluate_engine"]


def evaluate_engine(engine: Engine, batches: Iterable[Any]) -> float:
    """All sums of an engine's loss over the global weight; ranks may have different numbers of batches.

    Raises:
        ConfigError: no batch, or none with a weight.
        RankFailure: another rank failed.
    """
    mesh, totals = engine._mesh, torch.zeros(3, dtype=torch.float64, device=engine.device)
    failed: Exception | None = None
    try:
        with engine.inference():
            if engine._tp is not None:
                engine._tp.whole_logits = False  # a loss is taken of them
            for batch in evaluation_parts(batches, engine._shared, engine.strategy, engine.batch_scope, mesh.dp_rank):
                with engine._pipeline.together({}, results=False) if engine._pipeline is not None else nullcontext():
                    outputs, targets = call_model(
                        engine.model, to_device(batch, engine.device), labels=engine._own_loss
                    )
                if mesh.pp_rank != mesh.loss_rank:
                    continue
                total, weight = call_loss(engine._loss, outputs, targets)
                if mesh.leads:
                    totals[:2] += torch.stack([total.double(), weight])
    except Exception as error:
        totals[2], failed = 1, error  # told below: the others wait there
    if world_size() > 1:
        dist.all_reduce(totals)
    require_no_failure(failed, int(totals[2]), "an evaluation")
    if totals[1] <= 0:
        raise ConfigError(
            "the evaluation batches have no weight",
            why="there are none, or none of their labels counts",
            fix="evaluate at least one batch with a valid label",
        )
    return float(totals[0] / totals[1])
