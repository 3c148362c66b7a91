"""A module as a described model: traced again for each layout that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from meshwright.measure.kernels import Kernels
from meshwright.measure.target import ModelLike, load_model
from meshwright.measure.traced import trace
from meshwright.runtime.loss import LossFunction
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec

__all__ = ["TracedModel", "describe_module"]


@dataclass(frozen=True)
class TracedModel:
    """A module that can be described under layouts, as a model that is known by its `config.json` can."""

    name: str
    _trace: Callable[..., ModelSpec]
    _found: dict[Layout, ModelSpec] = field(default_factory=dict)

    def at(self, layout: Layout) -> ModelSpec:
        """The description under a layout; each layout is traced once.

        Raises:
            ConfigError: the layout's sequence is not that of the example inputs.
            UnsupportedCombination: the layout splits layers over ranks, or wants other than eager operations.
        """
        if layout not in self._found:
            self._found[layout] = self._trace(layout=layout)
        return self._found[layout]


def describe_module(
    model: ModelLike,
    inputs: Any,
    *,
    loss: LossFunction | None = None,
    targets: Any = None,
    name: str = "",
    blocks: Sequence[str] | None = None,
    kernels: Kernels = "accelerator",
) -> TracedModel:
    """Any module as a model that can be planned for. Arguments and errors are those of `trace`; nothing runs yet."""
    module = load_model(model)
    name = name or type(module).__name__
    bound = partial(trace, module, inputs, loss=loss, targets=targets, name=name, blocks=blocks, kernels=kernels)
    return TracedModel(name, bound)
