"""Recorder: counts what operations compute, move and keep, whatever module they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from meshwright.measure._torch import TorchDispatchMode, flop_registry, running_node_number
from meshwright.measure.values import Storages, storages_of
from meshwright.runtime.recompute import KEPT_BY_SELECTIVE

__all__ = ["Recorder", "Tally", "attention_flops"]

_ATEN = torch.ops.aten
#: Attention kernels; their first three tensors are query, key and value (after the gradient in a backward).
_ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    }
)
_ATTENTION_BACKWARD = frozenset(f"{name}_backward" for name in _ATTENTION)
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "grouped_mm_fallback"})
_GROUPED = frozenset({"_grouped_mm", "grouped_mm_fallback"})
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
_LOOKUPS = frozenset({"embedding", "index", "index_select", "gather"})
_FILLS = frozenset({"fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "random_"})


@dataclass
class Tally:
    """What operations did.

    `forward_flops`, `backward_flops`: two per multiply-add of matrix products and attention over all pairs;
    `causal_flops` of the forward a causal kernel may skip. `moved_bytes`:
    each operation reads its inputs and writes its outputs once, views nothing. `kept`: storages that autograd keeps.
    `products`: storages of what selective recompute keeps, `unasked` those made after the last tensor that autograd
    keeps: a second forward stops before them. `weight_inputs`, `weight_outputs_bytes`: inputs of products
    with a trained weight, and bytes of their outputs. `read`: storages that were read; `made`: those that were
    written, where this is asked for.
    """

    forward_flops: int = 0
    backward_flops: int = 0
    causal_flops: int = 0
    moved_bytes: int = 0
    weight_outputs_bytes: int = 0
    kept: Storages = field(default_factory=dict)
    products: Storages = field(default_factory=dict)
    unasked: Storages = field(default_factory=dict)
    weight_inputs: Storages = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    made: Storages | None = None


class Recorder(TorchDispatchMode):
    """Writes what operations do inside its context to `tally`, and in a backward to the tally that is asked for.

    Args:
        parameters: storages that are never counted as kept (parameters and buffers), and whether each is trained.
    """

    def __init__(self, parameters: Mapping[int, bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes without annotations
        self._parameters = parameters
        self.tally = Tally()
        self._backward: Callable[[int], Tally] | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count operations, and what autograd keeps."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor), self:
            yield

    @contextmanager
    def in_backward(self, tally_of: Callable[[int], Tally]) -> Iterator[None]:
        """Inside, only flops of the backward are counted, to the tally of each autograd node's number."""
        self._backward = tally_of
        try:
            yield
        finally:
            self._backward = None

    def note_backward(self, flops: int) -> None:
        """Count flops of the autograd node that runs now."""
        if self._backward is not None and flops:
            self._backward(running_node_number()).backward_flops += flops

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.tally.kept.update(self.activations([tensor]))
        self.tally.unasked = {}
        return tensor

    def _keep_product(self, tensors: list[torch.Tensor]) -> None:
        made = self.activations(tensors)
        self.tally.products.update(made)
        self.tally.unasked.update(made)

    def activations(self, tensors: list[torch.Tensor]) -> Storages:
        """Storages of tensors, without parameters and buffers."""
        return {key: held for key, held in storages_of(tensors).items() if key not in self._parameters}

    def note_kernel(
        self,
        read: list[torch.Tensor],
        written: list[torch.Tensor],
        flops: int,
        *,
        product: bool = False,
        weight: torch.Tensor | None = None,
    ) -> None:
        """Count a kernel that is no operation of PyTorch. `product`: selective recompute keeps what it writes."""
        self.tally.forward_flops += flops
        self.tally.moved_bytes += sum(tensor.nbytes for tensor in (*read, *written))
        self.tally.read.update(storages_of(read))
        if product:
            self._keep_product(written)
        if weight is not None:
            self._note_weight([*read, weight], written)

    def _note_weight(self, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        matrices = [tensor for tensor in read if tensor.dim() >= 2]
        if any(self._parameters.get(key) for key in storages_of(matrices)):
            self.tally.weight_inputs.update(self.activations(matrices))
            self.tally.weight_outputs_bytes += sum(tensor.nbytes for tensor in written)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        if self._backward is not None:
            self.note_backward(_flops(func, name, args, kwargs, result))
            return
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        sources = storages_of(read)
        if not func._schema.is_mutable:
            written = [tensor for tensor in written if not storages_of([tensor]).keys() <= sources.keys()]
        if not written or name in _UNWRITTEN:
            return
        tally = self.tally
        tally.forward_flops += _flops(func, name, args, kwargs, result)
        tally.moved_bytes += _moved(name, read, written)
        tally.read.update(sources)
        if tally.made is not None:
            tally.made.update(self.activations(written))
        if func in KEPT_BY_SELECTIVE:
            self._keep_product(written)
        if name in _PRODUCTS:
            self._note_weight(read, written)


def _moved(name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> int:
    size = sum(tensor.nbytes for tensor in written)
    if name in _LOOKUPS:  # only the rows that are asked for are read
        return 2 * size + sum(tensor.nbytes for tensor in read[1:])
    if name in _FILLS:
        read = read[1:]
    return size + sum(tensor.nbytes for tensor in read)


def attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, backward: bool = False) -> int:
    """Flops of attention over all pairs: [.., N, S, D], [.., K, T, D], [.., K, T, E]; N counts all heads.

    Backward: a kernel computes the scores again (Dao et al. 2022, arXiv 2205.14135): five products, not four.
    """
    rows, channels, channels_out = query.numel() // query.shape[-1], query.shape[-1], value.shape[-1]
    products = 3 * channels + 2 * channels_out if backward else channels + channels_out
    return 2 * rows * key.shape[-2] * products


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    if name in _ATTENTION:
        return attention_flops(*args[:3])
    if name in _ATTENTION_BACKWARD:
        return attention_flops(*args[1:4], backward=True)
    if name == "grouped_mm_fallback_backward":
        return 4 * int(args[0].numel()) * int(args[1].shape[-1])
    if name in _GROUPED:
        return 2 * int(args[0].numel()) * int(args[1].shape[-1])
    formula = flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
