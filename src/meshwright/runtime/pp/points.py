"""Points: the modules at which a model is cut, and what happens when its forward comes to one of them.

The model's own forward runs on every stage. A point is a block, or a module outside of the blocks that holds
parameters; what a forward does between points (masks, positions, residuals, a loss) is done on every stage that needs
it. While a stage runs, a point of another stage does not compute: it returns what that stage has sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.runtime.tensors import find_tensors, map_values
from meshwright.runtime.units import Blocks, Owner

__all__ = ["Point", "Points", "Runner", "stand_ins"]

#: What a module of another stage returns: the structure of its outputs, with meta tensors.
Outline = Any


class Runner(Protocol):
    """What decides what a point does while it is in force."""

    def call(self, point: Point, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the point's own module by `run(*args, **kwargs)`, or return what it would."""


class Point:
    """A module at which a model is cut.

    Attributes:
        name: its global name.
        module: itself.
        block: whether it is one of the model's blocks.
    """

    def __init__(self, name: str, module: nn.Module, *, block: bool) -> None:
        self.name, self.module, self.block = name, module, block
        #: Whether what it returns is written into later: then nobody else may look at the same memory.
        self.written = False
        self._prototype: nn.Module | None = _on_meta(module)
        self._outlines: dict[Any, Outline] = {}

    def outline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outline:
        """The structure, shapes and dtypes of what it would return, found on the meta device.

        A module that cannot run there (its control flow looks at values) is taken for one that returns a tensor like
        its first.
        """
        key = _signature((args, kwargs))
        if key not in self._outlines:
            self._outlines[key] = self._traced(map_values(_meta, args), map_values(_meta, kwargs))
        return self._outlines[key]

    def writes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[bool]:
        """Which of the tensors that it is called with it writes into, as far as that shows on the meta device."""
        flat, named = map_values(_meta, args), map_values(_meta, kwargs)
        self._traced(flat, named)
        return [tensor._version > 0 for tensor in find_tensors((flat, named))]

    def _traced(self, flat: tuple[Any, ...], named: dict[str, Any]) -> Outline:
        if self._prototype is not None:
            try:
                with torch.no_grad():
                    return self._prototype(*flat, **named)
            except Exception:  # whatever a forward raises that looks at values
                self._prototype = None
        first: list[torch.Tensor] = []
        map_values(first.append, (flat, named))
        if not first:
            raise ConfigError(
                f"{self.name} cannot be on another stage",
                why="what it returns is found by running it without values, which fails, and no tensor goes into it",
                fix="name other blocks (blocks=[...]), or use pp=1",
            )
        return torch.empty_like(first[0])


class Points:
    """All points of a model, in the order of `named_modules`.

    Args:
        model: not yet changed by any other part of the runtime; its classes are extended in place.
        blocks: of the model.
        device: of activations.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, device: torch.device) -> None:
        self.model, self.device = model, device
        inside = {id(block): name for name, block in blocks}
        found = dict(_find(model, inside))
        self.points = {name: Point(name, module, block=id(module) in inside) for name, module in found.items()}
        self._runner: Runner | None = None
        self._deep = False
        #: Called with a point that another stage runs, and with what it is called with.
        self.passed: list[Callable[[Point, tuple[Any, ...], dict[str, Any]], None]] = []
        #: Everywhere a parameter hangs, by name.
        self.places = {
            f"{prefix}.{name}" if prefix else name: Owner(module, name)
            for prefix, module in model.named_modules()
            for name, _ in module.named_parameters(recurse=False)
        }
        #: Those of them that code between points uses.
        self.loose: dict[str, Owner] = {}
        for point in self.points.values():
            _extend(point.module, self, point)

    @contextmanager
    def under(self, runner: Runner) -> Iterator[None]:
        """While inside, the runner decides what points do; without one they run as ever."""
        before, self._runner = self._runner, runner
        try:
            yield
        finally:
            self._runner = before

    @contextmanager
    def with_loose(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """While inside, code between points finds these values in the places of parameters."""
        before = {name: _swap(self.places[name], value) for name, value in values.items()}
        try:
            yield
        finally:
            for name, value in before.items():
                _swap(self.places[name], value)

    def pass_by(
        self, point: Point, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[torch.Tensor | None]
    ) -> Any:
        """What a point that another stage runs returns here: what is given of it, and zeros."""
        for tell in self.passed:
            tell(point, args, kwargs)
        if point.written:
            given = [tensor.clone() if tensor is not None else None for tensor in given]
        whole = point.written or not point.block
        return stand_ins(point.outline(args, kwargs), given, self.device, whole=whole)

    def come_to(self, point: Point, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward calls a point."""
        if self._runner is None or self._deep:
            return run(*args, **kwargs)

        def inside(*own: Any, **named: Any) -> Any:
            self._deep = True  # a point inside of another one is a part of it
            try:
                return run(*own, **named)
            finally:
                self._deep = False

        return self._runner.call(point, inside, args, kwargs)


class _Extended:
    """Goes before the class of a point's module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        points, point = self.__dict__["_meshwright_point"]
        return points.come_to(point, super().__call__, args, kwargs)  # type: ignore[misc]  # the module's class has it


_CLASSES: dict[type, type] = {}


def _extend(module: nn.Module, points: Points, point: Point) -> None:
    kind = type(module)
    if kind not in _CLASSES:
        _CLASSES[kind] = type(kind.__name__, (_Extended, kind), {"__module__": kind.__module__})
    module.__class__ = _CLASSES[kind]
    module.__dict__["_meshwright_point"] = (points, point)


def _find(model: nn.Module, blocks: Mapping[int, str]) -> Iterator[tuple[str, nn.Module]]:
    """The blocks, and the outermost modules with a state of their own and without a block inside."""
    seen: set[int] = set()

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            full = f"{prefix}.{name}" if prefix else name
            if id(child) in seen:
                continue
            whole = not any(id(part) in blocks for part in child.modules())
            if id(child) in blocks or (whole and _called(child) and _holds_state(child)):
                seen.add(id(child))
                yield blocks.get(id(child), full), child
            elif not whole or not _called(child):
                yield from walk(full, child)

    yield from walk("", model)


def _swap(owner: Owner, value: torch.Tensor) -> torch.Tensor:
    """Put a value in the place of a parameter; what was there."""
    module, name = owner.module, owner.name
    before: torch.Tensor = getattr(module, name)
    module._parameters.pop(name, None)
    module.__dict__.pop(name, None)
    if isinstance(value, nn.Parameter):
        module._parameters[name] = value
    else:
        module.__dict__[name] = value
    return before


def _holds_state(module: nn.Module) -> bool:
    """Whether it has parameters, or buffers that are saved: then it has to run in one place."""
    return any(
        next(part.parameters(recurse=False), None) is not None or set(part._buffers) - part._non_persistent_buffers_set
        for part in module.modules()
    )


def _called(module: nn.Module) -> bool:
    """Whether its forward can be called: a list's cannot."""
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy without values."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(module, memo)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("meta")


def _signature(value: Any) -> Any:
    """What the outline of a call depends on: shapes and dtypes, and values that are no tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _signature(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_signature(item) for item in value)
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return type(value).__name__


def stand_ins(outline: Outline, given: Sequence[torch.Tensor | None], device: torch.device, *, whole: bool) -> Any:
    """Outputs of an outline: tensors that are given, and zeros for the others (`whole`: with memory of their own)."""
    order = iter(given)

    def one(meta: torch.Tensor) -> torch.Tensor:
        tensor = next(order, None)
        if tensor is not None:
            return tensor
        if whole:
            return torch.zeros(meta.shape, dtype=meta.dtype, device=device)
        return torch.zeros((), dtype=meta.dtype, device=device).expand(meta.shape)

    return map_values(one, outline)
