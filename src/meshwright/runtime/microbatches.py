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
from meshwright.schedule import Action

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

    def forward(self, stage: int, microbatch: int, *, release: bool) -> None:
        """Run a microbatch forward and keep its loss for backward."""
        engine = self._engine
        if microbatch * engine.strategy.microbatch >= self.samples and world_size() == 1:
            return  # nobody waits for it
        engine._zero.before_forward(release=release)
        self._start_streams(microbatch)
        part, count = self._part(microbatch)
        outputs, targets = call_model(engine.model, part, labels=engine._own_loss)
        self._pending[microbatch] = self._loss_of(outputs, targets, count)
        if self.meter is not None:
            self.meter.note()

    def backward(self, stage: int, microbatch: int, *, reduce: bool, release: bool, last: bool) -> None:
        """Run its backward: gradients of the sum, divided by the global weight once it is known."""
        if microbatch not in self._pending:
            return
        self._engine._zero.before_backward(reduce=reduce, release=release, last=last)
        self._engine._zero.used.counting = self._counts(microbatch)
        self._scaled(self._pending.pop(microbatch)).backward()

    def backward_input(self, stage: int, microbatch: int, *, release: bool) -> None:
        """Of a single stage nothing comes before."""
        raise _single()

    def backward_weight(self, stage: int, microbatch: int, *, reduce: bool, release: bool, last: bool) -> None:
        """Of a single stage nothing comes before."""
        raise _single()

    def send(self, action: Action) -> None:
        """A single stage has no other to send to."""
        raise _single()

    def receive(self, action: Action) -> None:
        """A single stage has no other to receive from."""
        raise _single()

    def finish(self) -> None:
        """After the last action."""

    def _part(self, microbatch: int) -> tuple[Any, int]:
        """The rows of a microbatch, and how many count; one that does not count where there is none."""
        size = self._engine.strategy.microbatch
        start, stop = microbatch * size, min((microbatch + 1) * size, self.samples)
        if start < stop:
            return split(self._batch, start, stop), stop - start
        return split(self._batch, 0, 1), 0

    def _counts(self, microbatch: int) -> bool:
        return microbatch * self._engine.strategy.microbatch < self.samples

    def _start_streams(self, microbatch: int) -> None:
        engine = self._engine
        engine._dropout.start(engine.steps_done, engine._mesh.dp_rank * engine.microbatches + microbatch)

    def _loss_of(self, outputs: Any, targets: Any, count: int) -> torch.Tensor:
        """A microbatch's sum, to go backward from; counted where it has rows."""
        engine = self._engine
        if not engine._loss_tried and not engine._own_loss:
            engine._loss_tried = True
            if engine.microbatches > 1 or engine.strategy.dp > 1:
                self._try_loss(outputs, targets, max(1, count))
        total, weight = call_loss(engine._loss, outputs, targets)
        if not count:
            return total * 0.0
        self.loss += total.detach().double()
        self.weight += weight
        return total

    def _scaled(self, total: torch.Tensor) -> torch.Tensor:
        """The sum times the loss scale, which is found at the first backward of all ranks that have the loss."""
        loss_scale = self._engine._scale
        if not loss_scale.started:
            mesh = self._engine._mesh
            most = self.weight.cpu() if mesh.stage_group is not None else self.weight.clone()
            if mesh.dp * mesh.tp > 1:
                self._engine._traffic.count("statistics")
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.stage_group)
            loss_scale.start(float(most))
        return total.float() * loss_scale.factor if loss_scale.dynamic else total

    def _try_loss(self, outputs: Any, targets: Any, count: int) -> None:
        try:
            require_additive(self._engine._loss, outputs, targets, count)
        except ConfigError as error:
            self.refused = error


def _single() -> TypeError:
    return TypeError("a single stage runs whole backwards")  # an internal error: its schedule has no other
