"""Attention on the tape: as a kernel that stores no scores, or with the scores of all pairs stored. No torch."""

from __future__ import annotations

from dataclasses import replace

from msgspec import Struct

from meshwright.errors import UnsupportedCombination
from meshwright.spec.families.record import Value
from meshwright.spec.families.tape import Tape
from meshwright.spec.layout import Layout
from meshwright.spec.model import AttentionWork, Product

__all__ = ["Heads", "attention", "fused_projection", "projections"]


class Heads(Struct, frozen=True, kw_only=True):
    """Query heads, key/value heads (`groups`) and channels per head, of the whole model.

    `fused`: queries, keys and values come from one product.
    """

    heads: int
    groups: int
    size: int
    fused: bool = False

    def on(self, layout: Layout) -> Heads:
        """Those of one tensor-parallel rank's attention. Fewer key/value heads than ranks are replicated; where neither
        number divides the other, a rank picks one for each of its query heads.

        Raises:
            UnsupportedCombination: tp does not divide the heads.
        """
        if not self.divides(layout):
            legal = ", ".join(str(t) for t in range(1, self.heads + 1) if self.divides(_with(layout, t)))
            raise UnsupportedCombination(
                f"tp={layout.tp} does not divide {self.heads} heads over {self.groups} key/value heads",
                why="every rank takes the same number of heads, and whole groups or one group of them",
                fix=f"set tp to one of {legal}",
            )
        here = self.heads // layout.tp
        groups = here if self.selects(layout) else max(1, self.groups // layout.tp)
        return Heads(heads=here, groups=groups, size=self.size)

    def divides(self, layout: Layout) -> bool:
        """Whether the layout's tensor-parallel ranks can share the heads."""
        if self.heads % layout.tp:
            return False
        if layout.stack == "eager":
            return not self.fused or self.groups % layout.tp == 0
        return not self.selects(layout)

    def selects(self, layout: Layout) -> bool:
        """Whether a rank computes all key/value heads and picks one for each of its queries."""
        return self.groups % layout.tp != 0 and layout.tp % self.groups != 0


def _with(layout: Layout, tp: int) -> Layout:
    return replace(layout, tp=tp, sequence_parallel=False)


def projections(tape: Tape, x: Value, heads: Heads, *, bias: bool = False) -> tuple[Value, Value, Value]:
    """Queries, keys and values by three products; `heads` are the whole model's."""
    here, selects = heads.on(tape.layout), heads.selects(tape.layout)
    query, key = here.heads * here.size, (heads.groups if selects else here.groups) * here.size
    # Of heads that several ranks hold, each has the gradient of its own queries.
    slices = 1 if selects else heads.groups if tape.layout.tp > heads.groups else 0
    q = tape.linear(x, query, bias=bias, parallel="column", local=query)
    k, v = (tape.linear(x, key, bias=bias, parallel="column", local=key, slices=slices) for _ in range(2))
    if selects:
        k, v = (tape.apply("pick", [y], [tape.new(y.rows, query)]) for y in (k, v))
    return q, k, v


def fused_projection(
    tape: Tape, x: Value, heads: Heads, *, bias: bool = False, transposed: bool = False, sliced: bool = False
) -> tuple[Value, Value, Value]:
    """Queries, keys and values as views of one product's output, by one split or `sliced` one by one; `heads` are the
    whole model's."""
    here = heads.on(tape.layout)
    query, key = here.heads * here.size, here.groups * here.size
    width = query + 2 * key
    mixed = tape.linear(x, width, bias=bias, parallel="column", local=width, transposed=transposed)
    q, k, v = (tape.slices if sliced else tape.split)(mixed, query, key, key)
    return q, k, v


def attention(
    tape: Tape,
    q: Value,
    k: Value,
    v: Value,
    heads: Heads,
    *,
    window: int = 0,
    kernel: bool = True,
    softcap: bool = False,
    dropout: float = 0.0,
    scaled: bool = True,
    wide: bool = True,
    headwise: bool = False,
) -> Value:
    """Causal attention of this rank's queries to the keys of the whole sequence: tokens x (heads x value channels).

    Flops are those of all pairs (2 per multiply-add, scores and values); `causal_flops` those that the causal mask, or
    a sliding `window` of so many keys, lets a kernel skip. A kernel computes the scores again in backward (Dao et al.
    2022, arXiv 2205.14135): five products there instead of four.

    Args:
        heads: of the whole model.
        window: keys each query sees, 0 for all before it.
        kernel: whether the class can call a kernel that stores no scores; without one, eager attention stores them.
        softcap: whether scores are capped by tanh.
        dropout: probability with which a score is dropped.
        scaled: whether eager attention scales the scores by an operation of its own.
        wide: whether eager attention computes the softmax in float32.
        headwise: whether queries lie head after head in memory (they were joined by `cat`). PyTorch's kernels lay their
            output out as the queries, so that it is copied to lie token after token.
    """
    here = heads.on(tape.layout)
    if tape.layout.cp > 1:  # ring attention (Liu et al. 2023, arXiv 2310.01889): backward sends their gradients too
        hops = tape.layout.cp - 1
        tape.collective("send", "cp", k.bytes + v.bytes, forward=hops, backward=2 * hops)
    if tape.layout.attention == "flash" and (kernel or not tape.eager):
        out = _kernel(tape, q, k, v, here, window)
        return tape.contiguous(out) if tape.eager and headwise else out
    return _scores(tape, q, k, v, here, window=window, softcap=softcap, dropout=dropout, scaled=scaled, wide=wide)


def _kernel(tape: Tape, q: Value, k: Value, v: Value, here: Heads, window: int) -> Value:
    """Kept: queries, keys, values, the output, and one logarithm of a sum per query and head."""
    sequence, channels = tape.layout.sequence, q.width + here.heads * (v.width // here.groups)
    saves = []
    if tape.eager and 0 < window < sequence:
        # PyTorch's kernels know no window: they are handed a mask of all pairs, and with a mask no grouped heads.
        if here.heads > here.groups:
            k, v = _repeated(tape, k, here), _repeated(tape, v, here)
        mask = tape.new(q.rows, sequence, grad=False)
        saves.append(tape.apply("where", [tape.foreign(q.rows, sequence, 1)], [mask]))
        here = Heads(heads=here.heads, groups=here.heads, size=here.size)
    out = tape.new(q.rows, here.heads * (v.width // here.groups))
    sums = tape.new(q.rows, here.heads, tape.wide_bytes, grad=False)
    flops = 2 * q.rows * sequence * channels
    return tape.apply(
        "attention",
        [q, k, v, *saves],
        [out, sums],
        saves=[q, k, v, out, sums, *saves],
        product=True,
        work=AttentionWork(flops, 5 * flops // 2, _skipped(tape.layout, window, channels), here.size),
    )


def _scores(
    tape: Tape,
    q: Value,
    k: Value,
    v: Value,
    here: Heads,
    *,
    window: int,
    softcap: bool,
    dropout: float,
    scaled: bool,
    wide: bool,
) -> Value:
    """Products of queries and keys, their softmax, and its product with the values. Kept: the probabilities.

    Eager products take copies that lie head after head, of keys and values one for every query head of their group.
    """
    sequence, value_size = tape.layout.sequence, v.width // here.groups
    skipped = [_skipped(tape.layout, window, width) for width in (q.width, here.heads * value_size)]
    if tape.eager:
        q, k, v = tape.contiguous(q), _repeated(tape, k, here), _repeated(tape, v, here)
    rows, groups = here.heads * q.rows, here.heads
    pairs = tape.new(rows, sequence)
    scores = Product(rows, q.width // groups, sequence, groups, weighted=False)
    likely = tape.matmul(q, k, pairs, scores, skipped=skipped[0])
    likely = tape.scale(likely) if scaled and tape.eager else likely
    likely = tape.softcap(likely) if softcap else likely
    if tape.eager:
        mask = tape.foreign(q.rows, sequence)
        likely = tape.add(likely, mask)
        likely = tape.cast(likely, tape.wide_bytes if wide else tape.compute_bytes)
        likely = tape.cast(tape.unary("softmax", likely, saves="output"), tape.compute_bytes)
    else:
        likely = tape.unary("softmax", likely, saves="output")
    likely = tape.dropout(likely, dropout)
    mixing = Product(rows, sequence, value_size, groups, weighted=False)
    out = tape.matmul(likely, v, tape.new(q.rows, groups * value_size), mixing, skipped=skipped[1])
    return tape.contiguous(out) if tape.eager else out


def _repeated(tape: Tape, x: Value, here: Heads) -> Value:
    """Keys or values copied for every query head of their group."""
    return tape.apply("repeat", [x], [tape.new(x.rows, x.width // here.groups * here.heads)])


def _skipped(layout: Layout, window: int, channels: int) -> int:
    """Flops of pairs that are masked, of one product over `channels` of all heads."""
    length = layout.sequence
    seen = min(window, length) if window else length
    visible = seen * (seen + 1) // 2 + (length - seen) * seen
    return 2 * channels * (length * length - visible) // layout.cp
