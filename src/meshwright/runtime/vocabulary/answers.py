"""A table of answers: what torch functions do with divided logits, by the functions' names."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from meshwright.runtime.tensors import find_tensors
from meshwright.runtime.vocabulary.tensor import VocabularyTensor

__all__ = ["Answer", "Answers", "blank_of", "divided_in", "local_of", "whole_of"]

#: `(function, args, kwargs) -> result`, or `NotImplemented` where it does not fit these arguments. Whether it does must
#: not depend on the rank, or some ranks would gather alone.
Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Answers(dict[str, Answer]):
    """Answers by name: `tanh` for all of `torch.tanh`, `Tensor.tanh` and `F.tanh`, `shape.__get__` for a property."""

    def to(self, *names: str, anywhere: bool = False) -> Callable[[Answer], Answer]:
        """Enters the decorated answer; it is asked if the first argument is divided, or any with `anywhere`."""

        def enter(answer: Answer) -> Answer:
            self.update(dict.fromkeys(names, answer if anywhere else _if_first(answer)))
            return answer

        return enter


def _if_first(answer: Answer) -> Answer:
    @wraps(answer)
    def ask(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return answer(function, args, kwargs) if args and isinstance(args[0], VocabularyTensor) else NotImplemented

    return ask


def divided_in(value: Any) -> list[VocabularyTensor]:
    """The divided logits among the tensors in a value."""
    return [tensor for tensor in find_tensors(value) if isinstance(tensor, VocabularyTensor)]


def local_of(logits: VocabularyTensor) -> torch.Tensor:
    """This rank's columns."""
    return logits.local


def whole_of(logits: VocabularyTensor) -> torch.Tensor:
    """All columns, gathered."""
    return logits.whole()


def blank_of(logits: VocabularyTensor) -> torch.Tensor:
    """A tensor of the same shape, dtype and device, with a single element of memory."""
    return logits.local.new_empty(()).expand(logits.shape)
