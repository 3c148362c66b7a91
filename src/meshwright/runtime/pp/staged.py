"""Several stages on one rank as one way to hold parameters and gradients; weights that several stages hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from meshwright.runtime.boxes import own_part
from meshwright.runtime.collectives import Traffic
from meshwright.runtime.cuts import Cuts
from meshwright.runtime.mesh import RankMesh
from meshwright.runtime.shards import Shards
from meshwright.runtime.turns import Turns
from meshwright.runtime.units import Unit
from meshwright.runtime.zero import Zero

if TYPE_CHECKING:
    from meshwright.runtime.pp.apply import PipelineParallel

__all__ = ["Shared", "StagedZero"]


class Shared:
    """A weight that stages on several ranks hold: each has a copy, and their gradients are summed.

    Args:
        name: its global name.
        first: whether this rank is the first that holds it.
        group: the ranks that hold it.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None, *, first: bool) -> None:
        self.name, self.group, self.first = name, group, first


class StagedZero(Zero):
    """The stages of one rank, each with its own units.

    Args:
        parts: by the number of the stage.
        pipeline: how the model is cut.
    """

    def __init__(
        self, parts: Mapping[int, Zero], mesh: RankMesh, cuts: Cuts, pipeline: PipelineParallel, traffic: Traffic
    ) -> None:
        self.parts = dict(parts)
        units = [unit for part in self.parts.values() for unit in part.units]
        super().__init__(units, mesh, cuts, pipeline.used)
        self._pipeline, self._traffic = pipeline, traffic
        #: Weights that other ranks hold too, in one order on all of them.
        self._shared = pipeline.shared()
        #: Weights that two stages of this rank hold: the second one's, as it is stored.
        self._copies = pipeline.second_copies()
        nested = [unit for part in self.parts.values() if isinstance(part, Shards) for unit in part.nested]
        self._turns = Turns(nested, mesh.stage_group) if nested and mesh.dp > 1 else None
        self.find_stored()
        self.refresh_copies()

    @property
    def counts_norm(self) -> bool:
        return all(part.counts_norm for part in self.parts.values())

    @property
    def moment(self) -> Callable[[], None] | None:
        """Called at moments of a step when memory is worth counting."""
        return self._moment

    @moment.setter
    def moment(self, value: Callable[[], None] | None) -> None:
        self._moment = value
        for part in self.parts.values():
            part.moment = value

    def begin_step(self) -> None:
        self.refresh_copies()
        for part in self.parts.values():
            part.begin_step()

    def before_forward(self, *, release: bool) -> None:
        raise TypeError("a stage runs forward, not all of them")  # an internal error

    def before_backward(self, *, reduce: bool, release: bool, last: bool) -> None:
        raise TypeError("a stage runs backward, not all of them")  # an internal error

    def weights(self, unit: Unit) -> list[nn.Parameter]:
        raise TypeError("a stage runs backward, not all of them")  # an internal error

    def backward_weights(
        self, run: Callable[[list[nn.Parameter]], None], *, reduce: bool, release: bool, last: bool
    ) -> None:
        raise TypeError("a stage runs backward, not all of them")  # an internal error

    def finish_reduces(self) -> None:
        for part in self.parts.values():
            part.finish_reduces()
        for name, copy in self._copies:
            gradient, own = copy().grad, self.stored[name]
            if gradient is not None:
                own.grad = gradient if own.grad is None else own.grad + gradient
                copy().grad = None
        for entry in self._shared:
            own = self.stored[entry.name]
            if not own.requires_grad:
                continue
            if own.grad is None:
                own.grad = torch.zeros_like(own)
            local = own_part(own.grad)
            if local.numel():
                self._traffic.count("all_reduce")
                dist.all_reduce(local, group=entry.group)

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {name: g for part in self.parts.values() for name, g in part.gradients().items() if name in self.stored}
        return {name: found.get(name, own_part(p.grad)) for name, p in self.stored.items() if p.grad is not None}

    def counted(self) -> dict[str, torch.Tensor]:
        elsewhere = {entry.name for entry in self._shared if not entry.first}
        return {name: gradient for name, gradient in super().counted().items() if name not in elsewhere}

    def end_step(self) -> None:
        for part in self.parts.values():
            part.end_step()
        super().end_step()

    def begin_evaluation(self) -> None:
        self.refresh_copies()
        for part in self.parts.values():
            part.begin_evaluation()
        if self._turns is not None and self._releases:
            self._turns.begin()

    def end_evaluation(self, *, help_others: bool) -> None:
        if self._turns is not None and self._releases:
            self._turns.end(help_others=help_others)
        for part in self.parts.values():
            part.end_evaluation(help_others=help_others)

    def find_stored(self) -> None:
        for part in self.parts.values():
            part.find_stored()
        names = set(self.used.names)
        self.stored = {name: p for part in self.parts.values() for name, p in part.stored.items() if name in names}

    def everything(self) -> dict[str, torch.Tensor]:
        return {name: self.stored.get(name, whole) for name, whole in self._pipeline.assignment.whole.items()}

    def holder(self, name: str) -> int:
        return self._pipeline.assignment.rank_of(name)

    def holds(self, name: str) -> bool:
        return self._pipeline.assignment.has(name, self.mesh.pp_rank)

    def first_names(self, model: nn.Module) -> dict[str, str]:
        return self._pipeline.assignment.first_names

    def refresh_copies(self) -> None:
        """Give second copies on this rank the values of the first."""
        with torch.no_grad():
            for name, copy in self._copies:
                own_part(copy()).copy_(own_part(self.stored[name]))

    def gathered_storages(self) -> list[torch.UntypedStorage]:
        return list(chain.from_iterable(part.gathered_storages() for part in self.parts.values()))

    def gradient_storages(self) -> list[torch.UntypedStorage]:
        return list(chain.from_iterable(part.gradient_storages() for part in self.parts.values()))

    @property
    def _releases(self) -> bool:
        return any(isinstance(part, Shards) and part.releases for part in self.parts.values())
