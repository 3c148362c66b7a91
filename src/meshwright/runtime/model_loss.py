"""The loss that a Hugging Face model computes itself, in the engine's terms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.runtime.loss import LossFunction, MeanLoss

__all__ = ["ModelLoss", "bind_loss"]

_IGNORED = -100
#: Kinds of Hugging Face losses that compare each label with the logits one place earlier.
_SHIFTED = (None, "ForCausalLM", "ForConditionalGeneration")


class ModelLoss(MeanLoss):
    """The model's own loss: batches are mappings with `labels`, which the model is called with too.

    What the model returns as `loss` is taken as the mean over the labels that count (those that are not -100; a causal
    language model leaves out the first of each sequence), so that the step's loss is the mean over all of them, however
    they are spread over microbatches and ranks. Auxiliary terms in it (of routers, say) weigh by labels too.

    Args:
        weight: `batch -> number`, what the model's mean divides by, where it is not the labels that count.
    """

    def __init__(self, *, weight: Callable[[Any], Any] | None = None) -> None:
        super().__init__(lambda outputs, batch: _loss_of(outputs), weight=weight or self._labels)
        self._shifted: bool | None = None
        self._counts = weight is None

    def bind(self, model: nn.Module) -> None:
        """Learn from a model which of its labels count.

        Raises:
            ConfigError: it does not tell, and no `weight` was given; or its loss compares rows with each other.
        """
        if "return_loss" in inspect.signature(model.forward).parameters:  # Hugging Face's mark of contrastive losses
            raise ConfigError(
                f"ModelLoss for a {type(model).__name__}",
                why="its own loss compares the rows of a batch with each other, so it would depend on the microbatch",
                fix="give a loss function of outputs and targets that is a sum over rows",
            )
        if not self._counts:
            return
        config = getattr(model, "config", None)
        if config is None or not hasattr(model, "loss_function"):
            raise ConfigError(
                f"ModelLoss for a {type(model).__name__}",
                why="which of its labels count is known of Hugging Face models alone",
                fix="give ModelLoss(weight=count), or a loss function of outputs and targets",
            )
        two_parts = bool(getattr(config, "is_encoder_decoder", False))
        self._shifted = not two_parts and getattr(model, "loss_type", None) in _SHIFTED

    def __call__(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.as_tensor(self._weight(targets), dtype=torch.float64)
        if weight.numel() == 1 and weight == 0:  # its mean is not a number, and neither are that one's gradients
            outputs = {key: value for key, value in outputs.items() if key != "loss"}
        return super().__call__(outputs, targets)

    def _labels(self, batch: Any) -> torch.Tensor:
        if "labels" not in batch:
            raise ConfigError(
                f"a batch without labels ({', '.join(map(str, batch))})",
                why="ModelLoss counts the labels that the model's loss is the mean over",
                fix="put labels into the batch, or give ModelLoss(weight=count)",
            )
        labels: torch.Tensor = batch["labels"]
        counted = labels[..., 1:] if self._shifted else labels
        return counted.ne(_IGNORED).sum()


def bind_loss(loss: LossFunction, model: nn.Module) -> bool:
    """Whether the model is called with labels, as its own loss needs; it is told which model that is."""
    if isinstance(loss, ModelLoss):
        loss.bind(model)
        return True
    return False


def _loss_of(outputs: Any) -> torch.Tensor:
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(found, torch.Tensor):
        raise ConfigError(
            f"the model returned no loss (a {type(outputs).__name__})",
            why="ModelLoss takes the one that the model computes from `labels`",
            fix="put labels into the batch, or give a loss function of outputs and targets",
        )
    return found
