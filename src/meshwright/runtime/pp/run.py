"""One step's microbatches through the stages of this rank: what a pipeline's schedule plays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.runtime.batch import call_model
from meshwright.runtime.microbatches import Microbatches
from meshwright.runtime.pp.messages import Arriving, Form, Messages
from meshwright.runtime.pp.split import Deferred, backward_input
from meshwright.runtime.pp.staged import StagedZero
from meshwright.schedule import Action

if TYPE_CHECKING:
    from meshwright.runtime.engine import Engine
    from meshwright.runtime.pp.apply import Look, PipelineParallel

__all__ = ["PipelineRun"]

#: Stage and microbatch.
Place = tuple[int, int]
#: Messages of one place and direction: forms, and one for each tensor.
_TAGS = 64


@dataclass
class _Flight:
    """What a microbatch keeps on a stage between its forward and its backward.

    Attributes:
        handed: what the stage was handed, in order.
        roots: where its backward starts, of what it hands on; None for what has no gradient.
        forms: of what it hands on.
    """

    handed: list[torch.Tensor]
    roots: list[GradientEdge | None]
    forms: list[Form]

    @property
    def inputs(self) -> list[torch.Tensor]:
        """What needs a gradient."""
        return [tensor for tensor in self.handed if tensor.requires_grad]


class PipelineRun(Microbatches):
    """The stages of this rank over one step's microbatches."""

    def __init__(self, engine: Engine, batch: Any, count: int) -> None:
        super().__init__(engine, batch, count)
        if engine._pipeline is None or not isinstance(engine._zero, StagedZero):
            raise TypeError("there is no pipeline")  # an internal error: the engine asks before
        self._pipeline: PipelineParallel = engine._pipeline
        self._parts = engine._zero.parts
        self._messages = Messages(engine._mesh.pp_group, engine.device, engine._traffic)
        self._flights: dict[Place, _Flight] = {}
        self._activations: dict[Place, list[torch.Tensor] | Arriving] = {}
        self._gradients: dict[Place, list[torch.Tensor] | Arriving] = {}
        self._leaving: dict[tuple[int, int, bool], list[torch.Tensor]] = {}
        self._deferred: dict[Place, Deferred | None] = {}
        self._looks: dict[int, Look] = {}
        self._finds_scale = not engine._scale.started

    def forward(self, stage: int, microbatch: int, *, release: bool) -> None:
        """Run a microbatch forward through a stage."""
        engine, pipeline, module = self._engine, self._pipeline, self._pipeline.stages[stage]
        part, count = self._part(microbatch)
        route = pipeline.route_of(part, self._look(part, count))
        handed = self._arrived(self._activations, stage, microbatch)
        for tensor in handed:
            tensor.requires_grad_(tensor.is_floating_point())
        self._parts[stage].before_forward(release=release)
        self._start_streams(microbatch)
        result = module(route, handed, lambda: call_model(engine.model, part, labels=engine._own_loss))
        if module.last:
            outputs, targets = result
            total = self._loss_of(outputs, targets, count)
            roots: list[GradientEdge | None] = [get_gradient_edge(self._scaled(total))]
            self._flights[stage, microbatch] = _Flight(handed, roots, [((), total.dtype)])
        else:
            edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in result]
            forms = [(tuple(tensor.shape), tensor.dtype) for tensor in result]
            self._flights[stage, microbatch] = _Flight(handed, edges, forms)
            self._hand(stage, stage + 1, microbatch, [tensor.detach() for tensor in result])
        if self.meter is not None:
            self.meter.note()

    def backward(self, stage: int, microbatch: int, *, reduce: bool, release: bool, last: bool) -> None:
        """Run a microbatch backward through a stage."""
        flight = self._flights.pop((stage, microbatch))
        zero = self._parts[stage]
        zero.before_backward(reduce=reduce, release=release, last=last)
        zero.used.counting = self._counts(microbatch)
        roots, gradients = self._starts(stage, microbatch, flight)
        if roots:
            torch.autograd.backward(roots, gradients)
        self._hand_back(stage, microbatch, flight)

    def backward_input(self, stage: int, microbatch: int, *, release: bool) -> None:
        """Run the half of a backward that the stage before waits for; the first stage has nothing to do in it."""
        flight = self._flights[stage, microbatch]
        if not flight.inputs:
            self._deferred[stage, microbatch] = None
            return
        del self._flights[stage, microbatch]
        zero = self._parts[stage]
        zero.before_backward(reduce=False, release=release, last=False)
        zero.used.counting = self._counts(microbatch)
        roots, gradients = self._starts(stage, microbatch, flight)
        again, later = self._weights(stage)
        deferred = backward_input(roots, gradients, flight.inputs, later, again) if roots else Deferred([])
        self._deferred[stage, microbatch] = deferred
        self._hand_back(stage, microbatch, flight)

    def backward_weight(self, stage: int, microbatch: int, *, reduce: bool, release: bool, last: bool) -> None:
        """Run the other half, unit by unit."""
        deferred = self._deferred.pop((stage, microbatch))
        if deferred is None:
            self.backward(stage, microbatch, reduce=reduce, release=release, last=last)
            return
        self._parts[stage].used.counting = self._counts(microbatch)
        self._parts[stage].backward_weights(deferred.run, reduce=reduce, release=release, last=last)

    def send(self, action: Action) -> None:
        """Send what a stage hands on, or back, to another rank."""
        stage, microbatch, ahead = action.stage, action.microbatch, action.peer_stage == action.stage + 1
        tensors = self._leaving.pop((stage, microbatch, ahead))
        assert action.peer is not None
        tag = self._tag(stage + 1 if ahead else stage, microbatch, ahead)
        if ahead and tensors:
            look = self._look(*self._part(microbatch))
            if self._pipeline.is_new(stage + 1, look):
                self._pipeline.learn(stage + 1, look, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
                self._messages.tell_forms(tensors, action.peer, tag)
        self._messages.send(tensors, action.peer, tag + 1)

    def receive(self, action: Action) -> None:
        """Begin to receive what another rank hands on, or back."""
        stage, microbatch, ahead = action.stage, action.microbatch, action.peer_stage == action.stage - 1
        assert action.peer is not None
        tag = self._tag(stage if ahead else stage + 1, microbatch, ahead)
        if ahead:
            part, rows = self._part(microbatch)
            look = self._look(part, rows)
            count = len(self._pipeline.route_of(part, look).crossing[stage])
            if count and self._pipeline.is_new(stage, look):
                self._pipeline.learn(stage, look, self._messages.learn_forms(count, action.peer, tag))
            forms = self._pipeline.forms(stage, look) if count else []
            self._activations[stage, microbatch] = self._messages.receive(forms, action.peer, tag + 1)
        else:
            flight = self._flights[stage, microbatch]
            forms = [form for form, root in zip(flight.forms, flight.roots, strict=True) if form[1].is_floating_point]
            self._gradients[stage, microbatch] = self._messages.receive(forms, action.peer, tag + 1)

    def finish(self) -> None:
        """All has left; the loss scale that the last stage has found is everybody's."""
        self._messages.finish()
        scale, mesh = self._engine._scale, self._engine._mesh
        if self._finds_scale:
            told = torch.tensor([scale.factor], dtype=torch.float64, device=self._engine.device)
            dist.broadcast(told, group=mesh.pp_group, group_src=mesh.loss_rank)
            scale.factor, scale.started = float(told), True

    # -------------------------------------------------------------------------------------------------------- details

    def _starts(self, stage: int, microbatch: int, flight: _Flight) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Where a backward starts, and with which gradients."""
        if self._pipeline.stages[stage].last:
            (root,) = flight.roots
            one = torch.ones((), dtype=flight.forms[0][1], device=self._engine.device)
            return ([root], [one]) if root is not None else ([], [])
        floating = [root for form, root in zip(flight.forms, flight.roots, strict=True) if form[1].is_floating_point]
        arrived = self._arrived(self._gradients, stage, microbatch)
        pairs = [(root, gradient) for root, gradient in zip(floating, arrived, strict=True) if root is not None]
        return [root for root, _ in pairs], [gradient for _, gradient in pairs]

    def _hand_back(self, stage: int, microbatch: int, flight: _Flight) -> None:
        """The gradients of what a stage was handed go to the one before."""
        if stage == 0:
            return
        gradients = [tensor.grad if tensor.grad is not None else torch.zeros_like(tensor) for tensor in flight.inputs]
        for tensor in flight.inputs:
            tensor.grad = None
        self._hand(stage, stage - 1, microbatch, gradients)

    def _hand(self, stage: int, other: int, microbatch: int, tensors: list[torch.Tensor]) -> None:
        """To a neighbouring stage: here at once, to another rank when its send comes."""
        if self._pipeline.ranks[other] == self._engine._mesh.pp_rank:
            arriving = self._activations if other > stage else self._gradients
            arriving[other, microbatch] = tensors
        else:
            self._leaving[stage, microbatch, other > stage] = tensors

    def _arrived(
        self, line: dict[Place, list[torch.Tensor] | Arriving], stage: int, microbatch: int
    ) -> list[torch.Tensor]:
        """What has come for a stage; waits for it where it is still on its way."""
        tensors = line.pop((stage, microbatch), [])
        found = tensors.wait() if isinstance(tensors, Arriving) else tensors
        if self._engine._tracer is not None:
            self._engine._tracer.arrived(stage, microbatch, activation=line is self._activations)
        return found

    def _look(self, part: Any, count: int) -> Look:
        """Microbatches of a step of which as many rows count look the same: it is found out once."""
        if count not in self._looks:
            self._looks[count] = self._pipeline.look(part)
        return self._looks[count]

    def _weights(self, stage: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The weights of a stage: those that get their gradients at once, and the others.

        At once: of units that recompute, and of units of another stage."""
        zero = self._parts[stage]
        again: list[nn.Parameter] = [
            parameter
            for place in self._pipeline.borrowed(stage)
            if (parameter := getattr(place.module, place.name)).requires_grad
        ]
        later: list[nn.Parameter] = []
        for unit in zero.units:
            (again if any(module in self._pipeline.recomputed for module in unit.modules) else later).extend(
                zero.weights(unit)
            )
        return again, later

    def _tag(self, stage: int, microbatch: int, ahead: bool) -> int:
        """A number for what crosses into a stage (`ahead`), or back out of it."""
        return ((microbatch * self._pipeline.count + stage) * 2 + (not ahead)) * _TAGS
