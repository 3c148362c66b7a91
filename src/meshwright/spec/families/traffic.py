"""Traffic: what the memory-bound operations of a block read and write, and how many are started. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from meshwright.spec.families.record import Operation, Storage, Value

__all__ = ["Traffic"]


class Traffic(Struct, frozen=True, kw_only=True):
    """Bytes read and written by a block's operations other than matrix products and attention, and operations started.

    A product is one operation forward and two backward, attention one and one; communication is none.

    A tensor that several operations take gets as many gradients, which are added up. Operations one by one add them in
    pairs: two are read and one is written each time. Parts of one tensor, such as queries, keys and values of a joint
    product, have their gradients joined: read and written once.

    Where a compiler or a kernel `fuses`, a memory-bound operation and the one directly after it that reads its result
    are one pass: the result is not read again, and not written where nothing else reads or keeps it; so with its
    gradient. Gradients of one tensor are added as they are read, and those of parts are written side by side.
    """

    forward_bytes: int
    backward_bytes: int
    kernels: int
    backward_kernels: int

    @classmethod
    def of(cls, operations: Sequence[Operation], output: Value, *, fuses: bool) -> Traffic:
        """Sum up the operations of a block that `output` leaves."""
        bound = [operation for operation in operations if operation.memory_bound]
        added, additions, joined, joins = _gradients(operations)
        forward = sum(operation.moved_bytes for operation in bound)
        backward = sum(operation.backward.bytes for operation in operations)
        kernels = sum(operation.kernels for operation in operations)
        backward_kernels = sum(operation.backward.kernels for operation in operations)
        if not fuses:
            return cls(
                forward_bytes=forward,
                backward_bytes=backward + 3 * added + 2 * joined,
                kernels=kernels,
                backward_kernels=backward_kernels + additions + joins,
            )
        spared, spared_backward, merged, merged_backward = _fused(operations, output)
        return cls(
            forward_bytes=forward - spared,
            backward_bytes=backward + added - spared_backward,
            kernels=kernels - merged,
            backward_kernels=backward_kernels - merged_backward,
        )


def _gradients(operations: Sequence[Operation]) -> tuple[int, int, int, int]:
    """Bytes of gradients beyond the first of each tensor and how many they are; bytes of parts, and of how many."""
    taken: Counter[Storage] = Counter()
    parts: set[Storage] = set()
    for operation in operations:
        for value in {id(value): value for value in operation.reads if value.grad}.values():
            if value not in operation.writes and value.gradient.bytes:
                taken[value.gradient] += value.bytes
                if value.bytes < value.gradient.bytes:
                    parts.add(value.gradient)
    shared = {storage: size - storage.bytes for storage, size in taken.items() if size > storage.bytes}
    additions = sum(-(-more // storage.bytes) for storage, more in shared.items())
    return sum(shared.values()), additions, sum(storage.bytes for storage in parts), len(parts)


def _fused(operations: Sequence[Operation], output: Value) -> tuple[int, int, int, int]:
    """Bytes that neighbours spare in one pass, forward and backward, and operations."""
    readers: Counter[Storage] = Counter()
    kept = {output.storage}
    for operation in operations:
        readers.update({value.storage for value in operation.reads})
        kept.update(operation.saves)
    spared = spared_backward = merged = merged_backward = 0
    for first, second in pairwise(operations):
        passed = {value.storage for value in first.writes} & {value.storage for value in second.reads}
        if not (first.memory_bound and second.memory_bound and passed):
            continue
        merged += 1
        both = first.backward.kernels > 0 and second.backward.kernels > 0
        merged_backward += both
        read = {value.storage: value for value in second.reads if value.storage in passed}
        for value in read.values():
            alone = readers[value.storage] == 1
            spared += value.bytes * (2 if alone and value.storage not in kept else 1)
            if both and value.grad:
                spared_backward += value.bytes * (2 if alone else 1)
    return spared, spared_backward, merged, merged_backward
