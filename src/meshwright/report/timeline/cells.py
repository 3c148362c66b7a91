"""A rank's time in equal cells: which action each cell shows."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.schedule import Span

__all__ = ["divided", "fullest", "marks"]


def fullest(spans: Sequence[Span], cell_s: float, count: int) -> list[Span | None]:
    """For each cell what takes most of it: a span, or None where the rank is idle."""
    found: list[Span | None] = []
    for shares in _shares(spans, cell_s, count):
        most = max(shares, key=lambda index: shares[index], default=-1)
        idle = 1 - sum(shares.values())
        found.append(spans[most] if shares and shares[most] >= idle else None)
    return found


def divided(spans: Sequence[Span], cell_s: float, count: int) -> list[Span | None]:
    """The same where a cell has many spans: the cells of a row are divided among kinds as its time is. What a cell does
    not show is owed to the next; a span stands for all of its kind."""
    owed: dict[str, float] = {"idle": 0.0}
    one: dict[str, Span | None] = {"idle": None}
    found: list[Span | None] = []
    for shares in _shares(spans, cell_s, count):
        owed["idle"] += 1 - sum(shares.values())
        for index, share in shares.items():
            kind = spans[index].kind
            one[kind] = spans[index]
            owed[kind] = owed.get(kind, 0.0) + share
        most = max(owed, key=lambda kind: owed[kind])
        owed[most] -= 1
        found.append(one[most])
    return found


def _shares(spans: Sequence[Span], cell_s: float, count: int) -> list[dict[int, float]]:
    """By cell, the share of it that each span takes, by the span's place. Pauses lie at a span's end."""
    cells: list[dict[int, float]] = [{} for _ in range(count)]
    for index, span in enumerate(spans):
        start, end = span.start_s / cell_s, (span.end_s - span.waits_s) / cell_s
        for cell in range(int(start), min(count, int(end) + 1)):
            share = min(end, cell + 1) - max(start, cell)
            if share > 0:
                cells[cell][index] = share
    return cells


def marks(spans: Sequence[Span], cell_s: float, count: int) -> list[str]:
    """For each cell a mark of what is communicated: messages where they leave, collectives where they run."""
    cells = [" "] * count
    for span in spans:
        first = min(count - 1, int(span.start_s / cell_s))
        if span.kind in ("gather", "reduce") and span.length_s > 0:
            for cell in range(first, min(count - 1, int(span.end_s / cell_s)) + 1):
                if cells[cell] in " g":
                    cells[cell] = span.kind[0]
        elif span.kind == "send" and span.stage is not None and span.peer_stage is not None:
            way = ">" if span.peer_stage > span.stage else "<"
            cells[first] = way if cells[first] in (" ", "g", "r", way) else "x"
    return cells
