"""What measurements keep of tensors: their form without values, and their storages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from meshwright.runtime._torch import storage_key

__all__ = ["Storages", "TensorForm", "bytes_of", "storages_of", "tensor_bytes"]

Storages = dict[int, torch.UntypedStorage]


class TensorForm(NamedTuple):
    """All of a tensor but its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        """The form of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, *, filled: bool = False) -> torch.Tensor:
        """A new tensor of this form, a leaf of the autograd graph.

        Its values are arbitrary, or `filled` with normal random numbers, and with zeros and ones where they are whole.
        """
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        if filled and self.dtype.is_floating_point:
            made.normal_()
        elif filled:
            made.random_(0, 2)
        return made.requires_grad_(self.requires_grad)


def storages_of(tensors: Iterable[torch.Tensor]) -> Storages:
    """The storages of tensors by identity, each once. They are held, so that no identity is given twice."""
    found: Storages = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:  # a sparse tensor has no storage of its own
            storage = tensor.untyped_storage()
            found[storage_key(storage)] = storage
    return found


def bytes_of(storages: Storages) -> int:
    """Bytes of storages."""
    return sum(storage.nbytes() for storage in storages.values())


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements of different tensors."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
