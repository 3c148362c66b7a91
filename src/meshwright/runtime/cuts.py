"""Cuts: which slices of a whole parameter each tensor-parallel rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

__all__ = ["Cut", "Cuts", "Segment", "even_segments"]

#: (start, length) along the cut dim of the whole tensor.
Segment = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """How one parameter lies over the tensor-parallel ranks: along one dim, each holds some segments side by side.

    Several segments are the parts of fused weights (queries, keys and values; gate and up). Ranks with equal segments
    hold copies: replicated weights, and key/value heads where there are fewer than ranks. `length - sum of segments`
    elements at the end of a local tensor are padding, no part of the whole one, and zero.

    Attributes:
        shape: of the whole parameter.
        dim: along which it is cut.
        segments: of each rank, in the order in which they lie in its local tensor.
        length: of the local tensors along `dim`, one for each rank.
        partial: each copy's gradient is only a share, and they are summed over the ranks that hold the same.
    """

    shape: tuple[int, ...]
    dim: int
    segments: tuple[tuple[Segment, ...], ...]
    length: tuple[int, ...]
    partial: bool = False

    @classmethod
    def whole(cls, shape: Sequence[int], ranks: int, *, partial: bool = False) -> Cut:
        """A replicated parameter (a scalar has no segments and no dim)."""
        size = shape[0] if shape else 0
        segments = ((0, size),) if shape else ()
        return cls(tuple(shape), 0, (segments,) * ranks, (size,) * ranks, partial)

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        dim: int,
        segments: Sequence[Sequence[Segment]],
        *,
        length: int | None = None,
        partial: bool = False,
    ) -> Cut:
        """A cut by segments; `length`: that of every local tensor where some are padded."""
        sizes = tuple(sum(size for _, size in own) if length is None else length for own in segments)
        return cls(tuple(shape), dim, tuple(tuple(own) for own in segments), sizes, partial)

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all of it."""
        return all(own == () or own == ((0, self.shape[self.dim]),) for own in self.segments) if self.shape else True

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape that a rank holds."""
        if not self.shape:
            return ()
        return (*self.shape[: self.dim], self.length[rank], *self.shape[self.dim + 1 :])

    def holders(self, rank: int) -> list[int]:
        """The ranks that hold the same as this one, itself among them; the first of them speaks for all."""
        return [other for other, own in enumerate(self.segments) if own == self.segments[rank]]

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's local tensor of a whole one, as memory of its own."""
        if not self.shape:
            return whole.clone()
        local = torch.zeros(self.local_shape(rank), dtype=whole.dtype, device=whole.device)
        for own, there in self.places(rank):
            local.narrow(self.dim, own.start, own.stop - own.start).copy_(
                whole.narrow(self.dim, there.start, there.stop - there.start)
            )
        return local

    def places(self, rank: int) -> list[tuple[slice, slice]]:
        """For each segment of a rank: where it lies along the dim in the local tensor, and where in the whole one."""
        found, at = [], 0
        for start, size in self.segments[rank]:
            found.append((slice(at, at + size), slice(start, start + size)))
            at += size
        return found

    def first_places(self, rank: int) -> list[tuple[slice, slice]]:
        """As `places`, without what a rank before this one holds too: over all ranks, every element once."""
        earlier = sorted(segment for own in self.segments[:rank] for segment in own)
        return [
            (slice(start - there.start + here.start, stop - there.start + here.start), slice(start, stop))
            for here, there in self.places(rank)
            for start, stop in _without(earlier, there)
        ]


def _without(taken: Sequence[Segment], span: slice) -> Iterator[tuple[int, int]]:
    """What is left of a span, as starts and stops, without segments that are sorted by their starts."""
    start = span.start
    for begin, size in taken:
        if begin >= span.stop:
            break
        if begin > start:
            yield start, begin
        start = max(start, begin + size)
    if start < span.stop:
        yield start, span.stop


Cuts = Mapping[str, Cut]


def even_segments(total: int, ranks: int, *, start: int = 0, step: int = 1) -> list[Segment]:
    """`total` elements from `start` on as one segment a rank, in multiples of `step`: the first ones get one more where
    it does not divide."""
    share, more = divmod(total // step, ranks)
    begins = [(rank * share + min(rank, more)) * step for rank in range(ranks + 1)]
    return [(start + begin, end - begin) for begin, end in pairwise(begins)]
