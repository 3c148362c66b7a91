"""Functions that leave the vocabulary, the last dim of divided logits, whole: dtypes, copies, views of leading dims."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.runtime.tensors import find_tensors, map_values
from meshwright.runtime.vocabulary.answers import Answers, blank_of, divided_in, local_of
from meshwright.runtime.vocabulary.tensor import VocabularyTensor, same_storage

__all__ = ["SHAPES"]

SHAPES = Answers()

_FULL = slice(None)
#: Where among its arguments each function has the dim.
_DIM = {"select": 1, "narrow": 1, "unbind": 1, "split": 2, "split_with_sizes": 2, "chunk": 2}


# ------------------------------------------------------------------------------------------------- dtypes and copies


@SHAPES.to("float", "double", "half", "bfloat16", "to", "type", "type_as", "cpu", "cuda", "clone", anywhere=True)
def _cast(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits = args[0]
    new = function(*map_values(local_of, args, VocabularyTensor), **map_values(local_of, kwargs, VocabularyTensor))
    if not isinstance(new, torch.Tensor) or not isinstance(logits, VocabularyTensor):
        return new
    if new.device != logits.device:
        return NotImplemented  # the group's ranks may not be able to speak of tensors there
    return logits if new is logits.local else logits.root(new)


@SHAPES.to("contiguous")
def _contiguous(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, model = args[0], args[0].stand_in()
    shown = function(model, *args[1:], **kwargs)
    return logits if same_storage(shown, model) else logits.root(logits.local.contiguous())


@SHAPES.to("detach", "data.__get__")
def _detach(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, model = args[0], args[0].stand_in()
    return logits.derived(logits.local.detach(), model, model, torch.Tensor.detach)


# ------------------------------------------------------------------------------------------------------ leading dims


@SHAPES.to("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", anywhere=True)
def _reshape(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Elements keep their order, so that rows stay whole where the last dim is still the vocabulary."""
    if not isinstance(args[0], VocabularyTensor):
        return function(*map_values(blank_of, args, VocabularyTensor), **kwargs)
    logits, rest = args[0], map_values(blank_of, args[1:], VocabularyTensor)
    if function.__name__ == "view":
        if kwargs or any(isinstance(value, torch.dtype) for value in rest):
            return NotImplemented
        function = torch.Tensor.reshape  # it may be gathered with other strides

    def view(tensor: torch.Tensor) -> torch.Tensor:
        shaped: torch.Tensor = function(tensor, *rest, **kwargs)
        return shaped

    model = logits.stand_in()
    shown = view(model)
    if not shown.dim() or shown.shape[-1] != logits.columns.vocabulary:
        return NotImplemented
    local = logits.local.reshape(*shown.shape[:-1], logits.columns.width)
    return logits.derived(local, model, shown, view)


@SHAPES.to("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims")
def _permute(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, rest = args[0], args[1:]
    sizes = function(torch.empty(()).expand(*range(1, logits.dim() + 1)), *rest, **kwargs).shape  # each dim another
    if sizes[-1] != logits.dim():
        return NotImplemented
    model = logits.stand_in()
    local, shown = (function(tensor, *rest, **kwargs) for tensor in (logits.local, model))
    return logits.derived(local, model, shown, lambda whole: function(whole, *rest, **kwargs))


@SHAPES.to(*_DIM)
def _part(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, rest = args[0], args[1:]
    at = _DIM[function.__name__]
    dim = kwargs.get("dim", args[at] if len(args) > at else 0)
    if logits.dim() < 2 or dim in (-1, logits.dim() - 1) or find_tensors((rest, kwargs)):
        return NotImplemented
    model = logits.stand_in()
    local, shown = (function(tensor, *rest, **kwargs) for tensor in (logits.local, model))
    if isinstance(local, torch.Tensor):
        return logits.derived(local, model, shown, lambda whole: function(whole, *rest, **kwargs))
    return tuple(
        logits.derived(*parts[:1], model, parts[1], lambda whole, i=i: function(whole, *rest, **kwargs)[i])
        for i, parts in enumerate(zip(local, shown, strict=True))
    )


@SHAPES.to("index_select")
def _index_select(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim in (None, -1, logits.dim() - 1) or divided_in((args[1:], kwargs)):
        return NotImplemented
    return logits.root(function(logits.local, *args[1:], **kwargs))


@SHAPES.to("__getitem__")
def _index(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, index = args
    items = _leading(index, logits)
    if items is None:
        return NotImplemented
    if find_tensors(items):  # a copy, of a size that its values tell
        return logits.root(logits.local[items])
    model = logits.stand_in()
    return logits.derived(logits.local[items], model, model[items], lambda whole: whole[items])


def _leading(index: Any, logits: VocabularyTensor) -> tuple[Any, ...] | None:
    """An index as one item for each dim (and None for new ones), if it leaves the vocabulary, the last dim, whole."""
    items = [_item(item) for item in (index if isinstance(index, tuple) else (index,))]
    used = [_dims(item) for item in items]
    if any(dims is None for dims in used):
        return None
    places = [place for place, item in enumerate(items) if item is Ellipsis] or [len(items)]
    missing = logits.dim() - sum(dims or 0 for dims in used)
    if missing < 0 or len(places) > 1:
        return None
    items[places[0] : places[0] + 1] = [_FULL] * missing
    last, vocabulary = items[-1] if items else None, logits.columns.vocabulary
    if not isinstance(last, slice) or last.indices(vocabulary) != (0, vocabulary, 1):
        return None
    return (*items[:-1], _FULL)


def _item(item: Any) -> Any:
    if isinstance(item, list):
        return torch.as_tensor(item)
    if isinstance(item, torch.Tensor) and not item.dim() and item.dtype in (torch.int32, torch.int64):
        return int(item)  # as in plain PyTorch: a view
    return item


def _dims(item: Any) -> int | None:
    """How many dims an item of an index takes; None where it is not known."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, (int, slice)) and not isinstance(item, bool):
        return 1
    if not isinstance(item, torch.Tensor) or isinstance(item, VocabularyTensor) or not item.dim():
        return None
    return item.dim() if item.dtype in (torch.bool, torch.uint8) else 1
