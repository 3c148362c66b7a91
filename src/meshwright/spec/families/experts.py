"""Experts on the tape: a router, and the feed-forward networks it chooses, laid over ranks by expert parallelism."""

from __future__ import annotations

from meshwright.errors import UnsupportedCombination
from meshwright.spec.families.record import Backward, Value
from meshwright.spec.families.tape import Tape
from meshwright.spec.model import Product

__all__ = ["divided_by_sum", "experts", "softmax_router", "top"]

_ID_BYTES = 8


def softmax_router(tape: Tape, x: Value, *, count: int, chosen: int, normalised: bool, narrow: bool) -> Value:
    """The weights of the `chosen` experts of each row: rows x `chosen`.

    Args:
        count: experts.
        chosen: experts per row.
        normalised: whether the weights are divided by their sum.
        narrow: whether they are handed on in the compute dtype.
    """
    logits = tape.linear(x, count)
    logits = logits if narrow or not tape.eager else tape.cast(logits, tape.wide_bytes)
    likely = tape.unary("softmax", logits, saves="output", itemsize=tape.wide_bytes)
    share, _ = top(tape, likely, chosen)
    share = divided_by_sum(tape, share) if normalised else share
    return tape.cast(share, tape.compute_bytes) if narrow else share


def top(tape: Tape, x: Value, chosen: int) -> tuple[Value, Value]:
    """The largest values of each row, and their places, which are kept."""
    places = tape.new(x.rows, chosen, _ID_BYTES, grad=False)
    best = tape.new(x.rows, chosen, x.itemsize)
    return tape.apply("topk", [x], [best, places], saves=[places], backward=_spread(tape, x, best, places)), places


def divided_by_sum(tape: Tape, x: Value) -> Value:
    """x over the sum of its rows. Kept: both."""
    whole = tape.apply("sum", [x], [tape.new(x.rows, 1, x.itemsize)])
    return tape.apply("divide", [x, whole], [tape.new(x.rows, x.width, x.itemsize)], saves=[x, whole])


def experts(
    tape: Tape, x: Value, share: Value, *, count: int, chosen: int, width: int, activation: str = "silu"
) -> Value:
    """Gated experts: each row of x goes through `chosen` of `count` networks of `width` channels.

    The result is their sum with the weights `share`. Rows are sorted by expert and go through two grouped products.
    The experts' weights are two tensors of `count` / ep matrices each. The runtime divides their channels by tp and
    sums the results, as of any MLP; under expert parallelism and in other stacks they are whole on every
    tensor-parallel rank, which runs them on its rows of the stream. Tokens are taken as spread evenly over the experts,
    so that a rank receives as many rows as it sends; under expert parallelism all_to_all brings them there and back
    (Lepikhin et al. 2020, arXiv 2006.16668). Kept: both inputs and the middle of every network, its output and weight,
    and the rows' places.

    Raises:
        UnsupportedCombination: ep does not divide the experts.
    """
    ep = tape.layout.ep
    if count % ep:
        legal = ", ".join(str(e) for e in range(1, count + 1) if count % e == 0)
        raise UnsupportedCombination(
            f"ep={ep} does not divide {count} experts",
            why="expert parallelism gives every rank the same number of experts",
            fix=f"set ep to one of {legal}",
        )
    divided = tape.eager and ep == 1 and tape.layout.tp > 1
    if divided:
        tape.another_module()
        x, share = tape.enter(x), tape.enter(share)
        width = tape.share(width, "the experts' width")
    rows, hidden = x.rows * chosen, x.width
    source, order, back = (tape.new(rows, 1, _ID_BYTES, grad=False) for _ in range(3))
    tape.apply("sort", [order], [order, source])
    into = _gathered(tape, x, source, hidden)
    part = _gathered(tape, share, order, 1)
    if ep > 1:
        tape.collective("all_to_all", "ep", into.bytes, forward=2, backward=2)
    mixed = _product(tape, into, (count // ep, 2 * width, hidden), 2 * width, laid=not divided)
    gate, up = tape.split(mixed, width, width)
    out = _product(tape, tape.gated(gate, up, activation), (count // ep, hidden, width), hidden, laid=not divided)
    wide = max(out.itemsize, part.itemsize)
    product = tape.new(rows, hidden, wide)
    steps = tape.multiplied(out, part, product)
    weighted = tape.apply("multiply", [out, part], [product], saves=[out, part], backward=steps)
    weighted = _gathered(tape, weighted, back, hidden)
    routed = tape.cast(tape.apply("sum", [weighted], [tape.new(x.rows, hidden, wide)]), x.itemsize)
    return tape.leave(routed) if divided else routed


def _gathered(tape: Tape, x: Value, places: Value, width: int) -> Value:
    """Rows of x in the order of `places`, which are kept."""
    out = tape.new(places.rows, width, x.itemsize)
    return tape.apply("gather", [x, places], [out], saves=[places], backward=_spread(tape, x, out, places))


def _spread(tape: Tape, x: Value, out: Value, places: Value) -> Backward | None:
    """PyTorch's backward of a lookup in x: zeros, to which the gradient's rows are added in their places."""
    return Backward(x.bytes + 3 * out.bytes + places.bytes, 2) if tape.eager and x.grad else None


def _product(tape: Tape, x: Value, shape: tuple[int, ...], outputs: int, *, laid: bool) -> Value:
    """`laid`: expert parallelism lays the weights over ranks."""
    return tape.apply(
        "grouped_matmul",
        [x, tape.parameter(*shape, expert=laid, slices=0)],
        [tape.new(x.rows, outputs)],
        saves=[x],
        product=True,
        work=Product(x.rows, x.width, outputs, shape[0], experts=True),
    )
