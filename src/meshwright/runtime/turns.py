"""Forwards that differ from rank to rank over sharded units: ranks agree before every gather which unit it is of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from meshwright.runtime.units import Unit

__all__ = ["Turns"]


class Turns:
    """While it is in force, ranks may run any forwards in any number: generation and evaluation of unequal lengths.

    A rank that comes to a unit says so and helps with the gathers of others until the agreed one is its own; a rank
    that is done helps until all are. Of the units that are asked for the first in order is gathered, so that each round
    lets at least one rank go on. A round costs one all-reduce of one number on the host.

    Args:
        units: the sharded units but the root unit, which stays gathered.
        group: over which all ranks agree; None for the default group, on CPUs.
    """

    def __init__(self, units: Sequence[Unit], group: dist.ProcessGroup | None) -> None:
        self._units, self._group = list(units), group
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        """From here on forwards ask before they gather. All ranks enter together."""
        for index, unit in enumerate(self._units):
            for module in unit.modules:
                self._handles.append(
                    module.register_forward_pre_hook(lambda module, args, index=index: self._ask(index), prepend=True)
                )

    def end(self, *, help_others: bool) -> None:
        """This rank is done; with `help_others` it returns when all ranks are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if help_others:
            self._ask(len(self._units))

    def _ask(self, wanted: int) -> None:
        if wanted < len(self._units) and self._whole(wanted):
            return
        while True:
            said = torch.tensor(wanted)
            dist.all_reduce(said, op=dist.ReduceOp.MIN, group=self._group)
            agreed = int(said)
            if agreed == len(self._units):
                return
            whole, module = self._whole(agreed), self._module(agreed)
            module.reshard()  # where it is whole on this rank: its gather is everybody's
            module.unshard()
            if agreed == wanted:
                return
            if not whole:
                module.reshard()

    def _module(self, index: int) -> FSDPModule:
        module: nn.Module = self._units[index].modules[0]
        assert isinstance(module, FSDPModule)
        return module

    def _whole(self, index: int) -> bool:
        owner = next(iter(self._units[index].parameters.values()))[0]
        return not isinstance(getattr(owner.module, owner.name), DTensor)
