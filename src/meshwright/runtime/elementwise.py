"""Whether an optimizer updates each element by itself, so that each rank can update its shards alone."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.errors import ConfigError
from meshwright.spec import Strategy

__all__ = ["require_elementwise"]

#: What others look at besides one element's own gradients, by the name of their class.
_KNOWN = {
    "Adafactor": "it divides by means over rows and columns, and by the norm of the whole tensor",
    "Muon": "it makes the columns of the whole matrix orthogonal",
    "Lamb": "its step depends on the norms of the whole tensor",
    "LAMB": "its step depends on the norms of the whole tensor",
    "LARS": "its step depends on the norms of the whole tensor",
    "Shampoo": "it multiplies by roots of products of the whole matrix",
    "SOAP": "it turns gradients into the eigenbasis of the whole matrix",
    "SparseAdam": "it needs sparse gradients, and those that are reduced are dense",
    "AdamW8bit": "it quantises its states in blocks, which shards cut elsewhere",
    "Adam8bit": "it quantises its states in blocks, which shards cut elsewhere",
}
#: Those of torch.optim 2.13.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
#: Rows of the small matrix, and the parts in which it is tried too.
_ROWS, _PARTS, _STEPS = 9, ((0, 3), (3, 5), (5, 9)), 2


def require_elementwise(optimizer: Optimizer, strategy: Strategy) -> None:
    """Refuse an optimizer whose update of a shard is not the shard of its update.

    One that is not known is tried: on a small matrix, and on its rows in three parts.

    Raises:
        ConfigError: it looks at more than one element at a time and the strategy shards, or that cannot be found out.
    """
    if not strategy.zero or strategy.shard == 1:
        return
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim.") and kind.__name__ in _ELEMENTWISE:
        return
    known = [parent.__name__ for parent in kind.__mro__ if parent.__name__ in _KNOWN]
    reason = _KNOWN[known[0]] if known else _tried(optimizer)
    if reason:
        raise ConfigError(
            f"optimizer {kind.__name__} under zero={strategy.zero}",
            why=f"{reason}; a rank holds a part of each tensor",
            fix="use AdamW or another elementwise optimizer, or zero=0, where every rank holds whole tensors",
        )


def _tried(optimizer: Optimizer) -> str:
    """What is wrong; empty where the update of parts is the part of the update, in every parameter group."""
    for group in optimizer.param_groups:
        try:
            whole = _updated(optimizer, group, 0, _ROWS)
            parts = torch.cat([_updated(optimizer, group, start, stop) for start, stop in _PARTS])
        except Exception as error:  # whatever a user's own optimizer raises
            return f"whether it updates every element by itself cannot be tried ({type(error).__name__}: {error})"
        if not torch.allclose(parts, whole, rtol=1e-9, atol=0.0):  # vector units may round the last elements otherwise
            return "on a small matrix its update of some rows is not those rows of its update"
    return ""


def _updated(optimizer: Optimizer, group: dict[str, Any], start: int, stop: int) -> torch.Tensor:
    """Some rows of a matrix after steps by a copy of the optimizer."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_STEPS + 1, _ROWS, 6, generator=generator, dtype=torch.float64)
    values[1:] *= torch.logspace(-2, 2, _ROWS, dtype=torch.float64)[:, None]  # rows of very different norms
    parameter = nn.Parameter(values[0, start:stop].clone())
    # Not copy.copy: it keeps an optimizer's states and groups, and nothing else that its class adds.
    trial: Optimizer = object.__new__(type(optimizer))
    own = {key: copy.copy(value) for key, value in vars(optimizer).items() if isinstance(value, (dict, list, set))}
    trial.__dict__.update(
        vars(optimizer) | own, state=defaultdict(dict), param_groups=[group | {"params": [parameter]}]
    )
    for gradient in values[1:]:
        parameter.grad = gradient[start:stop].clone()
        trial.step()
    return parameter.detach()
