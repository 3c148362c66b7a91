"""ZeRO-0: whole parameters on every rank, gradients in one flat bucket per unit, all-reduced while backward goes on.

Where there is nobody to reduce with, gradients stay where backward makes them: there are no buckets to fill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from meshwright.runtime.collectives import Traffic
from meshwright.runtime.cuts import Cuts
from meshwright.runtime.mesh import RankMesh
from meshwright.runtime.precision import ComputeCopies
from meshwright.runtime.units import Unit
from meshwright.runtime.zero import Used, Zero

__all__ = ["Bucket", "Replicas"]


class Bucket:
    """The gradients of one unit in one flat tensor; each stored parameter's `.grad` is a view of it.

    They are summed over microbatches as they are stored, and over ranks in `reduce_dtype`.

    Args:
        parameters: the stored ones of the unit, by global name.
        flat: without it nothing is reduced, and each gradient is a tensor of its own.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], *, flat: bool) -> None:
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.ready = 0
        self.work: dist.Work | None = None
        first = next(iter(self.parameters.values()), None) if flat else None
        size = sum(p.numel() for p in self.parameters.values())
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device) if first is not None else torch.zeros(0)
        self.wire = self.flat
        offset = 0
        for parameter in self.parameters.values() if flat else ():
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def storages(self) -> list[torch.UntypedStorage]:
        """Of its gradients, and of what is being sent."""
        found = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        return [gradient.untyped_storage() for gradient in (found if self.work is None else [*found, self.wire])]

    def arrived(self) -> bool:
        """One more gradient is whole; whether it was the unit's last."""
        self.ready += 1
        return self.ready == len(self.parameters)

    def launch(self, traffic: Traffic, reduce_dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        """Start the all-reduce over the data-parallel ranks."""
        with traffic.timed("all_reduce"):
            self.wire = self.flat.to(reduce_dtype)  # itself, where that is how it is stored
            self.work = dist.all_reduce(self.wire, group=group, async_op=True)

    def finish(self) -> None:
        """Wait for the all-reduce, if it was started."""
        if self.work is not None:
            self.work.wait()
            if self.wire is not self.flat:
                self.flat.copy_(self.wire)
            self.work, self.wire = None, self.flat

    def complete(self) -> None:
        """Zeros for what no backward has reached on this rank; others may have."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class Replicas(Zero):
    """Own bucket reducer. All ranks launch the buckets in the same fixed order, whatever each rank's backward does."""

    def __init__(
        self,
        units: Sequence[Unit],
        mesh: RankMesh,
        cuts: Cuts,
        *,
        compute_dtype: torch.dtype,
        stored_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        traffic: Traffic,
        used: Used | None = None,
    ) -> None:
        super().__init__(units, mesh, cuts, used)
        self._traffic = traffic
        self._reduce_dtype, self._narrow = reduce_dtype, reduce_dtype != stored_dtype
        self.find_stored()
        self._copies = ComputeCopies(units, compute_dtype) if compute_dtype != stored_dtype else None
        self._context = ExitStack()
        self._buckets: list[Bucket] = []
        self._launched = 0
        self._reducing = False
        #: Parameters that other stages of this rank use too: they are reduced when all stages are done.
        self.late: set[str] = set()
        if self._copies is None:
            self._watch(self.stored)

    @property
    def counts_norm(self) -> bool:
        return self.mesh.dp_rank == 0

    def begin_step(self) -> None:
        self.used.clear()
        self._launched, self._reducing = 0, False
        self._buckets = [
            Bucket({n: self.stored[n] for n in unit.parameters}, flat=self.mesh.dp > 1) for unit in reversed(self.units)
        ]
        if self._copies is not None:
            self._watch(self._context.enter_context(self._copies))
        self._note()

    def before_forward(self, *, release: bool) -> None:
        """Nothing to gather: parameters are whole."""

    def before_backward(self, *, reduce: bool, release: bool, last: bool) -> None:
        self._reducing = reduce
        self._begun.clear()
        self.used.begin_backward()
        for bucket in self._buckets:
            bucket.ready = 0

    def weights(self, unit: Unit) -> list[nn.Parameter]:
        computed = self._copies.copies if self._copies is not None else self.stored
        return [computed[name] for name in unit.parameters if computed[name].requires_grad]

    def backward_weights(
        self, run: Callable[[list[nn.Parameter]], None], *, reduce: bool, release: bool, last: bool
    ) -> None:
        self.before_backward(reduce=reduce, release=release, last=last)
        for unit in reversed(self.units):
            run(self.weights(unit))

    def finish_reduces(self) -> None:
        if self._reducing:
            self._launch_ready(all_of_them=True)
            for bucket in self._buckets:
                bucket.finish()
                bucket.complete()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for bucket in self._buckets for name, p in bucket.parameters.items() if p.grad is not None}

    def end_step(self) -> None:
        self._context.close()
        super().end_step()
        self._buckets = []

    def begin_evaluation(self) -> None:
        if self._copies is not None:
            self._context.enter_context(self._copies)

    def end_evaluation(self, *, help_others: bool) -> None:
        self._context.close()

    def gathered_storages(self) -> list[torch.UntypedStorage]:
        copies = self._copies.copies.values() if self._copies is not None else ()
        return [copy.untyped_storage() for copy in copies]

    def gradient_storages(self) -> list[torch.UntypedStorage]:
        return [storage for bucket in self._buckets for storage in bucket.storages()]

    def _watch(self, computed: dict[str, nn.Parameter]) -> None:
        """Hear of every gradient of the parameters that are computed with."""
        for index, unit in enumerate(reversed(self.units)):
            for name in unit.parameters:
                if computed[name].requires_grad:
                    computed[name].register_post_accumulate_grad_hook(partial(self._arrived, name=name, index=index))

    def _arrived(self, parameter: torch.Tensor, name: str, index: int) -> None:
        if not self._buckets:
            return
        bucket = self._buckets[index]
        self.used.mark(name)
        if self._copies is not None and parameter.grad is not None:
            whole = bucket.parameters[name]
            if whole.grad is None:
                whole.grad = parameter.grad.to(whole.dtype)
            else:
                whole.grad.add_(parameter.grad)
            parameter.grad = None
        elif parameter.grad is not None and parameter.grad.layout != torch.strided:
            parameter.grad = parameter.grad.to_dense()
        last = bucket.arrived()
        if self._begins(self.units[-1 - index], name) or bucket.ready == 1 or last:
            self._note()
        if last and self._reducing and self.mesh.dp > 1:
            self._launch_ready()

    def _launch_ready(self, *, all_of_them: bool = False) -> None:
        while self.mesh.dp > 1 and self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            if not all_of_them and (bucket.ready < len(bucket.parameters) or self.late & bucket.parameters.keys()):
                return
            if bucket.parameters:
                if self._narrow:  # one copy to send at a time
                    for earlier in self._buckets[: self._launched]:
                        earlier.finish()
                bucket.launch(self._traffic, self._reduce_dtype, self.mesh.dp_group)
                self._note()
            self._launched += 1
