"""Record: the operations of one block, each with what it computes, reads, writes and keeps for backward. No torch.

A `Value` stands for a tensor of one sequence on one rank; a view of it shares its `Storage`. What autograd keeps is a
set of storages, so that a tensor which two operations keep counts once.

What an operation's backward moves is, where nothing else is said: the gradient of each output, what the operation kept,
and the gradient of each input that needs one, each once. Where PyTorch's own backward (`stack="eager"`) takes other
steps, they are written down as they are executed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct, structs

from meshwright.errors import UnsupportedCombination
from meshwright.spec.layout import Layout
from meshwright.spec.model import AttentionWork, BlockCollective, Product

__all__ = ["Backward", "Operation", "Parameter", "Record", "Storage", "Value"]

_FLOAT32_BYTES = 4


class Storage:
    """Memory that one or more values lie in. `bytes` is 0 for memory that another block answers for."""

    __slots__ = ("bytes",)

    def __init__(self, size: int) -> None:
        self.bytes = size


class Value(Struct, frozen=True, eq=False):
    """A tensor as rows x width elements of `itemsize` bytes. `grad`: whether a gradient flows back through it.

    `sliced`: it is a part of its memory whose gradient is a tensor of its own (`Record.slices`).
    """

    storage: Storage
    rows: int
    width: int
    itemsize: int
    grad: bool = True
    sliced: Storage | None = None

    @property
    def gradient(self) -> Storage:
        """Where its gradient is gathered, with that of all other views of it."""
        return self.sliced or self.storage

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
        return Value(self.storage, rows, width, self.itemsize, self.grad, self.sliced)


class Parameter(Struct, frozen=True, eq=False):
    """A parameter as this rank holds it, in the compute dtype.

    `slices`: over the tensor-parallel ranks there are so many different ones, and the gradient of each is the sum over
    the ranks that hold it; 0: every rank's gradient is whole.
    """

    shape: tuple[int, ...]
    itemsize: int
    slices: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that reading it moves."""
        return math.prod(self.shape) * self.itemsize


class Backward(NamedTuple):
    """What the backward of an operation moves besides matrix products and attention, and how many operations it is."""

    bytes: int
    kernels: int = 1


_NOTHING = Backward(0, 0)


class Operation(Struct, frozen=True):
    """One operation, `kernels` of them where it stands for several; 0: communication, which moves nothing here.

    `product`: its outputs (`writes`) are kept by selective recompute. `work`: it is a matrix product or attention, of
    whose flops `skipped` are those of masked pairs; without, it is bound by what it moves.
    """

    name: str
    moved_bytes: int
    weight_bytes: int = 0
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    saves: tuple[Storage, ...] = ()
    product: bool = False
    work: Product | AttentionWork | None = None
    skipped: int = 0
    kernels: int = 1
    backward: Backward = _NOTHING

    @property
    def made(self) -> tuple[Storage, ...]:
        """The storages of its outputs."""
        return tuple(value.storage for value in self.writes)

    @property
    def memory_bound(self) -> bool:
        """Whether it takes as long as it takes to move what it reads and writes."""
        return self.work is None and self.kernels > 0

    @property
    def flops(self) -> int:
        """Flops of the forward, over all pairs."""
        return self.work.flops if self.work else 0

    @property
    def backward_flops(self) -> int:
        """Flops of the backward: of a product twice those of the forward."""
        return self.work.backward_flops if isinstance(self.work, AttentionWork) else 2 * self.flops

    @property
    def causal_flops(self) -> int:
        """What of the forward's flops a mask lets a kernel skip."""
        return self.work.causal_flops if isinstance(self.work, AttentionWork) else self.skipped


@dataclass
class Record:
    """Operations in forward order, and what they need: parameters, buffers, collectives, each with how many operations
    stand before it.

    `compute_bytes` and `wide_bytes` are bytes per element of the compute dtype and of the dtype in which norms, softmax
    and losses are computed (float32 or wider).
    """

    layout: Layout
    operations: list[Operation] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    experts: list[Parameter] = field(default_factory=list)
    collectives: list[tuple[int, BlockCollective]] = field(default_factory=list)
    tied_elements: int = 0
    fixed_bytes: int = 0
    buffer_bytes: int = 0

    def __post_init__(self) -> None:
        self.compute_bytes = self.layout.compute_bytes
        self.wide_bytes = max(self.compute_bytes, _FLOAT32_BYTES)
        self.eager = self.layout.stack == "eager"
        self.cut_sequences(self.layout.sequence_parallel and self.layout.tp > 1)

    def cut_sequences(self, cut: bool) -> None:
        """Whether each tensor-parallel rank has a part of the tokens from here on, or all of them."""
        self.sequence_parallel = cut
        #: Rows of the residual stream: tokens of this rank, divided by tp under sequence parallelism.
        self.rows = self.layout.tokens // (self.layout.tp if cut else 1)

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

    def parameter(self, *shape: int, expert: bool = False, slices: int | None = None) -> Parameter:
        """A parameter that this block owns, by its shape on this rank; `expert`: expert parallelism lays it out.

        `slices` as in `Parameter`. Left out, it is whole on every rank: where sequences are cut, the gradient is that
        of this rank's tokens. (Other stacks' reductions of it are not counted.)
        """
        if slices is None:
            slices = int(self.sequence_parallel)
        made = Parameter(shape, self.compute_bytes, slices if self.eager else 0)
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
        """A rank's part of `size` under tensor parallelism: the largest, where tp does not divide it.

        Raises:
            UnsupportedCombination: tp does not divide it, and the stack's kernels want equal parts.
        """
        if size % self.layout.tp and not self.eager:
            legal = ", ".join(str(t) for t in range(1, min(size, 64) + 1) if size % t == 0)
            raise UnsupportedCombination(
                f"tp={self.layout.tp} does not divide {what}={size}",
                why="tensor parallelism gives every rank an equal part of each matrix",
                fix=f"set tp to one of {legal}",
            )
        return -(-size // self.layout.tp)

    # --- operations ---------------------------------------------------------------------------------------------------

    def apply(
        self,
        name: str,
        reads: Iterable[Value | Parameter],
        writes: Sequence[Value],
        *,
        saves: Iterable[Value] = (),
        product: bool = False,
        work: Product | AttentionWork | None = None,
        skipped: int = 0,
        kernels: int = 1,
        backward: Backward | None = None,
    ) -> Value:
        """Record one operation and hand back its first output. It reads its inputs and writes its outputs once.

        `backward` is what its backward moves, where that is not what the head of this file says.
        """
        read, kept = list(reads), list(saves)
        values = tuple(entry for entry in read if isinstance(entry, Value))
        if backward is None:
            plain = work is None and kernels > 0
            backward = _backward(read, writes, kept) if plain else Backward(0, 2 if isinstance(work, Product) else 1)
            backward = backward if kernels else _NOTHING
        weights = sum(entry.bytes for entry in read if isinstance(entry, Parameter))
        moved = sum(entry.bytes for entry in read) + sum(value.bytes for value in writes)
        self.operations.append(
            Operation(
                name=name,
                moved_bytes=moved,
                weight_bytes=weights,
                reads=values,
                writes=tuple(writes),
                saves=tuple(value.storage for value in kept),
                product=product,
                work=work,
                skipped=skipped,
                kernels=kernels,
                backward=backward,
            )
        )
        return writes[0]

    def unary(
        self, name: str, x: Value, *, saves: str = "", itemsize: int = 0, backward: Backward | None = None
    ) -> Value:
        """An elementwise operation; `saves` is "", "input" or "output"."""
        out = Value(Storage(x.elements * (itemsize or x.itemsize)), x.rows, x.width, itemsize or x.itemsize, x.grad)
        kept = {"": (), "input": (x,), "output": (out,)}[saves]
        return self.apply(name, [x], [out], saves=kept if x.grad else (), backward=backward)

    def power(self, name: str, x: Value, *, saves: str = "input") -> Value:
        """A power of x. PyTorch's backward takes a power of what is kept, scales it, and multiplies the gradient."""
        steps = Backward(7 * x.bytes, 3) if self.eager and x.grad else None
        return self.unary(name, x, saves=saves, backward=steps)

    def add(self, x: Value, y: Value | Parameter) -> Value:
        """x + y in x's shape; nothing is kept, and backward passes one gradient on to both."""
        return self.apply("add", [x, y], [self.new(x.rows, x.width, x.itemsize)], backward=_NOTHING)

    def cat(self, parts: Sequence[Value], out: Value) -> Value:
        """Parts side by side in `out`; backward hands views of its gradient on."""
        return self.apply("cat", parts, [out], backward=_NOTHING)

    def slices(self, x: Value, *widths: int) -> tuple[Value, ...]:
        """Parts of x along its channels, each indexed by itself, as views of the same memory.

        PyTorch's backward of each is a gradient of all of x, zero but for the part.
        """
        parts = tuple(x.view(x.rows, width) for width in widths)
        if not self.eager or not x.grad:
            return parts
        cut = tuple(structs.replace(part, sliced=Storage(part.bytes)) for part in parts)
        for part in cut:
            backward = Backward(x.bytes + 2 * part.bytes)
            self.operations.append(Operation("slice", 0, reads=(x,), writes=(part,), kernels=0, backward=backward))
        return cut

    def contiguous(self, x: Value) -> Value:
        """A copy of x in another order; backward hands its gradient on."""
        return self.unary("contiguous", x, backward=_NOTHING)

    def multiply(self, x: Value, y: Value | Parameter) -> Value:
        """x * y in x's shape. Each factor is kept for the gradient of the other one."""
        factor = isinstance(y, Value)
        saves = [x] if not isinstance(y, Value) or y.grad else []
        if factor and x.grad and isinstance(y, Value):
            saves.append(y)
        out = self.new(x.rows, x.width, x.itemsize)
        return self.apply("multiply", [x, y], [out], saves=saves, backward=self.multiplied(x, y, out))

    def multiplied(self, x: Value, y: Value | Parameter, out: Value) -> Backward | None:
        """The backward of out = x * y in PyTorch's own steps: for each factor the gradient times the other one.

        It is in out's shape and dtype; where the factor's differ, it is summed or cast in a second step.
        """
        if not self.eager:
            return None
        steps = []
        for factor, other in ((x, y), (y, x)):
            if isinstance(factor, Parameter) or factor.grad:
                steps.append(2 * out.bytes + other.bytes)
                if factor.bytes != out.bytes:
                    steps.append(out.bytes + factor.bytes)
        return Backward(sum(steps), len(steps))

    def scale(self, x: Value, name: str = "scale") -> Value:
        """x times a number, or plus one (`name` "add"), which leaves its gradient alone; nothing is kept."""
        return self.unary(name, x, backward=_NOTHING if name == "add" else None)

    def cast(self, x: Value, itemsize: int) -> Value:
        """x in a dtype of `itemsize` bytes; x itself where it is already."""
        return x if x.itemsize == itemsize else self.unary("cast", x, itemsize=itemsize)

    def dropout(self, x: Value, probability: float) -> Value:
        """x with elements dropped. Kept: a mask of one byte per element, as accelerators do (`native_dropout`)."""
        if not probability:
            return x
        mask = self.new(x.rows, x.width, 1, grad=False)
        return self.apply("dropout", [x], [self.new(x.rows, x.width, x.itemsize), mask], saves=[mask])


def _backward(reads: Sequence[Value | Parameter], writes: Sequence[Value], saves: Sequence[Value]) -> Backward:
    """Gradients of the outputs and what was kept are read, gradients of the inputs written."""
    made = sum(value.bytes for value in writes if value.grad)
    wanted = {id(entry): entry for entry in reads if isinstance(entry, Parameter) or entry.grad}
    if not made or not wanted:
        return _NOTHING
    kept = {id(value): value for value in saves}
    gradients = sum(entry.bytes for entry in wanted.values() if entry not in writes)
    return Backward(made + sum(value.bytes for value in kept.values()) + gradients)
