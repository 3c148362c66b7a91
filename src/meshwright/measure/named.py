"""Models named on the command line: `package.module:function`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.measure.described import TracedModel, describe_module
from meshwright.measure.target import ModelLike, load_built

__all__ = ["language_model", "named_module"]

_FORMS = "a module that takes token ids, or (module, inputs), or (module, inputs, loss, targets)"


def named_module(text: str, *, sequence: int) -> TracedModel:
    """The module that a function without arguments makes, ready to be described.

    The function returns a module that takes token ids and returns logits (batch x sequence x vocabulary, or an output
    with such `logits`): it is traced on `sequence` ids with the cross entropy over all of them. For any other model it
    returns `(module, inputs)` or `(module, inputs, loss, targets)`, as `trace` takes them.

    Raises:
        ConfigError: the function cannot be found, or returns something else.
    """
    built = load_built(text)
    if isinstance(built, nn.Module):
        return language_model(built, sequence, name=text)
    if isinstance(built, tuple) and len(built) in (2, 4) and isinstance(built[0], nn.Module):
        module, inputs, *rest = built
        loss, targets = rest or (None, None)
        return describe_module(module, inputs, loss=loss, targets=targets, name=text)
    raise ConfigError(f"{text} returned a {type(built).__name__}", fix=f"return {_FORMS}")


def language_model(model: ModelLike, sequence: int, *, name: str = "") -> TracedModel:
    """A module that takes token ids and returns logits, or a function that builds one, with the cross entropy over all
    `sequence` tokens of a sequence."""
    ids = torch.ones(1, sequence, dtype=torch.int64)
    return describe_module(model, ids, loss=_cross_entropy, targets=ids, name=name)


def _cross_entropy(outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, Any]:
    logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        raise ConfigError(
            "the model returns no logits of batch x sequence x vocabulary",
            why="a module alone is taken for a language model",
            fix=f"let the function return {_FORMS}",
        )
    wide = logits.float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(wide, labels.flatten(), reduction="sum"), labels.numel()
