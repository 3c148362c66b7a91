"""From seconds to figures: the few constants of a device and a link that come nearest to what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from meshwright.spec import Efficiency, Link

__all__ = ["bandwidth", "efficiency", "fit_latency", "fit_link", "peaks"]

Cells = Mapping[str, float]

#: Products of a backward for one of the forward; kernels that attention's backward starts as products again: the
#: scores anew, and the gradients of scores, queries, keys and values (Dao et al. 2022, FlashAttention, section 3.1).
_BACKWARD_ATTENTION = 2.5
#: Times that the bytes of a message cross a ring's link, over (n - 1) / n of them; and steps over n - 1.
_TIMES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def peaks(cells: Cells) -> dict[str, float]:
    """The fastest product of each dtype, flops per second."""
    found: dict[str, float] = {}
    for words, seconds in _named(cells, "product"):
        rows, inner, columns = map(int, words[1:4])
        rate = 2 * rows * inner * columns / seconds
        if words[4] == "forward":
            found[words[0]] = max(found.get(words[0], 0.0), rate)
    return found


def bandwidth(cells: Cells, kind: str = "memory") -> float:
    """Bytes per second of a copy: the cell's name ends with its bytes."""
    return max(int(words[-1]) / seconds for words, seconds in _named(cells, kind))


def efficiency(cells: Cells, *, multiprocessors: int = 0, source: str = "") -> Efficiency:
    """What the device reaches of its own peaks, as the noun has it.

    Products: seconds = flops (1 + half / inner) / rate for the forward and the two products of the backward, with one
    `half` for all dtypes; attention over the pairs that the mask leaves; memory over what its operations read and
    write, without what starting them takes.
    """
    peak, moved = peaks(cells), bandwidth(cells)
    start = _start_s(cells)
    first = next(iter(peak))
    rate, half = _fit_products(cells, first)
    shares = {first: min(1.0, rate / peak[first])}
    for dtype in peak:
        if dtype != first:
            shares[dtype] = min(1.0, _rate_with(cells, dtype, half) / peak[dtype])
    forward, backward = _attention(cells)
    return Efficiency(
        products=shares,
        half_inner=half,
        multiprocessors=multiprocessors,
        attention=min(1.0, forward / peak[first]),
        backward_attention=min(1.0, backward / peak[first]),
        memory=min(1.0, _elements(cells) / moved),
        kernel_s=start,
        source=source,
    )


def fit_link(cells: Cells, ranks: int) -> Link:
    """The link that comes nearest to what collectives take: seconds = steps x latency + bytes on a ring / bandwidth.

    The bandwidth is that of the fastest kind, and `collectives` tells what the others reach of it; the latency is that
    of all kinds. Weighted so that relative errors count.
    """
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for words, seconds in _named(cells, "collective"):
        kind, size = words[0], int(words[1])
        times = _TIMES[kind]
        row = (times * (ranks - 1), times * (ranks - 1) / ranks * size, seconds)
        rows.setdefault(kind, []).append(row)
    latency, _ = fit_latency(row for found in rows.values() for row in found)
    rates = {kind: 1 / _per_byte(found, latency) for kind, found in rows.items()}
    best = max(rates.values())
    shares = {kind: rate / best for kind, rate in rates.items() if rate < best}
    return Link(latency_s=latency, bytes_per_s=best, efficiency=1.0, collectives=shares or None)


def _per_byte(rows: list[tuple[float, float, float]], latency: float) -> float:
    """Seconds of a byte where the latency is known: those of large messages, the median of the larger half."""
    large = sorted(rows, key=lambda row: row[1])[len(rows) // 2 :]
    return median(max(seconds - steps * latency, seconds / 10) / moved for steps, moved, seconds in large)


def fit_latency(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """The (a, b), none negative, for which a x first + b x second comes nearest to the third, relative to it."""
    scaled = [(first / seconds, second / seconds) for first, second, seconds in rows]
    xx, xy, yy = (sum(f(x, y) for x, y in scaled) for f in (_xx, _xy, _yy))
    x1, y1 = sum(x for x, _ in scaled), sum(y for _, y in scaled)
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
        if a >= 0 and b > 0:
            return a, b
        if b > 0:
            return 0.0, y1 / yy
    return (x1 / xx, 1e-15) if determinant > 0 else (0.0, y1 / yy)


def _xx(x: float, y: float) -> float:
    return x * x


def _xy(x: float, y: float) -> float:
    return x * y


def _yy(x: float, y: float) -> float:
    return y * y


def _named(cells: Cells, kind: str) -> list[tuple[list[str], float]]:
    """The cells of a kind: the other words of their names, and their seconds."""
    start = kind + " "
    return [(name.removeprefix(start).split(), seconds) for name, seconds in cells.items() if name.startswith(start)]


def _products_of(cells: Cells, dtype: str) -> list[tuple[float, float, float]]:
    """For each product: its flops, its flops over inner channels (the backward's have its rows and columns for inner
    channels), and its seconds; forward and the two of the backward as one row each."""
    rows = []
    start = _start_s(cells, "elements")
    for words, seconds in _named(cells, "product"):
        if words[0] != dtype:
            continue
        m, k, n = map(int, words[1:4])
        flops = 2.0 * m * k * n
        if words[4] == "forward":
            rows.append((flops, flops / k, max(seconds - start / 2, seconds / 2)))
        else:
            rows.append((3 * flops, flops * (1 / k + 1 / n + 1 / m), max(seconds - 2 * start, seconds / 2)))
    return rows


def _fit_products(cells: Cells, dtype: str) -> tuple[float, float]:
    """Flops per second of a large product, and the inner channels at which it is half of that."""
    per_flop, half = _two(_products_of(cells, dtype))
    return 1 / per_flop, half / per_flop


def _two(rows: list[tuple[float, float, float]]) -> tuple[float, float]:
    a, b = fit_latency(rows)
    return (a, b) if a > 0 and b > 1e-14 else (median(seconds / first for first, _, seconds in rows), 0.0)


def _rate_with(cells: Cells, dtype: str, half: float) -> float:
    return median((flops + half * over) / seconds for flops, over, seconds in _products_of(cells, dtype))


def _attention(cells: Cells) -> tuple[float, float]:
    """Flops per second of a causal kernel over the pairs that are not masked, forward and backward."""
    found = {(tuple(words[:5]), words[5]): seconds for words, seconds in _named(cells, "attention")}
    forward, backward = [], []
    for shape in dict.fromkeys(shape for shape, _ in found):
        batch, heads, sequence, channels = map(int, shape[1:])
        flops = 4.0 * batch * heads * sequence * sequence * channels / 2
        one, both = found[shape, "forward"], found[shape, "both"]
        forward.append(flops / one)
        backward.append(_BACKWARD_ATTENTION * flops / max(both - one, one / 10))
    return median(forward), median(backward)


def _start_s(cells: Cells, what: str = "layer") -> float:
    """Seconds to start one operation, from tiny ones: of a layer with its modules and views, or of operations alone."""
    return median(seconds / int(words[2]) for words, seconds in _named(cells, what) if words[0] == "tiny")


def _elements(cells: Cells) -> float:
    """Bytes per second of memory-bound operations."""
    start_s = _start_s(cells, "elements")
    rates = [
        int(words[1]) / max(seconds - int(words[2]) * start_s, seconds / 10)
        for words, seconds in _named(cells, "elements")
        if words[0] == "large"
    ]
    return median(rates)
