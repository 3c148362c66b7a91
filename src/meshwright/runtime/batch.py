"""Batches: which rows a rank takes, how they are cut into microbatches, and how a model is called with one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.runtime.tensors import map_values

__all__ = ["call_model", "count_tokens", "rows", "split", "to_device"]


def rows(batch: Any) -> int:
    """Sequences in a batch: the leading size that all its tensors share.

    Raises:
        ConfigError: no tensor, a scalar tensor, or leading sizes that differ.
    """
    sizes: set[int] = set()

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            raise ConfigError(
                "the batch holds a scalar tensor",
                why="every tensor is cut along its first dim",
                fix="pass it as a plain number",
            )
        sizes.add(tensor.shape[0])
        return tensor

    map_values(look, batch)
    if len(sizes) != 1:
        raise ConfigError(
            f"the batch has leading sizes {sorted(sizes)}" if sizes else "the batch holds no tensor",
            why="the first dim of every tensor counts sequences and must be the same",
            fix="make a batch of (inputs, targets) tensors, or a mapping of tensors",
        )
    return sizes.pop()


def split(batch: Any, start: int, stop: int) -> Any:
    """Rows `start` to `stop` of every tensor."""
    return map_values(lambda tensor: tensor[start:stop], batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """Every tensor on the device."""
    return map_values(lambda tensor: tensor.to(device, non_blocking=True), batch)


def call_model(model: nn.Module, batch: Any, *, labels: bool = False) -> tuple[Any, Any]:
    """Run the model on a batch; what the loss compares its outputs with.

    A pair `(inputs, targets)`: the model is called with the inputs (a tensor; a tuple or list as positional, a mapping
    as keyword arguments) and the targets go to the loss. A mapping: the model is called with all keys but `labels`
    (with them too, where it computes the loss itself), and the loss gets the whole mapping.

    Returns:
        The model's outputs and the loss's targets.
    """
    if isinstance(batch, Mapping):
        return model(**{key: value for key, value in batch.items() if labels or key != "labels"}), batch
    if labels:
        raise ConfigError(
            f"a batch of type {type(batch).__name__} for a model that computes its own loss",
            why="ModelLoss takes mappings with the model's keyword arguments, labels among them",
            fix="return a dict from the data loader",
        )
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ConfigError(
            f"a batch of type {type(batch).__name__} cannot be used",
            why="a batch is a pair (inputs, targets) or a mapping with the model's keyword arguments",
            fix="return (inputs, targets) from the data loader",
        )
    inputs, targets = batch
    if isinstance(inputs, Mapping):
        return model(**inputs), targets
    if isinstance(inputs, (tuple, list)):
        return model(*inputs), targets
    return model(inputs), targets


def count_tokens(batch: Any) -> int:
    """Tokens of a batch: elements of its first integer tensor with a sequence dim; otherwise its rows."""
    found: list[int] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() >= 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool:
            found.append(tensor.shape[0] * tensor.shape[1])
        return tensor

    map_values(look, batch)
    return found[0] if found else rows(batch)
