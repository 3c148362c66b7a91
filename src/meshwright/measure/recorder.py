"""Recorder: counts what operations compute, move and keep, whatever module they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from meshwright.measure._torch import TorchDispatchMode, flop_registry, running_node
from meshwright.measure.values import Storages, storages_of
from meshwright.measure.work import (
    ATTENTION,
    ATTENTION_BACKWARD,
    PRODUCTS,
    PRODUCTS_BACKWARD,
    Work,
    attention_flops,
    element_bytes,
    grouped_work,
    work_of,
)
from meshwright.runtime.recompute import KEPT_BY_SELECTIVE

__all__ = ["Recorder", "Tally"]

_UNWRITTEN = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
_LOOKUPS = frozenset({"embedding", "index", "index_select", "gather"})
#: With a weight for each channel: `mul` is the last step of a norm that is written out.
_NORMS = frozenset({"mul", "native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm"})
_FILLS = frozenset({"fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "random_"})


@dataclass
class Tally:
    """What operations did.

    `forward_flops`, `backward_flops`: two per multiply-add of matrix products and attention over all pairs;
    `causal_flops` of the forward a causal kernel may skip. `moved_bytes`:
    each operation reads its inputs and writes its outputs once, views nothing. `kept`: storages that autograd keeps.
    `products`: storages of what selective recompute keeps, `unasked` those made after the last tensor that autograd
    keeps: a second forward stops before them. `weight_inputs`, `weight_outputs_bytes`: inputs of products
    and norms with a trained weight, and bytes of their outputs. `read`: storages that were read; `made`: those that were
    written, where this is asked for. `work`: products and attention of the forward; `element_bytes` and
    `backward_element_bytes`: what all else read and wrote, `kernels` and `backward_kernels`: operations of any kind.
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
    work: list[Work] = field(default_factory=list)
    element_bytes: int = 0
    backward_element_bytes: int = 0
    kernels: int = 0
    backward_kernels: int = 0


class Recorder(TorchDispatchMode):
    """Writes what operations do inside its context to `tally`, and in a backward to the tally that is asked for.

    Args:
        parameters: storages that are never counted as kept (parameters and buffers), and whether each is trained.
    """

    def __init__(self, parameters: Mapping[int, bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes without annotations
        self._parameters = parameters
        self._casts: Storages = {}
        self.tally = Tally()
        self._backward: Callable[[int], Tally] | None = None
        self._elements: Callable[[int], Tally] | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count operations, and what autograd keeps."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor), self:
            yield

    @contextmanager
    def in_backward(
        self, tally_of: Callable[[int], Tally], elements_of: Callable[[int], Tally] | None = None
    ) -> Iterator[None]:
        """Inside, only the backward is counted, to the tally of each autograd node's number; `elements_of`: to which
        what is no product goes, where that is another."""
        self._backward, self._elements = tally_of, elements_of or tally_of
        try:
            yield
        finally:
            self._backward = self._elements = None

    def note_backward(self, flops: int, kernels: int = 0, element_bytes: int = 0) -> None:
        """Count what the autograd node that runs now does: flops, or bytes that other operations move."""
        node = running_node()
        if self._backward is None or self._elements is None or node is None:
            return
        self._backward(node[0]).backward_flops += flops
        if not node[1].endswith("AccumulateGrad"):  # of gradients over microbatches, not of a backward
            tally = self._elements(node[0])
            tally.backward_kernels += kernels
            tally.backward_element_bytes += element_bytes

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
        work: Work,
        *,
        product: bool = False,
        weight: torch.Tensor | None = None,
    ) -> None:
        """Count a kernel that is no operation of PyTorch. `product`: selective recompute keeps what it writes."""
        self.tally.forward_flops += work.flops
        self.tally.work.append(work)
        self.tally.kernels += 1
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

    def _is_trained(self, tensor: torch.Tensor) -> bool:
        """Whether it is a parameter that gets a gradient, or one in another dtype."""
        return any(self._parameters.get(key) or key in self._casts for key in storages_of([tensor]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        sources = storages_of(read)
        if not func._schema.is_mutable:
            written = [tensor for tensor in written if not storages_of([tensor]).keys() <= sources.keys()]
        nothing = not written or name in _UNWRITTEN
        if self._backward is not None:
            flops = _flops(func, name, args, kwargs, result)
            moved = 0 if nothing or flops else element_bytes(name, read, written)
            self.note_backward(flops, 0 if nothing else 2 if name in PRODUCTS_BACKWARD else 1, moved)
            return
        if nothing:
            return
        tally = self.tally
        work = work_of(func, name, args, kwargs, result, self._is_trained)
        tally.kernels += 1
        if name == "_to_copy" and self._is_trained(read[0]):
            self._casts.update(storages_of(written))
        if work is not None:
            tally.work.append(work)
        else:
            tally.element_bytes += element_bytes(name, read, written)
        tally.forward_flops += work.flops if work is not None else _flops(func, name, args, kwargs, result)
        tally.moved_bytes += _moved(name, read, written)
        tally.read.update(sources)
        if tally.made is not None:
            tally.made.update(self.activations(written))
        if func in KEPT_BY_SELECTIVE:
            self._keep_product(written)
        if name in PRODUCTS:
            self._note_weight(read, written)
        elif name in _NORMS and any(self._parameters.get(key) for key in sources):
            # What a norm says of rows is kept as its input is; a gradient arrives of its first output alone.
            kept = [tensor for tensor in (*read, *written[1:]) if tensor.dim() >= 2]
            tally.weight_inputs.update(self.activations(kept))
            tally.weight_outputs_bytes += written[0].nbytes


def _moved(name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> int:
    size = sum(tensor.nbytes for tensor in written)
    if name in _LOOKUPS:  # only the rows that are asked for are read
        return 2 * size + sum(tensor.nbytes for tensor in read[1:])
    if name in _FILLS:
        read = read[1:]
    return size + sum(tensor.nbytes for tensor in read)


def _flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    if name in ATTENTION:
        return attention_flops(*args[:3])
    if name in ATTENTION_BACKWARD:
        return attention_flops(*args[1:4], backward=True)
    if name == "grouped_mm_fallback_backward":
        return 4 * int(args[0].numel()) * int(args[1].shape[-1])
    if name in ("_grouped_mm", "grouped_mm_fallback"):
        return grouped_work(*args[:2]).flops
    formula = flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0
