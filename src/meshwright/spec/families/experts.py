"""Experts on the tape: a router, and the feed-forward networks it chooses, laid over ranks by expert parallelism."""

from __future__ import annotations

from meshwright.errors import UnsupportedCombination
from meshwright.spec.families.record import Value
from meshwright.spec.families.tape import Tape

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
    return tape.apply("topk", [x], [tape.new(x.rows, chosen, x.itemsize), places], saves=[places]), places


def divided_by_sum(tape: Tape, x: Value) -> Value:
    """x over the sum of its rows. Kept: both."""
    whole = tape.apply("sum", [x], [tape.new(x.rows, 1, x.itemsize)])
    return tape.apply("divide", [x, whole], [tape.new(x.rows, x.width, x.itemsize)], saves=[x, whole])


def experts(
    tape: Tape, x: Value, share: Value, *, count: int, chosen: int, width: int, activation: str = "silu"
) -> Value:
    """Gated experts: each row of x goes through `chosen` of `count` networks of `width` channels.

    The result is their sum with the weights `share`. Rows are sorted by expert and go through two grouped products.
    The experts' weights are two tensors of `count` / ep matrices each, whole on every tensor-parallel rank, which runs
    them on its rows of the stream. Tokens are taken as spread evenly over the experts, so that a rank receives as many
    rows as it sends; under expert parallelism all_to_all brings them there and back (Lepikhin et al. 2020,
    arXiv 2006.16668). Kept: both inputs and the middle of every network, its output and weight, and the rows' places.

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
    rows, hidden = x.rows * chosen, x.width
    source, order, back = (tape.new(rows, 1, _ID_BYTES, grad=False) for _ in range(3))
    tape.apply("sort", [order], [order, source])
    into = tape.apply("gather", [x, source], [tape.new(rows, hidden, x.itemsize)], saves=[source])
    part = tape.apply("gather", [share, order], [tape.new(rows, 1, share.itemsize)], saves=[order])
    if ep > 1:
        tape.collective("all_to_all", "ep", into.bytes, forward=2, backward=2)
    mixed = _product(tape, into, (count // ep, 2 * width, hidden), 2 * width)
    gate, up = tape.split(mixed, width, width)
    out = _product(tape, tape.gated(gate, up, activation), (count // ep, hidden, width), hidden)
    wide = max(out.itemsize, part.itemsize)
    weighted = tape.apply("multiply", [out, part], [tape.new(rows, hidden, wide)], saves=[out, part])
    weighted = tape.apply("gather", [weighted, back], [tape.new(rows, hidden, wide)], saves=[back])
    return tape.cast(tape.apply("sum", [weighted], [tape.new(x.rows, hidden, wide)]), x.itemsize)


def _product(tape: Tape, x: Value, shape: tuple[int, ...], outputs: int) -> Value:
    flops = 2 * x.rows * x.width * outputs
    return tape.apply(
        "grouped_matmul",
        [x, tape.parameter(*shape, expert=True)],
        [tape.new(x.rows, outputs)],
        saves=[x],
        product=True,
        flops=flops,
        backward_flops=2 * flops,
    )
