"""Work: what one operation computes, as a product or as attention, and what one that computes little moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from meshwright.spec.model import AttentionWork, Product

__all__ = [
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "PRODUCTS",
    "PRODUCTS_BACKWARD",
    "Work",
    "above_the_diagonal",
    "attention_flops",
    "attention_work",
    "element_bytes",
    "for_one",
    "grouped_work",
    "work_of",
]

Work = Product | AttentionWork

#: Attention kernels; their first three tensors are query, key and value (after the gradient in a backward).
ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    }
)
ATTENTION_BACKWARD = frozenset(f"{name}_backward" for name in ATTENTION)
_GROUPED = frozenset({"_grouped_mm", "grouped_mm_fallback"})
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"}) | _GROUPED
#: Operations that are the whole backward of a product: two products each.
PRODUCTS_BACKWARD = frozenset({"convolution_backward", "grouped_mm_fallback_backward"})
_ADDED = frozenset({"addmm", "baddbmm"})  # their first argument is added to the product
_LOOKUPS = frozenset({"embedding", "index", "index_select", "gather"})
_FILLS = frozenset({"fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "random_"})
_LIKE = frozenset(
    {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
)
_SPREADS = frozenset(
    {"index_put", "index_put_", "_index_put_impl_", "scatter", "scatter_", "scatter_add", "scatter_add_"}
)
_PLACED = frozenset({"slice_backward", "select_backward"})
_LABELLED = frozenset({"nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"})


def work_of(func: Any, name: str, args: Any, kwargs: Any, result: Any, trained: Any) -> Work | None:
    """What an operation of the forward computes, None where it is neither a product nor attention.

    Args:
        func: the operation, called `name`.
        trained: whether a tensor is a parameter that gets a gradient.
    """
    if name in ATTENTION:
        causal = _argument(func, args, kwargs, "is_causal") is True
        return attention_work(*args[:3], causal=causal)
    if name in _GROUPED:
        return grouped_work(args[0], args[1])
    if name == "convolution":
        return _convolution(args, result, trained(args[1]))
    if name not in PRODUCTS:
        return None
    x, y = (args[1:] if name in _ADDED else args)[:2]
    groups = x.shape[0] if x.dim() == 3 else 1
    rows, inner, columns = x.shape[-2], x.shape[-1], y.shape[-1]
    if trained(x) and not trained(y):  # a matrix times activations: its rows are the product's columns
        rows, columns = columns, rows
    return Product(groups * rows, inner, columns, groups, weighted=trained(x) or trained(y))


def grouped_work(x: torch.Tensor, y: torch.Tensor) -> Product:
    """[T, K] x [G, K, N]: each row with the matrix of its group."""
    groups = y.shape[0] if y.dim() == 3 else 1
    return Product(x.numel() // x.shape[-1], x.shape[-1], y.shape[-1], groups, experts=True)


def attention_work(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> AttentionWork:
    """A kernel that stores no scores, on [.., N, S, D]."""
    return AttentionWork(
        attention_flops(query, key, value),
        attention_flops(query, key, value, backward=True),
        above_the_diagonal(query, key, value) if causal else 0,
        query.shape[-1],
    )


def attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, backward: bool = False) -> int:
    """Flops of attention over all pairs: [.., N, S, D], [.., K, T, D], [.., K, T, E]; N counts all heads.

    Backward: a kernel computes the scores again (Dao et al. 2022, arXiv 2205.14135): five products, not four.
    """
    rows, channels, channels_out = query.numel() // query.shape[-1], query.shape[-1], value.shape[-1]
    products = 3 * channels + 2 * channels_out if backward else channels + channels_out
    return 2 * rows * key.shape[-2] * products


def above_the_diagonal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Flops of the pairs (i, j > i) that a causal mask takes out of S x T."""
    rows, columns = query.shape[-2], key.shape[-2]
    masked = min(rows, columns)
    pairs = masked * (columns - 1) - masked * (masked - 1) // 2
    return attention_flops(query, key, value) * pairs // (rows * columns)


def _convolution(args: Any, result: torch.Tensor, weighted: bool) -> Product:
    """As a product of its unrolled input (im2col): a row per place of the output, or of the input if transposed."""
    x, weight, transposed, groups = args[0], args[1], bool(args[6]), int(args[8])
    places, window = (x if transposed else result).shape[2:], math.prod(weight.shape[2:])
    rows = x.shape[0] * math.prod(places) * groups
    if transposed:
        return Product(rows, weight.shape[0] // groups, weight.shape[1] * window, groups, weighted=weighted)
    return Product(rows, weight.shape[1] * window, weight.shape[0] // groups, groups, weighted=weighted)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The value of a named argument, None where it was left at its default."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name)
    return None


def element_bytes(name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> int:
    """What an operation that is bound by memory reads and writes; a value repeated by a stride of 0 is read once.

    Of lookups and their backward only the rows that are asked for count; of `slice`'s backward the zeros besides.
    """
    size = _sizes(written)
    if name in _LIKE:
        return size
    if name in _FILLS:
        return size + _sizes(read[1:])
    if name in _LOOKUPS:
        return 2 * size + _sizes(read[1:])
    if name in _SPREADS:  # rows are read, and those in their places read and written
        return 2 * _sizes(read[-1:]) + _sizes(read[1:])
    if name in _PLACED:
        return size + 2 * _sizes(read)
    if name in _LABELLED:
        return size + _sizes([tensor for tensor in read if not tensor.is_floating_point()])
    return size + _sizes(read)


def _sizes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(
        math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.itemsize
        if tensor.layout == torch.strided
        else tensor._nnz() * tensor.itemsize
        for tensor in tensors
    )


def for_one(few: Sequence[Work], sequences: int, more: Sequence[Work], others: int) -> list[Work]:
    """The work of one sequence, on the straight line through that of two microbatches.

    Where these did not do the same operations one after the other, a sequence's share of the first.
    """
    alike = len(few) == len(more) and all(type(a) is type(b) for a, b in zip(few, more, strict=True))
    if not alike:
        return [_scaled(one, _shared(one, sequences)) for one in few]
    found = []
    for first, second in zip(few, more, strict=True):
        sizes = []
        for a, b in zip(_grows(first), _grows(second), strict=True):
            slope = (b - a) // (others - sequences)
            sizes.append(a - (sequences - 1) * slope)
        found.append(_scaled(first, sizes))
    return found


def _grows(work: Work) -> tuple[int, int, int]:
    """What may grow with the number of sequences."""
    if isinstance(work, AttentionWork):
        return work.flops, work.backward_flops, work.causal_flops
    return work.rows, work.columns, work.groups


def _shared(work: Work, sequences: int) -> tuple[int, int, int]:
    first, second, third = _grows(work)
    if isinstance(work, AttentionWork):
        return first // sequences, second // sequences, third // sequences
    return first // sequences, second, third if third % sequences else third // sequences


def _scaled(work: Work, sizes: Sequence[int]) -> Work:
    first, second, third = sizes
    if isinstance(work, AttentionWork):
        return work._replace(flops=first, backward_flops=second, causal_flops=third)
    return work._replace(rows=first, columns=second, groups=max(1, third))
