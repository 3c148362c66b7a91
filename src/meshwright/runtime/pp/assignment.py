"""The assignment: which stage has which point and parameter of a model, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from meshwright.runtime.pp.points import Points
from meshwright.runtime.pp.route import loose_places
from meshwright.runtime.pp.trial import Flow
from meshwright.runtime.units import Owner, owners

__all__ = ["Assignment"]


class Assignment:
    """Made of a forward that was gone through, while every rank still has the whole model.

    Args:
        points: of the model.
        flow: its forward.
        stages: of each call.
        ranks: the pipeline rank of each stage.

    Attributes:
        places: by point the stages of its calls, in order. What the forward does not call is where something is called
            that shares its first weight, or on the last stage.
        parameters: by global name every place where it hangs, in one order on all ranks.
        whole: every parameter without values, in its whole shape.
        first_names: every name of every parameter, to its first one.
        loose: by place the stages that use a parameter between points, and do not run its module.
        holders: the stages that use each parameter.
    """

    def __init__(self, points: Points, flow: Flow, stages: Sequence[int], ranks: Sequence[int]) -> None:
        self._points, self._ranks, self._last = points, ranks, len(ranks) - 1
        self.places: dict[str, tuple[int, ...]] = {}
        for call, stage in zip(flow.calls, stages, strict=True):
            self.places[call.point] = (*self.places.get(call.point, ()), stage)
        called = {
            id(weight): found
            for name, found in reversed(self.places.items())
            for weight in points.points[name].module.parameters()
        }
        for name, point in points.points.items():
            if name not in self.places:
                weight = next(point.module.parameters(), None)
                self.places[name] = called.get(id(weight), (self._last,))[:1]
        self.parameters = owners(points.model)
        self.whole = {name: _whole(where[0]) for name, where in self.parameters.items()}
        prefixes = {id(module): f"{name}." if name else "" for name, module in points.model.named_modules()}
        self.first_names = {
            prefixes[id(place.module)] + place.name: name for name, where in self.parameters.items() for place in where
        }
        self._of_module: dict[int, set[int]] = {}
        for name, found in self.places.items():
            for part in points.points[name].module.modules():
                self._of_module.setdefault(id(part), set()).update(found)
        self.loose = self._find_loose(loose_places(flow, stages, len(ranks)))
        self.holders = {name: self._stages_of(places) for name, places in self.parameters.items()}

    def points_of(self, stage: int) -> list[str]:
        """The points that a stage runs."""
        return [name for name, stages in self.places.items() if stage in stages]

    def names_of(self, stage: int) -> list[str]:
        """The parameters that a stage uses."""
        return [name for name, stages in self.holders.items() if stage in stages]

    def rank_of(self, name: str) -> int:
        """The pipeline rank that speaks for a parameter or buffer: the first that has it."""
        return min((self._ranks[stage] for stage in self._stages_with(name)), default=0)

    def has(self, name: str, rank: int) -> bool:
        """Whether a pipeline rank has a parameter or buffer; all have what is outside of all points."""
        found = self._stages_with(name)
        return not found or any(self._ranks[stage] == rank for stage in found)

    def add_place(self, owner: Owner, place: Owner) -> None:
        """A parameter hangs in one more place."""
        name = next(known for known, places in self.parameters.items() if owner in places)
        self.parameters[name] = (*self.parameters[name], place)

    def _stages_with(self, name: str) -> tuple[int, ...]:
        if name in self.holders:
            return self.holders[name]
        return next((found for point, found in self.places.items() if name.startswith(f"{point}.")), ())

    def _find_loose(self, used: Mapping[int, tuple[int, ...]]) -> dict[Owner, tuple[int, ...]]:
        found = {}
        for number, (name, owner) in enumerate(self._points.places.items()):
            own = self._of_module.get(id(owner.module), set())
            stages = tuple(stage for stage in used.get(number, ()) if stage not in own)
            if not own and not stages:
                stages = (self._last,)  # nothing uses it
            if stages:
                self._points.loose[name], found[owner] = owner, stages
        return found

    def _stages_of(self, places: Sequence[Owner]) -> tuple[int, ...]:
        found: set[int] = set()
        for place in places:
            found.update(self._of_module.get(id(place.module), ()), self.loose.get(place, ()))
        return tuple(sorted(found))


def _whole(place: Owner) -> torch.Tensor:
    parameter: nn.Parameter = getattr(place.module, place.name)
    shape, dtype = parameter.shape, parameter.dtype
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=parameter.requires_grad)
