"""Functions of divided logits that need no whole rows: of single elements, losses, and what concerns the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.runtime.tensors import map_values
from meshwright.runtime.vocabulary import loss as losses
from meshwright.runtime.vocabulary.answers import Answers, blank_of, divided_in, local_of, whole_of
from meshwright.runtime.vocabulary.columns import Columns, replicated, sum_over_ranks
from meshwright.runtime.vocabulary.tensor import VocabularyTensor

__all__ = ["FUNCTIONS"]

FUNCTIONS = Answers()

# fmt: off
_UNARY = (
    "abs", "neg", "negative", "positive", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sqrt", "rsqrt",
    "square", "reciprocal", "sigmoid", "tanh", "sin", "cos", "erf", "sign", "relu", "silu", "gelu", "softplus",
    "log_sigmoid", "hardtanh", "softsign", "tanhshrink", "nan_to_num", "clamp", "clamp_min", "clamp_max", "clip",
)
_BINARY = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "float_power", "maximum",
    "minimum",
)
_REFLECTED = ("rsub", "__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__rpow__")
_IN_PLACE = (*(f"{name}_" for name in (*_UNARY, *_BINARY)), "__iadd__", "__isub__", "__imul__", "__idiv__", "__ipow__")
_MEASURED = (
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like", "expand_as",
    "is_same_size", "result_type",
)
_OF_LOCAL = (
    "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "retain_grad", "_is_view", "requires_grad.__get__",
    "is_leaf.__get__", "retains_grad.__get__", "_base.__get__", "_version.__get__",
)
# fmt: on


# --------------------------------------------------------------------------------------------------- element by element


@FUNCTIONS.to(*_UNARY, *_BINARY, *_REFLECTED, anywhere=True)
def _pointwise(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits = divided_in((args, kwargs))[0]
    operands = _operands(logits, args, kwargs)
    return NotImplemented if operands is None else logits.root(function(*operands[0], **operands[1]))


@FUNCTIONS.to(*_IN_PLACE)
def _in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits = args[0]
    if logits.gathered:
        return NotImplemented  # views of the whole tensor may be about, and have to see it
    operands = _operands(logits, args, kwargs)
    if operands is None:
        return NotImplemented
    function(*operands[0], **operands[1])
    logits.attach()
    return logits


def _operands(
    logits: VocabularyTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments of a function that goes element by element, as they are for local tensors."""
    values = [_operand(logits, value) for value in (*args, *kwargs.values())]
    if "out" in kwargs or any(value is NotImplemented for value in values):
        return None
    return values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))


def _operand(logits: VocabularyTensor, value: Any) -> Any:
    if isinstance(value, VocabularyTensor):
        same = value.columns == logits.columns and value.shape == logits.shape
        return value.local if same else NotImplemented
    if isinstance(value, torch.Tensor):
        single = value.numel() == 1 and value.dim() <= logits.dim()
        return replicated(value, logits.columns) if single else NotImplemented
    # True may stand for "in place".
    return value if value is None or value is False or _is_number(value) or isinstance(value, str) else NotImplemented


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@FUNCTIONS.to("sum", "mean")
def _total(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Over all elements."""
    logits = args[0]
    if len(args) > 1 or kwargs or not logits.is_floating_point():
        return NotImplemented
    local = _under_autocast(logits, function)
    part = local.sum(dtype=torch.promote_types(local.dtype, torch.float32))
    total = sum_over_ranks(part, logits.columns)
    return (total / logits.numel() if function.__name__ == "mean" else total).to(local.dtype)


# ----------------------------------------------------------------------------------------------------- along the rows


@FUNCTIONS.to("cross_entropy")
def _cross_entropy(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _of_classes(losses.cross_entropy, *args, **kwargs)


@FUNCTIONS.to("nll_loss")
def _nll_loss(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _of_classes(losses.nll_loss, *args, **kwargs)


def _of_classes(
    loss: Callable[..., torch.Tensor],
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The signatures of `cross_entropy` and `nll_loss`; the latter has no smoothing."""
    if divided_in((target, weight)) or not isinstance(input, VocabularyTensor) or not isinstance(target, torch.Tensor):
        return NotImplemented
    classes = target.dtype == torch.int64 and target.shape == input.shape[:-1] and input.dim() <= 2
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    if not classes or not plain or not input.is_floating_point():
        return NotImplemented
    local = _under_autocast(input, lambda row: torch.nn.functional.cross_entropy(row, row.new_zeros(1).long()))
    return loss(local, target, input.columns, ignore_index=ignore_index, reduction=reduction)


@FUNCTIONS.to("log_softmax")
def _log_softmax(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, rest = args[0], args[1:]
    dim = kwargs.get("dim", rest[0] if rest else None)
    dtype = kwargs.get("dtype") or next((value for value in rest if isinstance(value, torch.dtype)), logits.dtype)
    if dim not in (-1, logits.dim() - 1) or not dtype.is_floating_point:
        return NotImplemented
    local = _under_autocast(logits.to(dtype), lambda row: row.log_softmax(-1))
    return logits.root(losses.log_softmax(local, logits.columns))


@FUNCTIONS.to("logsumexp")
def _logsumexp(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _rows_logsumexp(*args, **kwargs)


def _rows_logsumexp(input: VocabularyTensor, dim: Any, keepdim: bool = False, *, out: Any = None) -> Any:
    along = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if along not in (-1, input.dim() - 1) or out is not None or not input.is_floating_point():
        return NotImplemented
    result = losses.logsumexp(input.local, input.columns)
    return result.unsqueeze(-1) if keepdim else result


@FUNCTIONS.to("gather")
def _gather(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _picked(*args, **kwargs)


def _picked(input: Any, dim: int, index: Any, *, sparse_grad: bool = False, out: Any = None) -> Any:
    """The logits of chosen columns, a few in each row."""
    if not isinstance(input, VocabularyTensor) or divided_in((index, out)) or out is not None:
        return NotImplemented
    if dim not in (-1, input.dim() - 1) or index.dim() != input.dim() or index.shape[:-1] != input.shape[:-1]:
        return NotImplemented
    if not input.is_floating_point() or index.shape[-1] > input.columns.vocabulary:
        return NotImplemented
    return losses.pick(input.local, index, input.columns)


# ------------------------------------------------------------------------------------------------------ shape and graph


@FUNCTIONS.to(*_MEASURED, anywhere=True)
def _measured(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Only shape, dtype and device are asked for."""
    if function.__name__ == "expand_as" and isinstance(args[0], VocabularyTensor):
        return NotImplemented
    return function(*map_values(blank_of, args, VocabularyTensor), **kwargs)


@FUNCTIONS.to(*_OF_LOCAL)
def _of_local(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*map_values(local_of, args, VocabularyTensor), **kwargs)


@FUNCTIONS.to("requires_grad_", "requires_grad.__set__")
def _requires_grad(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].set_requires_grad(*args[1:] or (True,), **kwargs)


@FUNCTIONS.to("grad.__get__")
def _gradient(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits = args[0]
    return None if logits.local.grad is None else logits.root(logits.local.grad)


@FUNCTIONS.to("grad.__set__")
def _set_gradient(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    logits, gradient = args
    logits.local.grad = None if gradient is None else _own(logits.columns, gradient)


@FUNCTIONS.to("register_hook")
def _register_hook(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook sees the gradient as these logits are: divided."""
    logits, hook = args
    made, columns = type(logits), logits.columns

    # The graph holds the hook: one that held the logits would keep them, and the graph, alive.
    def called(gradient: torch.Tensor) -> torch.Tensor | None:
        changed = hook(made.of(gradient, columns))
        return None if changed is None else _own(columns, changed)

    return logits.local.register_hook(called)


@FUNCTIONS.to("grad", anywhere=True)
def _autograd_grad(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad` with divided logits among its inputs."""
    outputs, inputs, *rest = args
    outputs, kwargs = (map_values(whole_of, value, VocabularyTensor) for value in (outputs, kwargs))
    found = function(outputs, map_values(local_of, inputs, VocabularyTensor), *rest, **kwargs)
    return tuple(
        logits.root(gradient) if isinstance(logits, VocabularyTensor) and gradient is not None else gradient
        for logits, gradient in zip(inputs, found, strict=True)
    )


def _under_autocast(logits: VocabularyTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The local tensor in the dtype in which a function of rows is computed."""
    if not torch.is_autocast_enabled(logits.device.type):
        return logits.local
    return logits.local.to(function(logits.local.new_zeros(1, 1)).dtype)


def _own(columns: Columns, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.local if isinstance(gradient, VocabularyTensor) else columns.take(gradient)
