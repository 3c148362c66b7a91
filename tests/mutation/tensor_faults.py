"""Faults of tensor parallelism, to be injected like those of `faults.py`."""

from __future__ import annotations

from typing import Any

import torch

from meshwright.runtime.seeds import SplitStreams
from meshwright.runtime.tp import apply
from meshwright.runtime.tp.communicate import Wire
from meshwright.runtime.tp.heads import Heads
from meshwright.runtime.zero import Zero
from tests.mutation.faults import fault, replace

__all__: list[str] = []


@fault
def shares_not_summed() -> None:
    """Gradients of norms on cut sequences, and of copied heads, stay those of each rank."""
    replace(apply, "sum_shares", lambda original: lambda gradients, cuts, wire: None)


@fault
def partial_results_not_summed() -> None:
    """Each rank goes on with its own part of a rowwise product."""
    replace(Wire, "leave", lambda original: lambda self, x: x)


@fault
def input_gradients_not_summed() -> None:
    """What divided matrices send back stays each rank's own part."""
    replace(Wire, "enter", lambda original: lambda self, x: x)


@fault
def replicated_counted_twice() -> None:
    """The norm counts what all tensor-parallel ranks hold once for each."""
    replace(Zero, "counted", lambda original: lambda self: self.gradients())


@fault
def padding_not_masked() -> None:
    """The rows that pad a vocabulary are logits like the others."""

    def make_divide(original: Any) -> Any:
        def divide(*args: Any, **kwargs: Any) -> Any:
            sharding = original(*args, **kwargs)
            for name, entry in sharding.styles.items():
                if entry.style == "vocab":
                    sharding.widths[name] = [max(sharding.widths[name])] * len(sharding.widths[name])
            return sharding

        return divide

    replace(apply, "divide", make_divide)


@fault
def same_mask_on_divided_activations() -> None:
    """Ranks drop the same places of their own heads and channels."""
    replace(SplitStreams, "divide", lambda original: lambda self, name: None)


@fault
def wrong_head_for_a_query() -> None:
    """Queries read the key/value heads in turn."""
    replace(Heads, "selected", lambda original: lambda self, rank: [head % self.groups for head in range(self.local)])


@fault
def bias_added_by_every_rank() -> None:
    """A rowwise bias is part of what is summed."""

    def make(original: Any) -> Any:
        def leave_rows(module: Any, wire: Any, streams: Any, **options: Any) -> None:
            original(module, wire, streams, **options)
            if module.bias is not None:
                once, own = module.forward, module.bias
                module.forward = lambda x: once(x) + own * (wire.size - 1)

        return leave_rows

    replace(apply, "leave_rows", make)


@fault
def tokens_in_other_order() -> None:
    """A gathered sequence is put together from the last rank's part on."""

    def make(original: Any) -> Any:
        def gathered(self: Wire, part: torch.Tensor, length: int) -> torch.Tensor:
            return original(self, part, length).roll(1, dims=1)

        return gathered

    replace(Wire, "gathered", make)
