"""Units that some ranks run and others do not: told in the first step, where a gather would wait for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from meshwright.errors import ConfigError
from meshwright.runtime.units import Unit

__all__ = ["SameOrder"]


class SameOrder:
    """Before each unit's forward and at the end of the model's, ranks compare where they are, while it watches.

    A comparison is an all-reduce of two numbers on the host; the model's own numbers are not touched.

    Args:
        root: the model.
        units: its sharded units but the root unit.
        group: over which all ranks compare; None for the default group, on CPUs.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit], group: dist.ProcessGroup | None) -> None:
        self._root, self._units, self._group = root, list(units), group
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        """Watch from here on, on all ranks."""
        for index, unit in enumerate(self._units):
            for module in unit.modules:
                self._handles.append(
                    module.register_forward_pre_hook(lambda m, args, index=index: self._compare(index), prepend=True)
                )
        self._handles.append(self._root.register_forward_hook(self._at_the_end))

    def end(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _at_the_end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._compare(len(self._units))

    def _compare(self, here: int) -> None:
        ends = torch.tensor([here, -here])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._group)
        furthest, nearest = int(ends[0]), -int(ends[1])
        if furthest != nearest:
            raise ConfigError(
                f"some ranks run {self._name(nearest)} where others are at {self._name(furthest)}",
                why="ZeRO gathers a unit on all ranks at once, so every rank must run the same units in the same order",
                fix="name the modules that all ranks run as blocks (blocks=[...]), the one around experts or branches "
                "for example, or use zero=0",
            )

    def _name(self, index: int) -> str:
        return f"unit {self._units[index].name}" if index < len(self._units) else "the end of the model's forward"
