"""What a Hugging Face class really has, computes and keeps: the other side of every figure of a family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from meshwright.runtime.recompute import _keep

Table = dict[str, Any]


def build(table: Table, *, attention: str = "sdpa", dtype: str = "float32", meta: bool = False) -> nn.Module:
    """The class that the table's `architectures` names, or the causal language model of its model_type."""
    settings = {key: value for key, value in table.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(table["model_type"], **settings)
    named = table.get("architectures")
    kind = getattr(transformers, named[0]) if named else None
    torch.manual_seed(0)
    with torch.device("meta") if meta else nullcontext():
        if kind is not None:
            return kind._from_config(config, attn_implementation=attention).train()
        made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return made.to(getattr(torch, dtype)).train() if not meta else made


def tokens(table: Table, sequences: int, length: int) -> torch.Tensor:
    return torch.randint(3, table["vocab_size"], (sequences, length), generator=torch.Generator().manual_seed(1))


def run(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The logits, or the last hidden states of a class without a head."""
    out = model(ids, use_cache=False)
    result = out.logits if hasattr(out, "logits") else out.last_hidden_state
    assert isinstance(result, torch.Tensor)
    return result


@contextmanager
def dropout_of_accelerators() -> Iterator[None]:
    """`native_dropout`, which accelerators run, also on the CPU: it keeps one byte per element."""
    plain = nn.functional.dropout

    def native(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input

    nn.functional.dropout = native
    try:
        yield
    finally:
        nn.functional.dropout = plain


class Kept:
    """Unique storages kept for backward, parameters and buffers left out."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self._found: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._found[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._found.values())


def kept_bytes(model: nn.Module, ids: torch.Tensor, *, policy: str, layers: nn.ModuleList) -> int:
    """Bytes kept after a forward whose layers recompute under a policy."""
    kept, caches = Kept(model), []

    def contexts() -> Any:
        made = create_selective_checkpoint_contexts(_keep)
        caches.append(made[0].storage)
        return made

    if policy != "none":
        options = {"context_fn": contexts} if policy == "selective" else {}
        for layer in layers:
            layer.forward = _recomputed(layer.forward, kept, options)
    with dropout_of_accelerators(), torch.autograd.graph.saved_tensors_hooks(kept.add, lambda tensor: tensor):
        run(model, ids)
    for cache in caches:
        for calls in cache.values():
            for entry in calls.values():
                for leaf in tree_leaves(entry):
                    if isinstance(getattr(leaf, "val", None), torch.Tensor):
                        kept.add(leaf.val)
    return kept.bytes


def _recomputed(forward: Callable[..., Any], kept: Kept, options: dict[str, Any]) -> Callable[..., Any]:
    """As the runtime recomputes a block; its inputs, which `checkpoint` keeps, are counted.

    Left out is the causal mask, of which classes without a kernel hold one per microbatch.
    """

    def again(*args: Any, **kwargs: Any) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.ndim < 4:
                kept.add(leaf)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return again


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The list of the model's repeated blocks."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def flops(model: nn.Module, ids: torch.Tensor) -> tuple[int, int]:
    """Flops of forward and of backward as torch counts them, attention as plain products over all pairs."""
    with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH):
        out = run(model, ids)
    with FlopCounterMode(display=False) as backward, sdpa_kernel(SDPBackend.MATH):
        out.float().sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()
