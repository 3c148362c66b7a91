"""Record: the operations of one block, each with what it computes, reads, writes and keeps for backward. No torch.

A `Value` stands for a tensor of one sequence on one rank; a view of it shares its `Storage`. What autograd keeps is a
set of storages, so that a tensor which two operations keep counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshwright.errors import UnsupportedCombination
from meshwright.spec.layout import Layout
from meshwright.spec.model import BlockCollective

__all__ = ["Operation", "Parameter", "Record", "Storage", "Value"]

_FLOAT32_BYTES = 4


class Storage:
    """Memory that one or more values lie in. `bytes` is 0 for memory that another block answers for."""

    __slots__ = ("bytes",)

    def __init__(self, size: int) -> None:
        self.bytes = size


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A tensor as rows x width elements of `itemsize` bytes. `grad`: whether a gradient flows back through it."""

    storage: Storage
    rows: int
    width: int
    itemsize: int
    grad: bool = True

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.width

    @property
    def bytes(self) -> int:
        """Bytes that reading or writing it moves."""
        return self.elements * self.itemsize

    def view(self, rows: int, width: int) -> Value:
        """The same memory in another shape, or a part of it."""
        return Value(self.storage, rows, width, self.itemsize, self.grad)


@dataclass(frozen=True, eq=False, slots=True)
class Parameter:
    """A parameter as this rank holds it, in the compute dtype."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        """Bytes that reading it moves."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. `product`: its outputs (`made`) are those of a matrix product or of attention."""

    name: str
    moved_bytes: int
    weight_bytes: int = 0
    saves: tuple[Storage, ...] = ()
    made: tuple[Storage, ...] = ()
    product: bool = False
    flops: int = 0
    backward_flops: int = 0
    causal_flops: int = 0


@dataclass
class Record:
    """Operations in forward order, and what they need: parameters, buffers, collectives.

    `compute_bytes` and `wide_bytes` are bytes per element of the compute dtype and of the dtype in which norms, softmax
    and losses are computed (float32 or wider).
    """

    layout: Layout
    operations: list[Operation] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    experts: list[Parameter] = field(default_factory=list)
    collectives: list[BlockCollective] = field(default_factory=list)
    tied_elements: int = 0
    fixed_bytes: int = 0
    buffer_bytes: int = 0

    def __post_init__(self) -> None:
        self.compute_bytes = self.layout.compute_bytes
        self.wide_bytes = max(self.compute_bytes, _FLOAT32_BYTES)
        self.eager = self.layout.stack == "eager"
        self.sequence_parallel = self.layout.sequence_parallel and self.layout.tp > 1
        #: Rows of the residual stream: tokens of this rank, divided by tp under sequence parallelism.
        self.rows = self.layout.tokens // (self.layout.tp if self.sequence_parallel else 1)

    # --- values -------------------------------------------------------------------------------------------------------

    def new(self, rows: int, width: int, itemsize: int = 0, *, grad: bool = True) -> Value:
        """A tensor with memory of its own; without `itemsize` in the compute dtype."""
        size = itemsize or self.compute_bytes
        return Value(Storage(rows * width * size), rows, width, size, grad)

    def foreign(self, rows: int, width: int, itemsize: int = 0) -> Value:
        """A tensor without gradient that another block answers for, such as rotary tables."""
        return Value(Storage(0), rows, width, itemsize or self.compute_bytes, grad=False)

    def fixed(self, rows: int, width: int, itemsize: int = 0) -> Value:
        """A tensor without gradient that is kept once per microbatch, whatever its number of sequences."""
        value = self.foreign(rows, width, itemsize)
        self.fixed_bytes += value.bytes
        return value

    def parameter(self, *shape: int, expert: bool = False) -> Parameter:
        """A parameter that this block owns, by its shape on this rank; `expert`: expert parallelism lays it out."""
        made = Parameter(shape, self.compute_bytes)
        self.parameters.append(made)
        if expert:
            self.experts.append(made)
        return made

    def borrowed(self, *shape: int) -> Parameter:
        """A tied parameter that another block owns."""
        made = Parameter(shape, self.compute_bytes)
        self.tied_elements += math.prod(shape)
        return made

    def share(self, size: int, what: str) -> int:
        """A rank's part of `size` under tensor parallelism.

        Raises:
            UnsupportedCombination: tp does not divide it.
        """
        if size % self.layout.tp:
            legal = ", ".join(str(t) for t in range(1, min(size, 64) + 1) if size % t == 0)
            raise UnsupportedCombination(
                f"tp={self.layout.tp} does not divide {what}={size}",
                why="tensor parallelism gives every rank an equal part of each matrix",
                fix=f"set tp to one of {legal}",
            )
        return size // self.layout.tp

    # --- operations ---------------------------------------------------------------------------------------------------

    def apply(
        self,
        name: str,
        reads: Iterable[Value | Parameter],
        writes: Sequence[Value],
        *,
        saves: Iterable[Value] = (),
        product: bool = False,
        flops: int = 0,
        backward_flops: int = 0,
        causal_flops: int = 0,
    ) -> Value:
        """Record one operation and hand back its first output. It reads its inputs and writes its outputs once."""
        read = list(reads)
        weights = sum(entry.bytes for entry in read if isinstance(entry, Parameter))
        moved = sum(entry.bytes for entry in read) + sum(value.bytes for value in writes)
        self.operations.append(
            Operation(
                name=name,
                moved_bytes=moved,
                weight_bytes=weights,
                saves=tuple(value.storage for value in saves),
                made=tuple(value.storage for value in writes),
                product=product,
                flops=flops,
                backward_flops=backward_flops,
                causal_flops=causal_flops,
            )
        )
        return writes[0]

    def unary(self, name: str, x: Value, *, saves: str = "", itemsize: int = 0) -> Value:
        """An elementwise operation; `saves` is "", "input" or "output"."""
        out = Value(Storage(x.elements * (itemsize or x.itemsize)), x.rows, x.width, itemsize or x.itemsize, x.grad)
        kept = {"": (), "input": (x,), "output": (out,)}[saves]
        return self.apply(name, [x], [out], saves=kept if x.grad else ())

    def add(self, x: Value, y: Value | Parameter) -> Value:
        """x + y in x's shape; nothing is kept."""
        return self.apply("add", [x, y], [self.new(x.rows, x.width, x.itemsize)])

    def multiply(self, x: Value, y: Value | Parameter) -> Value:
        """x * y in x's shape. Each factor is kept for the gradient of the other one."""
        factor = isinstance(y, Value)
        saves = [x] if not isinstance(y, Value) or y.grad else []
        if factor and x.grad and isinstance(y, Value):
            saves.append(y)
        return self.apply("multiply", [x, y], [self.new(x.rows, x.width, x.itemsize)], saves=saves)

    def scale(self, x: Value, name: str = "scale") -> Value:
        """x times, or plus, a number; nothing is kept."""
        return self.unary(name, x)

    def cast(self, x: Value, itemsize: int) -> Value:
        """x in a dtype of `itemsize` bytes; x itself where it is already."""
        return x if x.itemsize == itemsize else self.unary("cast", x, itemsize=itemsize)

    def dropout(self, x: Value, probability: float) -> Value:
        """x with elements dropped. Kept: a mask of one byte per element, as accelerators do (`native_dropout`)."""
        if not probability:
            return x
        mask = self.new(x.rows, x.width, 1, grad=False)
        return self.apply("dropout", [x], [self.new(x.rows, x.width, x.itemsize), mask], saves=[mask])
