"""ZeRO-1/2/3 and hybrid sharding: FSDP2 on every unit, its gathers, reduces and releases ruled by the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from meshwright.errors import ConfigError
from meshwright.runtime._torch import (
    finish_backward,
    gathered_storages,
    make_root,
    mark_managed,
    reduce_unit,
    unsharded_gradient_storages,
    unsharded_parameters,
    use_explicit_gathers,
)
from meshwright.runtime.collectives import CountedAllGather, CountedReduceScatter, Traffic
from meshwright.runtime.cuts import Cuts
from meshwright.runtime.mesh import RankMesh
from meshwright.runtime.same_order import SameOrder
from meshwright.runtime.tensors import hidden_gradients, map_values
from meshwright.runtime.turns import Turns
from meshwright.runtime.units import Unit
from meshwright.runtime.zero import Used, Zero
from meshwright.spec import shard_dim

__all__ = ["Shards"]


class Shards(Zero):
    """Sharded units over a mesh with the dimension `dp_shard`, or `dp_replicate` x `dp_shard` for hybrid sharding.

    Sums only: FSDP2's own division by the world size is switched off on every unit (its setters do not recurse), since
    gradients are divided once, by the global weight of the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        mesh: RankMesh,
        cuts: Cuts,
        *,
        zero: int,
        prefetch: int,
        compute_dtype: torch.dtype,
        stored_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        traffic: Traffic,
        host: dist.ProcessGroup | None,
        used: Used | None = None,
    ) -> None:
        super().__init__(units, mesh, cuts, used)
        if mesh.shard is None:
            raise TypeError("nothing is sharded")  # an internal error: `Replicas` serves then
        self._traffic = traffic
        self._mesh = mesh.shard
        self._zero = zero
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype if compute_dtype != stored_dtype else None,
            reduce_dtype=reduce_dtype if reduce_dtype != compute_dtype else None,
            cast_forward_inputs=False,
        )
        group = self._mesh.size(self._mesh.ndim - 1)
        options = {
            "mesh": self._mesh,
            "reshard_after_forward": zero == 3,
            "mp_policy": policy,
            "shard_placement_fn": lambda parameter: Shard(shard_dim(tuple(parameter.shape), group)),
        }
        nested = [unit for unit in units if unit.modules != (model,)]
        for module in {model, *(module for unit in nested for module in unit.modules)}:
            module.register_forward_hook(_seen_by_autograd)
        for unit in nested:
            fully_shard(list(unit.modules) if len(unit.modules) > 1 else unit.modules[0], **options)  # type: ignore[call-overload]
        fully_shard(model, **options)  # type: ignore[call-overload]
        self._root = model
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._sharded:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            module.set_custom_all_gather(CountedAllGather(traffic))
            module.set_custom_reduce_scatter(CountedReduceScatter(traffic))
            if "dp_replicate" in (self._mesh.mesh_dim_names or ()):
                module.set_all_reduce_hook(lambda _: traffic.count("all_reduce"))
        self._fsdp.set_reduce_scatter_unused_params(True)
        use_explicit_gathers(self._fsdp)
        self._order, self._prefetch = [unit.modules[0] for unit in nested], prefetch
        self._plan_prefetch(prefetch)
        self.nested = nested
        #: None where this is one of several stages: they take turns together, and run what their cut says.
        self._turns = None if used is not None else Turns(nested, host)
        self._order_watch = None if used is not None else SameOrder(model, nested, host)
        self._stepped = False
        # What FSDP2 was told last in this step: it goes through all modules each time.
        self._forward_as: bool | None = None
        self._backward_as: tuple[bool, bool, bool] | None = None
        self._seen: set[int] = set()
        self._arrived: dict[str, int] = {}
        for unit in units:
            for part in unit.modules:
                part.register_forward_pre_hook(lambda module, args, unit=unit: self._gathered(unit))
                part.register_forward_hook(lambda module, args, output: self._note(), prepend=True)

    @property
    def _fsdp(self) -> FSDPModule:
        return self._root  # type: ignore[return-value]  # fully_shard makes it one

    @property
    def counts_norm(self) -> bool:
        return "dp_replicate" not in (self._mesh.mesh_dim_names or ()) or self._mesh.get_local_rank("dp_replicate") == 0

    @property
    def releases(self) -> bool:
        """Whether parameters are not whole between their uses."""
        return self._zero == 3

    def begin_step(self) -> None:
        self.used.clear()
        self._forward_as = self._backward_as = None
        if not self._stepped and self._order_watch is not None:
            self._order_watch.begin()
        self._traffic.buffer_moment = self.moment

    def before_forward(self, *, release: bool) -> None:
        if self._forward_as != release:
            for module in self._sharded:
                module.set_reshard_after_forward(release, recurse=False)
            self._forward_as = release

    def before_backward(self, *, reduce: bool, release: bool, last: bool) -> None:
        self._arrived = {}
        self._begun.clear()
        self.used.begin_backward()
        if self._backward_as != (reduce, release, last):
            self._fsdp.set_is_last_backward(last)
            self._fsdp.set_requires_gradient_sync(reduce)
            self._fsdp.set_requires_all_reduce(last)
            self._fsdp.set_reshard_after_backward(release)
            self._backward_as = (reduce, release, last)

    def weights(self, unit: Unit) -> list[nn.Parameter]:
        return [parameter for parameter in unsharded_parameters(unit.modules[0]) if parameter.requires_grad]

    def backward_weights(
        self, run: Callable[[list[nn.Parameter]], None], *, reduce: bool, release: bool, last: bool
    ) -> None:
        self.before_backward(reduce=reduce, release=release, last=last)
        for unit in reversed(self.units):
            _fsdp_module(unit.modules[0]).unshard()
            run(self.weights(unit))
            reduce_unit(unit.modules[0])
        finish_backward(self._root)

    def finish_reduces(self) -> None:
        """Backward has waited for its reduces."""
        self._stepped = True

    def end_step(self) -> None:
        if self._order_watch is not None:
            self._order_watch.end()
        super().end_step()

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self.stored.items():
            if parameter.grad is not None:
                found[name] = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        return found

    def begin_evaluation(self) -> None:
        self._plan_prefetch(0)
        self._forward_as = None
        self.before_forward(release=self._zero == 3)
        make_root(self._fsdp)
        mark_managed(self._root, False)
        for module in self._sharded if self._zero < 3 else [self._fsdp]:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        if self._zero == 3 and self._turns is not None:
            self._turns.begin()

    def end_evaluation(self, *, help_others: bool) -> None:
        if self._zero == 3 and self._turns is not None:
            self._turns.end(help_others=help_others)
        self._fsdp.reset_iter_state()  # a forward of a part, or one that raised, would be taken for one that goes on
        for module in self._sharded:
            module.reshard()
        mark_managed(self._root, True)
        self._plan_prefetch(self._prefetch)

    def gathered_storages(self) -> list[torch.UntypedStorage]:
        return [*gathered_storages(self._root), *self._traffic.gather_buffers.keys()]

    def gradient_storages(self) -> list[torch.UntypedStorage]:
        reduced = (tensor.untyped_storage() for tensor in self.gradients().values())
        in_flight = (buffer.untyped_storage() for buffer in self._traffic.reduce_buffers)
        return list(chain(reduced, unsharded_gradient_storages(self._root), in_flight))

    def _plan_prefetch(self, prefetch: int) -> None:
        """Which units each unit gathers ahead, in both directions; a list with the unit itself means none."""
        order = self._order
        for index, module in enumerate(order):
            ahead = order[index + 1 : index + 1 + prefetch]
            behind = order[max(0, index - prefetch) : index][::-1]
            _fsdp_module(module).set_modules_to_forward_prefetch([_fsdp_module(m) for m in ahead])
            _fsdp_module(module).set_modules_to_backward_prefetch([_fsdp_module(m) for m in behind or [module]])
        first, last = order[:prefetch], order[::-1][:prefetch]
        self._fsdp.set_modules_to_forward_prefetch([_fsdp_module(m) for m in first])
        self._fsdp.set_modules_to_backward_prefetch([_fsdp_module(m) for m in last or [self._root]])

    def _gathered(self, unit: Unit) -> None:
        """A unit is whole: watch which of its parameters get gradients (once for each gathered parameter object)."""
        self._note()
        if not torch.is_grad_enabled():
            return
        count = sum(self.stored[name].requires_grad for name in unit.parameters)
        for name in unit.parameters:
            parameter = self.parameter(unit, name)
            if id(parameter) not in self._seen and parameter.requires_grad and not isinstance(parameter, DTensor):
                self._seen.add(id(parameter))
                parameter.register_hook(lambda _, name=name: self._got_gradient(unit, name, count))

    def _got_gradient(self, unit: Unit, name: str, count: int) -> None:
        self.used.mark(name)
        self._arrived[unit.name] = self._arrived.get(unit.name, 0) + 1
        if self._begins(unit, name) or self._arrived[unit.name] in (1, count):
            self._note()


def _seen_by_autograd(module: nn.Module, args: object, output: Any) -> Any:
    """Let FSDP2's hooks reach every output: without them a unit is not gathered for its backward.

    Views are copied, since an in-place operation on one would lose the hook.

    Raises:
        ConfigError: there are outputs inside an object that FSDP2 does not look into.
    """
    if not torch.is_grad_enabled():
        return output
    if hidden := hidden_gradients(output):
        raise ConfigError(
            f"a {type(module).__name__} returns tensors inside a {hidden[0]}",
            why="sharded units hook the tensors of their outputs, and find those in tuples, lists, dicts, dataclasses",
            fix="return one of these from it, or use zero=0",
        )
    views: list[bool] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        views.append(tensor.requires_grad and tensor._base is not None)
        return tensor.clone() if views[-1] else tensor

    copied = map_values(look, output)
    return copied if any(views) else output


def _fsdp_module(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise TypeError(f"{type(module).__name__} is not sharded")  # an internal error: every unit has been sharded
    return module
