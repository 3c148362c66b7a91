"""Example inputs: what a model is called with, for any number of sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.errors import ConfigError
from meshwright.runtime.tensors import find_tensors, map_values

__all__ = ["Example"]


@dataclass(frozen=True)
class Example:
    """Arguments of a model and the targets of its loss, of `sequences` sequences along dim 0 of their tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Any
    sequences: int

    @classmethod
    def of(cls, inputs: Any, targets: Any, *, with_loss: bool) -> Example:
        """Inputs as `trace` takes them.

        Raises:
            ConfigError: they hold no tensor with a dim.
        """
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if isinstance(inputs, Mapping):
            kwargs = dict(inputs)
            if with_loss and targets is None:  # as the engine calls model and loss with a mapping
                targets = dict(kwargs)
                kwargs.pop("labels", None)
        else:
            args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        tensors = [tensor for tensor in find_tensors((args, kwargs)) if tensor.dim()]
        if not tensors:
            raise ConfigError(
                "the example inputs hold no tensor with a dim",
                why="the first dim of the inputs counts sequences",
                fix="give a tensor, a tuple of tensors, or a mapping of the model's keyword arguments",
            )
        if not tensors[0].shape[0]:
            raise ConfigError("the example inputs hold no sequence", fix="give inputs of one sequence or more")
        return cls(args, kwargs, targets, tensors[0].shape[0])

    def without_idle_mask(self) -> Example:
        """Without an `attention_mask` of ones: Transformers takes that for none, but cannot see it without data."""
        mask = self.kwargs.get("attention_mask")
        if type(mask) is torch.Tensor and not mask.is_meta and bool((mask == 1).all()):
            kwargs = {key: value for key, value in self.kwargs.items() if key != "attention_mask"}
            return Example(self.args, kwargs, self.targets, self.sequences)
        return self

    @property
    def tokens(self) -> int:
        """Tokens of a sequence: dim 1 of the first integer tensor that has one, else of the first with three dims."""
        tensors = find_tensors((self.args, self.kwargs))
        for tensor in tensors:
            if tensor.dim() >= 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool:
                return tensor.shape[1]
        return next((tensor.shape[1] for tensor in tensors if tensor.dim() == 3), 1)

    def resized(self, sequences: int) -> Example:
        """The same with another number of sequences; tensors that do not count sequences keep their shape.

        Rows of real tensors are repeated; others become ones, which are legal ids, lengths and masks.
        """

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            counts = tensor.dim() > 0 and tensor.shape[0] == self.sequences
            if type(tensor) is torch.Tensor and not tensor.is_meta:
                found = tensor.detach().to("cpu")
                return found[torch.arange(sequences) % self.sequences] if counts else found
            return torch.ones((sequences, *tensor.shape[1:]) if counts else tensor.shape, dtype=tensor.dtype)

        return self._mapped(resize, sequences)

    def without_data(self) -> Example:
        """The same shapes, made anew: inside a mode for tensors without data, they have none."""
        return self._mapped(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), self.sequences)

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor], sequences: int) -> Example:
        args, kwargs, targets = (map_values(function, part) for part in (self.args, self.kwargs, self.targets))
        return Example(args, kwargs, targets, sequences)
