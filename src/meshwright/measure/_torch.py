"""Private PyTorch interfaces that tracing needs, each with the reason why there is no other way. Checked with 2.13."""

from __future__ import annotations

from typing import Any

import torch

# Tensors with shapes but no data, and what they raise when a model asks for data. The module has no public name (2.13).
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

# Raised when a number that depends on data decides a branch; its module has no public name (2.13).
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

# Sees every operation; its module has no public name (2.13).
from torch.utils._python_dispatch import TorchDispatchMode

# Flops per operation: `register_flop_formula` is public, reading the table is not (2.13).
from torch.utils.flop_counter import flop_registry

__all__ = ["NEEDS_DATA", "FakeTensorMode", "TorchDispatchMode", "flop_registry", "node_number", "running_node"]

#: Errors that say: this operation cannot run without the data of its tensors.
NEEDS_DATA: tuple[type[BaseException], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    NotImplementedError,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


def node_number() -> int:
    """A number above those of all autograd nodes made before, in this thread (2.13: only nodes tell theirs)."""
    node = torch.zeros((), requires_grad=True).clone().grad_fn
    if node is None:
        raise RuntimeError("a clone has no history")  # an internal error: gradients are enabled where this is called
    return node._sequence_nr()


def running_node() -> tuple[int, str] | None:
    """Number and name of the autograd node whose backward runs (2.13: operations in a backward do not tell theirs)."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else (node._sequence_nr(), node.name())
