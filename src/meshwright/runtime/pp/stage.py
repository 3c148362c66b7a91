"""A stage: the part of a model's forward between what it is handed and what it hands on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.runtime.pp.points import Point, Points
from meshwright.runtime.pp.route import Route
from meshwright.runtime.pp.trial import Value
from meshwright.runtime.tensors import find_tensors

__all__ = ["Loose", "Stage"]


class Loose(nn.Module):
    """A parameter that hangs on a module around points, as a part of a stage that uses it."""

    def __init__(self, value: nn.Parameter) -> None:
        super().__init__()
        self.value = value


class Stage(nn.Module):
    """A stage as a module: it holds those of its points, and its forward is the model's, from call to call.

    Args:
        index: its number over all ranks.
        points: of the model.
        modules: of this stage's points, in the order of calls.
        loose: by name the parameters that it uses between points.
        last: whether it is the last stage of all.
    """

    def __init__(
        self, index: int, points: Points, modules: Sequence[nn.Module], loose: Mapping[str, Loose], *, last: bool
    ) -> None:
        super().__init__()
        self.index, self.last = index, last
        self._points = [points]  # in a list: not a part of this module
        for number, module in enumerate(modules):
            self.add_module(f"part{number}", module)
        self._loose_names = list(loose)
        self.loose = nn.ModuleList(loose.values())

    def forward(self, route: Route, handed: Sequence[torch.Tensor], call: Callable[[], Any]) -> Any:
        """Run the stage.

        Args:
            route: of this forward.
            handed: the tensors of `route.crossing` for this stage.
            call: calls the model with this stage's batch.

        Returns:
            The tensors that the next stage is handed; of the last stage what `call` returns.
        """
        running = _Running(self, route, handed)
        loose: dict[str, torch.Tensor] = {
            name: part.get_parameter("value") for name, part in zip(self._loose_names, self.loose, strict=True)
        }
        with self.points.with_loose(loose), self.points.under(running):
            try:
                result = call()
            except _Done:
                result = None
        if running.failed is not None:
            raise running.failed
        if self.last:
            running.require_all()
            return result
        return tuple(running.values[value] for value in route.crossing[self.index + 1])

    @property
    def points(self) -> Points:
        """Of the whole model."""
        return self._points[0]


class _Done(BaseException):
    """The stage has called its last point: nothing that follows matters. (Not an Exception: models catch those.)"""


class _Running:
    """Decides at each call whether it is this stage's."""

    def __init__(self, stage: Stage, route: Route, handed: Sequence[torch.Tensor]) -> None:
        self._stage, self._route, self._next = stage, route, 0
        self.values: dict[Value, torch.Tensor] = dict(zip(route.crossing[stage.index], handed, strict=True))
        self._end = None if stage.last else route.last_call(stage.index)
        #: What is handed on, beside what is handed through.
        self._kept = frozenset() if stage.last else frozenset(route.crossing[stage.index + 1])
        self.failed: ConfigError | None = None

    def call(self, point: Point, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index, route = self._next, self._route
        self._next += 1
        if index >= len(route.calls) or route.calls[index].point != point.name:
            self._fail(point, index)
        call, mine = route.calls[index], route.stages[index] == self._stage.index
        if mine:
            result = run(*args, **kwargs)
            tensors = find_tensors(result)
            if len(tensors) != call.outputs:
                self._fail(point, index, f"it returns {len(tensors)} tensors, and was taken to return {call.outputs}")
            made = {(index, number): tensor for number, tensor in enumerate(tensors)}
            kept = {value: tensor for value, tensor in made.items() if value in self._kept}
            self.values.update({value: tensor.clone() for value, tensor in kept.items()} if point.written else kept)
        else:
            given = [self.values.get((index, number)) for number in range(call.outputs)]
            result = self._stage.points.pass_by(point, args, kwargs, given)
        if index == self._end:
            raise _Done
        return result

    def require_all(self) -> None:
        """Refuse a forward that has called less than it was cut with."""
        if self._next < len(self._route.calls):
            raise _other_calls(f"it ends after {self._next} of {len(self._route.calls)} calls")

    def _fail(self, point: Point, index: int, why: str = "") -> None:
        expected = self._route.calls[index].point if index < len(self._route.calls) else "the end"
        self.failed = _other_calls(why or f"it calls {point.name} where {expected} was called before")
        raise _Done


def _other_calls(what: str) -> ConfigError:
    return ConfigError(
        f"the model's forward is not the one that its stages were cut by: {what}",
        why="which modules are called in which order must not depend on values",
        fix="take what decides out of the forward, or use pp=1",
    )
