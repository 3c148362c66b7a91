"""Private PyTorch interfaces, each with the reason why there is no other way. Checked against PyTorch 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

# The abstract classes of FSDP2's public hooks `set_custom_all_gather` / `set_custom_reduce_scatter` (2.13) are not
# exported from a public module.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

# The classes above all batch norms, and above those and instance norms; only their children have public names (2.13).
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase

# Sees every operation of a step; its module has no public name (2.13).
from torch.utils._python_dispatch import TorchDispatchMode

# A dictionary keyed by the identity of live tensor storages: the only way to know when one is freed (2.13).
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "AllGather",
    "BatchNormBase",
    "NormBase",
    "ReduceScatter",
    "TorchDispatchMode",
    "WeakIdKeyDictionary",
    "finish_backward",
    "gathered_storages",
    "group_timeout",
    "graph_node",
    "let_go",
    "make_root",
    "mark_managed",
    "order_of",
    "reduce_unit",
    "storage_key",
    "unsharded_gradient_storages",
    "unsharded_parameters",
    "use_explicit_gathers",
    "wrapper_tensor",
]

T = TypeVar("T", bound=torch.Tensor)


def use_explicit_gathers(root: FSDPModule) -> None:
    """Gather asynchronously, only when asked for or listed for prefetch (2.13: no public setter).

    Otherwise FSDP2 keeps the flat buffer of the last gather alive until the next, one more unit than the plan prices.
    """
    root._set_unshard_async_op(True)


def make_root(root: FSDPModule) -> None:
    """Let FSDP2 know its outermost module before an inner one is called by itself (2.13: it takes the first called)."""
    fully_shard.state(root)._lazy_init()  # type: ignore[attr-defined]  # a contract adds `state`


def mark_managed(root: nn.Module, managed: bool) -> None:
    """Set the mark of FSDP2 on modules that have it (2.13: for the compiler).

    Hugging Face's `generate` takes it as a sign that all ranks have to generate in step, with collectives of its own.
    """
    for module in root.modules():
        if hasattr(module, "_is_fsdp_managed_module"):
            module._is_fsdp_managed_module = managed  # type: ignore[assignment]  # a flag, not a module


def storage_key(storage: torch.UntypedStorage) -> int:
    """The identity of a storage while it is alive (2.13: a data pointer is 0 for every empty one)."""
    key: int = storage._cdata
    return key


def wrapper_tensor(kind: type[T], shape: Sequence[int], strides: Sequence[int] | None, like: torch.Tensor) -> T:
    """A tensor of a subclass that shows a shape without holding memory for it (2.13: no public constructor)."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, strides, dtype=like.dtype, device=like.device)


def graph_node(tensor: torch.Tensor) -> Any:
    """The `grad_fn` of a subclass as autograd knows it, past its `__torch_function__` (2.13: only from inside that)."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn


def order_of(node: Any) -> int:
    """The number of a node of autograd's graph: those made last run first (2.13: no public reader)."""
    number: int = node._sequence_nr()
    return number


#: By the type of a node, where it keeps what it has saved.
_SAVED: dict[type, tuple[str, ...]] = {}


def let_go(node: Any) -> None:
    """Free what a node has saved for a backward that has been: a hook takes the place of each tensor.

    (2.13: saved tensors are freed with their graph, all together.)
    """
    kind = type(node)
    if kind not in _SAVED:
        _SAVED[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    for name in _SAVED[kind]:
        with contextlib.suppress(RuntimeError):  # there is none, or it has hooks already
            saved = getattr(node, name)
            for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                one.register_hooks(_nothing, _gone)


def _nothing(tensor: torch.Tensor) -> None:
    """What is kept in place of a tensor."""


def _gone(kept: None) -> torch.Tensor:
    raise RuntimeError("what this needs was let go")  # an internal error: nothing of a second half needs it


def group_timeout(device: torch.device) -> timedelta:
    """How long a collective of the default group may take (2.13: groups do not show it)."""
    timeout: timedelta = dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]  # there is a default group
    return timeout


def _groups(root: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in fully_shard.state(module)._fsdp_param_groups:  # type: ignore[attr-defined]  # a contract adds `state`
                if id(group) not in seen:
                    seen.add(id(group))
                    yield group


def unsharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """What autograd knows of a sharded unit's parameters, gathered or not (2.13: FSDP2 shows them while gathered)."""
    groups = fully_shard.state(module)._fsdp_param_groups  # type: ignore[attr-defined]  # a contract adds `state`
    return [
        parameter.unsharded_param
        for group in groups
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    ]


def reduce_unit(module: nn.Module) -> None:
    """Do with a unit what FSDP2 does after its backward: reduce and release as it was told to (2.13: only hooks do)."""
    for group in fully_shard.state(module)._fsdp_param_groups:  # type: ignore[attr-defined]  # a contract adds `state`
        group.post_backward()


def finish_backward(root: nn.Module) -> None:
    """Do what FSDP2 does at the end of a backward through its outermost module (2.13: only hooks do)."""
    fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]  # a contract adds `state`


def gathered_storages(root: nn.Module) -> Iterator[torch.UntypedStorage]:
    """Storages of gathered parameters, size 0 while released (2.13: FSDP2 shows them nowhere)."""
    for group in _groups(root):
        for parameter in group.fsdp_params:
            for tensor in parameter.all_gather_outputs:
                yield tensor.untyped_storage()


def unsharded_gradient_storages(root: nn.Module) -> Iterator[torch.UntypedStorage]:
    """Storages of gradients that wait for their reduce, whole or partial (2.13: FSDP2 shows them nowhere)."""
    for group in _groups(root):
        if group._partial_reduce_output is not None:
            yield group._partial_reduce_output.untyped_storage()
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                yield whole.grad.untyped_storage()
            if parameter.unsharded_accumulated_grad is not None:
                yield parameter.unsharded_accumulated_grad.untyped_storage()
