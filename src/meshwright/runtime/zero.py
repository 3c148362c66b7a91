"""ZeRO: how a rank holds parameters and gradients, as one interface with two ways.

`Replicas` (ZeRO-0, and shard groups of one) keeps all whole and all-reduces flat buckets; `Shards` (ZeRO-1/2/3, hybrid
sharding) puts FSDP2 under the control of a schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn

from meshwright.errors import ConfigError
from meshwright.runtime.boxes import Held
from meshwright.runtime.cuts import Cuts
from meshwright.runtime.mesh import RankMesh
from meshwright.runtime.units import Unit

__all__ = ["Used", "Zero"]


class Used:
    """Which parameters took part in a backward pass of this step on this rank, in a fixed order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._index = {name: i for i, name in enumerate(self.names)}
        self._used: set[int] = set()
        self._arrived: set[int] = set()
        #: Whether the microbatch that runs backward counts: one without rows uses no parameter.
        self.counting = True

    @property
    def flags(self) -> torch.Tensor:
        """By parameter 1 where it took part, else 0."""
        found = torch.zeros(len(self.names), dtype=torch.float64)
        found[list(self._used)] = 1.0
        return found

    def add_copy(self, name: str, of: str) -> None:
        """A name under which a second copy of a parameter is known on this rank."""
        self._index[name] = self._index[of]

    def mark(self, name: str) -> None:
        """The parameter has received its gradient of the microbatch that runs backward.

        Raises:
            ConfigError: it has received one in this backward already.
        """
        index = self._index[name]
        if self.counting:
            self._used.add(index)
        if index in self._arrived:
            raise ConfigError(
                f"parameter {name} received its gradient twice in one backward pass",
                why="reentrant checkpointing runs a backward inside the backward: reduces would start too early",
                fix="checkpoint with use_reentrant=False, or let the strategy do it: recompute=full",
            )
        self._arrived.add(index)

    def begin_backward(self) -> None:
        """Another microbatch runs backward."""
        self._arrived.clear()

    def clear(self) -> None:
        """A new step."""
        self._used.clear()
        self._arrived.clear()


class Zero(ABC):
    """What the engine asks of a way to hold parameters and gradients."""

    def __init__(self, units: Sequence[Unit], mesh: RankMesh, cuts: Cuts, used: Used | None = None) -> None:
        self.units = list(units)
        self.mesh = mesh
        #: How parameters lie over the tensor-parallel ranks; one without an entry is whole on each.
        self.cuts = cuts
        #: Of all stages, where this is one of several.
        self.used = used if used is not None else Used([name for unit in units for name in unit.parameters])
        self.stored: dict[str, nn.Parameter] = {}
        #: Called at moments of a step when memory is worth counting; None when nobody counts.
        self.moment: Callable[[], None] | None = None
        #: Units of which a matrix has got its gradient in this backward.
        self._begun: set[str] = set()

    @property
    @abstractmethod
    def counts_norm(self) -> bool:
        """Whether this rank's gradients enter the global norm: each element must enter once over all ranks."""

    @abstractmethod
    def begin_step(self) -> None:
        """Before the first microbatch."""

    @abstractmethod
    def before_forward(self, *, release: bool) -> None:
        """Before a microbatch's forward; `release`: its units are released after use."""

    @abstractmethod
    def before_backward(self, *, reduce: bool, release: bool, last: bool) -> None:
        """Before a microbatch's backward: whether its gradients are reduced, its units released, and it is the last."""

    @abstractmethod
    def weights(self, unit: Unit) -> list[nn.Parameter]:
        """The trainable parameters of a unit as autograd knows them in this step."""

    @abstractmethod
    def backward_weights(
        self, run: Callable[[list[nn.Parameter]], None], *, reduce: bool, release: bool, last: bool
    ) -> None:
        """The half of a backward that makes the gradients of weights: `run` makes those of a unit, last unit first."""

    @abstractmethod
    def finish_reduces(self) -> None:
        """After the last backward: all reduces have ended and `gradients()` are whole sums."""

    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's reduced gradients by global name, as plain local tensors."""

    def counted(self) -> dict[str, torch.Tensor]:
        """Those of `gradients()` that this rank adds to the global norm: of what several hold, the first one's."""
        rank, cuts = self.mesh.tp_rank, self.cuts
        return {n: g for n, g in self.gradients().items() if n not in cuts or cuts[n].holders(rank)[0] == rank}

    def drop_unused(self, used: torch.Tensor) -> list[str]:
        """Take the gradient away from parameters that no rank used (0 in `used`); their names."""
        unused, parameters = [], self.everything()
        for flag, name in zip(used.tolist(), self.used.names, strict=True):
            parameter = parameters[name]
            if not flag and parameter.requires_grad:
                parameter.grad = None
                unused.append(name)
        return unused

    def end_step(self) -> None:
        """After the optimizer: nothing of the step stays in memory."""
        for parameter in self.stored.values():
            parameter.grad = None

    @abstractmethod
    def begin_evaluation(self) -> None:
        """Before forward passes without backward, in any number on each rank; all ranks together."""

    @abstractmethod
    def end_evaluation(self, *, help_others: bool) -> None:
        """After them: nothing stays gathered. `help_others`: return when all ranks are, gathering what they need."""

    def find_stored(self) -> None:
        """Look up the stored parameters (by global name, in the order of units) while nothing is gathered."""
        self.stored = {name: self.parameter(unit, name) for unit in self.units for name in unit.parameters}

    def everything(self) -> dict[str, torch.Tensor]:
        """Every parameter of the model by global name, in one order on all ranks: as this rank stores it, or without
        values and in its whole shape where only other pipeline ranks hold it."""
        return dict(self.stored)

    def holder(self, name: str) -> int:
        """The pipeline rank that speaks for a parameter or buffer."""
        return 0

    def holds(self, name: str) -> bool:
        """Whether a parameter or buffer of that name has its values on this rank."""
        return True

    def first_names(self, model: nn.Module) -> dict[str, str]:
        """Every name of every parameter, to its first one."""
        prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
        return {
            prefixes[id(owner.module)] + owner.name: name
            for unit in self.units
            for name, where in unit.parameters.items()
            for owner in where
        }

    def point_to_stored(self) -> None:
        """Hang each parameter, as it is stored, everywhere where it hung: sharding changes it in its unit's modules."""
        for unit in self.units:
            for name, where in unit.parameters.items():
                for owner in where[1:]:
                    setattr(owner.module, owner.name, self.parameter(unit, name))

    def held(self, name: str, tensor: torch.Tensor) -> Held:
        """A tensor that lies as the parameter or buffer of that name does: itself, its gradient, a state of it.

        Of what only other pipeline ranks have, `everything()` gives one in its whole shape.
        """
        cut = self.cuts.get(name) if not tensor.is_meta else None
        return Held(tensor.detach(), cut, self.mesh.tp_rank, self.holder(name))

    @abstractmethod
    def gathered_storages(self) -> list[torch.UntypedStorage]:
        """Storages of parameters that are only there for computing."""

    @abstractmethod
    def gradient_storages(self) -> list[torch.UntypedStorage]:
        """Storages of gradients, whole, partial or reduced, and of reduces in flight."""

    def _begins(self, unit: Unit, name: str) -> bool:
        """Whether a gradient is that of a unit's first matrix. A bias may get its own before the unit has computed
        again what it needs; a matrix does not."""
        if unit.name in self._begun or self.stored[name].dim() < 2:
            return False
        self._begun.add(unit.name)
        return True

    def _note(self) -> None:
        if self.moment is not None:
            self.moment()

    @staticmethod
    def parameter(unit: Unit, name: str) -> nn.Parameter:
        """The parameter that stands in its place now."""
        owner = unit.parameters[name][0]
        found: nn.Parameter = getattr(owner.module, owner.name)
        return found
