"""Whether an optimizer updates each element by itself, so that each rank can update its shards alone."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence

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
_ROWS, _STEPS = (3, 2, 4), 2


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
    """What is wrong; empty where the update of parts is the part of the update."""
    whole, *parts = (_updated(optimizer, rows) for rows in (None, *_bounds()))
    found = [entry for entry in (whole, *parts) if isinstance(entry, str)]
    if found:
        return found[0]
    if torch.equal(torch.cat(parts), whole):  # type: ignore[arg-type]  # none is a text
        return ""
    return "on a small matrix its update of some rows is not those rows of its update"


def _bounds() -> Sequence[tuple[int, int]]:
    stops = [sum(_ROWS[: index + 1]) for index in range(len(_ROWS))]
    return list(zip([0, *stops], stops, strict=False))


def _updated(optimizer: Optimizer, rows: tuple[int, int] | None) -> torch.Tensor | str:
    """A matrix, or rows of it, after steps by a copy of the optimizer; or why there are none."""
    generator = torch.Generator().manual_seed(0)
    shape = (sum(_ROWS), 6)
    values = torch.randn(_STEPS + 1, *shape, generator=generator, dtype=torch.float64)
    values[1:] *= torch.logspace(-2, 2, shape[0], dtype=torch.float64)[:, None]  # rows of very different norms
    start, stop = rows or (0, shape[0])
    parameter = nn.Parameter(values[0, start:stop].clone())
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**optimizer.param_groups[0], "params": [parameter]}]
    try:
        for gradient in values[1:]:
            parameter.grad = gradient[start:stop].clone()
            trial.step()
    except Exception as error:  # whatever a user's own optimizer raises
        return f"whether it updates every element by itself cannot be tried ({type(error).__name__}: {error})"
    return parameter.detach()
