"""Stand-ins: a model's parameters and buffers without data, in their places while a trace runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from meshwright.errors import ConfigError
from meshwright.measure.values import storages_of
from meshwright.runtime.units import Owner, owners

__all__ = ["Held", "as_for_training", "held_parameters", "stand_ins"]


@dataclass(frozen=True)
class Held:
    """A parameter: its places in the model (several when it is tied), shape, dtype, and whether it is trained."""

    name: str
    places: tuple[Owner, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def held_parameters(model: nn.Module) -> list[Held]:
    """Every parameter once, by its first name.

    Raises:
        ConfigError: there is none, one has no shape yet, or one is sharded already.
    """
    found = []
    for name, places in owners(model).items():
        parameter: nn.Parameter = getattr(places[0].module, places[0].name)
        if is_lazy(parameter):
            raise ConfigError(
                f"parameter {name} has no shape yet",
                why="lazy modules get their shapes from the first batch",
                fix="run the model once on a real batch before it is described",
            )
        if hasattr(parameter, "device_mesh"):
            raise ConfigError(
                f"parameter {name} is sharded already",
                why="a model is described whole, the plan then says how to shard it",
                fix="describe the model before it is parallelised",
            )
        found.append(Held(name, places, tuple(parameter.shape), parameter.dtype, parameter.requires_grad))
    if not found:
        raise ConfigError(
            "the model has no parameters", why="there is nothing to train", fix="give a model with parameters"
        )
    return found


@contextlib.contextmanager
def stand_ins(
    model: nn.Module, held: list[Held], make: Callable[[torch.Tensor, bool], torch.Tensor]
) -> Iterator[dict[int, Held | None]]:
    """Put `make(tensor, is_parameter)` in the place of every parameter in `held` and of every buffer.

    What else a forward leaves in the modules is taken away at the end.

    Returns:
        The parameters by the identity of their stand-in's storage, None for buffers.
    """
    before: list[tuple[nn.Module, str, torch.Tensor]] = []
    attributes = [
        (module, dict(vars(module)), {name for name, _ in module.named_buffers()}) for module in model.modules()
    ]
    known: dict[int, Held | None] = {}
    buffers: dict[int, torch.Tensor] = {}
    try:
        for parameter in held:
            original = getattr(parameter.places[0].module, parameter.places[0].name)
            instead: torch.Tensor = nn.Parameter(make(original, True), requires_grad=parameter.trained)
            known.update(dict.fromkeys(storages_of([instead]), parameter))
            for place in parameter.places:
                before.append((place.module, place.name, original))
                setattr(place.module, place.name, instead)
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                before.append((module, name, buffer))
                instead = buffers.get(id(buffer), make(buffer, False))
                buffers[id(buffer)] = instead
                known.update(dict.fromkeys(storages_of([instead]), None))
                setattr(module, name, instead)
        yield known
    finally:
        for module, name, original in before:
            setattr(module, name, original)
        for module, found, buffer_names in attributes:  # a forward may leave tensors in its module
            for name in [name for name, _ in module.named_buffers(recurse=False) if name not in buffer_names]:
                delattr(module, name)
            vars(module).clear()
            vars(module).update(found)


@contextlib.contextmanager
def as_for_training(model: nn.Module) -> Iterator[None]:
    """Inside, a model in evaluation mode trains, and one that would keep keys and values for generation does not."""
    modes = {module: module.training for module in model.modules()}
    configs = {id(config): config for module in model.modules() if (config := _caching(module)) is not None}
    if not model.training:
        model.train()
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for config in configs.values():
            config.use_cache = True


def _caching(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if getattr(config, "use_cache", None) is True else None
