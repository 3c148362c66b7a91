"""The engine's model as a stage that a schedule plays: one microbatch forward, one backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.runtime.additive import require_additive
from meshwright.runtime.batch import call_model, count_tokens, split
from meshwright.runtime.loss import call_loss
from meshwright.runtime.memory import MemoryMeter
from meshwright.runtime.ranks import world_size

if TYPE_CHECKING:
    from meshwright.runtime.engine import Engine

__all__ = ["Microbatches"]


class Microbatches:
    """The engine's model as a playable stage over one step's microbatches.

    Args:
        engine: whose step it is.
        batch: this rank's rows.
        count: how many of them count, from the first on; a microbatch without any runs on others' rows with weight 0.
    """

    def __init__(self, engine: Engine, batch: Any, count: int) -> None:
        self._engine = engine
        self._batch = batch
        self.samples = count
        self._pending: dict[int, torch.Tensor] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=engine.device)
        self.weight = torch.zeros((), dtype=torch.float64, device=engine.device)
        self.tokens = count_tokens(split(batch, 0, count)) if count else 0
        self.meter: MemoryMeter | None = None
        #: Why the loss cannot be trained; all ranks are told when they next speak.
        self.refused: ConfigError | None = None

    def forward(self, microbatch: int, *, release: bool) -> None:
        """Run a microbatch forward and keep its loss for backward."""
        engine, size = self._engine, self._engine.strategy.microbatch
        if microbatch * size >= self.samples and world_size() == 1:
            return  # nobody waits for it
        engine._zero.before_forward(release=release)
        engine._dropout.start(engine.steps_done, engine._mesh.dp_rank * engine.microbatches + microbatch)
        start, stop = microbatch * size, min((microbatch + 1) * size, self.samples)
        part = split(self._batch, start, stop) if start < stop else split(self._batch, 0, 1)
        outputs, targets = call_model(engine.model, part, labels=engine._own_loss)
        if not engine._loss_tried and not engine._own_loss:
            engine._loss_tried = True
            if engine.microbatches > 1 or engine.strategy.dp > 1:
                self._try_loss(outputs, targets, max(1, stop - start))
        total, weight = call_loss(engine._loss, outputs, targets)
        if start < stop:
            self.loss += total.detach().double()
            self.weight += weight
        self._pending[microbatch] = total if start < stop else total * 0.0
        if self.meter is not None:
            self.meter.note()

    def backward(self, microbatch: int, *, reduce: bool, release: bool, last: bool) -> None:
        """Run its backward: gradients of the sum, divided by the global weight once it is known."""
        if microbatch not in self._pending:
            return
        self._engine._zero.before_backward(reduce=reduce, release=release, last=last)
        self._engine._zero.used.counting = microbatch * self._engine.strategy.microbatch < self.samples
        total, loss_scale = self._pending.pop(microbatch), self._engine._scale
        if not loss_scale.started:  # all ranks are at their first backward
            most = self.weight.clone()
            if world_size() > 1:
                self._engine._traffic.count("statistics")
                dist.all_reduce(most, op=dist.ReduceOp.MAX)
            loss_scale.start(float(most))
        (total.float() * loss_scale.factor if loss_scale.dynamic else total).backward()

    def _try_loss(self, outputs: Any, targets: Any, count: int) -> None:
        try:
            require_additive(self._engine._loss, outputs, targets, count)
        except ConfigError as error:
            self.refused = error
