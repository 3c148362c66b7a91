"""The tensor that a head returns: logits of which each rank holds some columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from meshwright.runtime.tensors import map_values
from meshwright.runtime.vocabulary.answers import whole_of
from meshwright.runtime.vocabulary.functions import FUNCTIONS
from meshwright.runtime.vocabulary.shapes import SHAPES
from meshwright.runtime.vocabulary.tensor import VocabularyTensor

__all__ = ["VocabularyLogits"]

# fmt: off
#: What the shown tensor knows itself.
_SHOWN = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed",
    "is_contiguous", "is_conj", "is_neg", "is_inference", "stride", "storage_offset", "get_device", "__len__",
    "__hash__", "__dir__", "shape.__get__", "dtype.__get__", "device.__get__", "layout.__get__", "ndim.__get__",
    "itemsize.__get__", "nbytes.__get__", "grad_fn.__get__", "_backward_hooks.__get__", "_backward_hooks.__set__",
    "_post_accumulate_grad_hooks.__get__",
))
# fmt: on
_ANSWERS = {**SHAPES, **FUNCTIONS}


class VocabularyLogits(VocabularyTensor):
    """Logits [..., V] of which each rank of a group holds some columns; made by `VocabularyLogits.of(local, columns)`.

    They can be used as any tensor, by every rank of the group alike. Casts, views, indexing of leading dims, functions
    of single elements, cross entropy, log-softmax, log-sum-exp and picking single columns leave them divided.
    Everything else gathers them, once, and goes on with the plain tensor. The loss is to be computed alike on all
    ranks; then the gradient of `local` is this rank's part of the whole logits' gradient.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
        name = _name(function)
        if name in _ANSWERS:
            answer = _ANSWERS[name](function, args, kwargs)
            if answer is not NotImplemented:
                return answer
        elif name in _SHOWN or (name.startswith("is_") and name.endswith(".__get__")):
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        if name.endswith(".__set__"):
            raise AttributeError(f"{name.removesuffix('.__set__')} of logits that are divided over ranks cannot be set")
        return function(
            *map_values(whole_of, args, VocabularyTensor),
            **map_values(whole_of, kwargs, VocabularyTensor),
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the class
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        raise TypeError(
            f"{function} was called from compiled code on logits that are divided over ranks along the vocabulary. "
            "Pass it logits.whole()."
        )


def _name(function: Any) -> str:
    """`mul` of a function, `shape.__get__` of a property."""
    name: str = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return f"{getattr(function.__self__, '__name__', '')}.{name}"
    return name
