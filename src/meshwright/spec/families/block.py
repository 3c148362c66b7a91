"""From the tape of one block everything that a `BlockSpec` says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from meshwright.spec.families.record import Storage, Value
from meshwright.spec.families.tape import Tape
from meshwright.spec.families.traffic import Traffic
from meshwright.spec.model import AttentionWork, BlockCollective, BlockSpec, Product

__all__ = ["block_of"]


def block_of(
    name: str, kind: Literal["embedding", "layer", "head"], tape: Tape, output: Value, entrance: Value | None = None
) -> BlockSpec:
    """Sum up a tape.

    Without recompute a block keeps what its operations keep. Selective recompute keeps the block's input and what
    matrix products and attention make; full recompute keeps the input. Only layers recompute. While a recomputed
    layer's backward runs, there are besides that all tensors an operation keeps; of the outputs kept by selective
    recompute those that are used up in between are gone again, but not those made after the last tensor that is kept,
    where the second forward stops. Collectives before that are executed again. (Other stacks' full recompute executes
    all of them again, and their selective one none.)

    Args:
        output: what leaves the block.
        entrance: what enters it, where a checkpoint would keep it.
    """
    operations = tape.operations
    kept = {storage for operation in operations for storage in operation.saves}
    inputs = {entrance.storage} if entrance is not None else set()
    made = {storage for operation in operations if operation.product for storage in operation.made}
    stop = max((index for index, operation in enumerate(operations) if operation.saves), default=0)
    left = {storage for operation in operations[stop:] if operation.product for storage in operation.made}
    none = _bytes(kept)
    saved, alive = dict.fromkeys(("none", "selective", "full"), none), {}
    if kind == "layer":
        saved = {"none": none, "selective": _bytes(inputs | made), "full": _bytes(inputs)}
        alive = {"none": none, "selective": _bytes(kept | inputs | left), "full": _bytes(kept | inputs)}
    weighted = [
        operation
        for operation in operations
        if operation.weight_bytes and operation.saves and (operation.product or kind != "embedding")
    ]
    waiting = {storage for operation in weighted for storage in operation.saves}
    arriving = {storage for operation in weighted for storage in operation.made if storage not in operation.saves}
    traffic = Traffic.of(operations, output, fuses=not tape.eager)
    return BlockSpec(
        name=name,
        kind=kind,
        parameters=sum(_elements(parameter.shape) for parameter in tape.parameters),
        tied_parameters=tape.tied_elements,
        tensors=tuple(parameter.shape for parameter in tape.parameters),
        experts=tuple(parameter.shape for parameter in tape.experts),
        shares=tuple(held.shape for held in tape.parameters for _ in range(held.slices)),
        forward_flops=sum(operation.flops for operation in operations),
        backward_flops=sum(operation.backward_flops for operation in operations),
        causal_flops=sum(operation.causal_flops for operation in operations),
        moved_bytes=sum(operation.moved_bytes for operation in operations),
        weight_bytes=sum(operation.weight_bytes for operation in operations),
        waiting_bytes=_bytes(waiting) + _bytes(arriving),
        saved_bytes=saved,
        alive_bytes=alive,
        fixed_bytes=tape.fixed_bytes,
        buffer_bytes=tape.buffer_bytes,
        output_bytes=output.bytes,
        backward_extra_bytes=output.bytes,
        collectives=_merged(tape.collectives, stop if kind == "layer" else -1, eager=tape.eager),
        products=tuple(operation.work for operation in operations if isinstance(operation.work, Product)),
        attention=tuple(operation.work for operation in operations if isinstance(operation.work, AttentionWork)),
        element_bytes=traffic.forward_bytes,
        backward_element_bytes=traffic.backward_bytes,
        kernels=traffic.kernels,
        backward_kernels=traffic.backward_kernels,
    )


def _bytes(storages: Iterable[Storage]) -> int:
    return sum(storage.bytes for storage in storages)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _merged(
    collectives: Iterable[tuple[int, BlockCollective]], stop: int, *, eager: bool
) -> tuple[BlockCollective, ...]:
    """Equal collectives as one, with the number of times added up.

    Args:
        collectives: each with how many operations stand before it.
        stop: the last operation that recompute executes again; negative where nothing is.
    """
    forward: Counter[tuple[str, str, int]] = Counter()
    backward: Counter[tuple[str, str, int]] = Counter()
    again: Counter[tuple[str, str, int]] = Counter()
    first: dict[tuple[str, str, int], BlockCollective] = {}
    for place, one in collectives:
        key = (one.kind, one.dimension, one.message_bytes)
        first.setdefault(key, one)
        forward[key] += one.forward
        backward[key] += one.backward
        again[key] += one.forward if stop >= 0 and (place <= stop or not eager) else 0
    return tuple(
        replace(
            one,
            forward=forward[key],
            backward=backward[key],
            selective=again[key] if eager else 0,
            full=again[key],
        )
        for key, one in first.items()
    )
