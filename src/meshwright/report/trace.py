"""Timelines as a trace that ui.perfetto.dev and chrome://tracing open: JSON trace events.

The format: "Trace Event Format" (Google, 2016), to which both link.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.schedule import Row, Span, Timeline
from meshwright.spec.files import write_text

__all__ = ["trace_events", "write_trace"]

_US = 1e6
_ROWS: tuple[tuple[str, tuple[Row, ...]], ...] = (
    ("", ("compute", "after")),
    (" messages", ("messages",)),
    (" collectives", ("collectives",)),
)
Event = dict[str, Any]


def trace_events(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Timelines side by side, as one JSON object.

    A pipeline rank is a process. Each timeline has there a thread that computes, which bears its name (`simulated`,
    `executed`), and threads for messages and collectives; what overlaps there goes to further threads of the same name
    with a number, since events of one thread may not overlap.

    Returns:
        `traceEvents`: for each span a complete event (`ph` X) with `ts` and `dur` in microseconds, and `stage`,
        `microbatch`, `unit` and `peer` among its `args`; for each process and thread its name (`ph` M).
    """
    events: list[Event] = []
    for rank in range(max((len(timeline.ranks) for timeline in timelines), default=0)):
        events.append(_told(rank, 0, "process_name", name=f"pipeline rank {rank}"))
        events.append(_told(rank, 0, "process_sort_index", sort_index=rank))
        thread = 0
        for timeline in timelines:
            for name, spans in _threads(timeline, rank):
                thread += 1
                events.append(_told(rank, thread, "thread_name", name=name))
                events.append(_told(rank, thread, "thread_sort_index", sort_index=thread))
                events += [_event(span, thread) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: Path, timelines: Sequence[Timeline]) -> None:
    """Write a trace of one timeline, or of several side by side.

    Raises:
        ConfigError: the folder cannot be written.
    """
    write_text(path, json.dumps(trace_events(timelines), separators=(",", ":")) + "\n")


def _threads(timeline: Timeline, rank: int) -> Iterator[tuple[str, list[Span]]]:
    """The threads of a rank by name; what computes first."""
    spans = timeline.ranks[rank] if rank < len(timeline.ranks) else ()
    for ending, rows in _ROWS:
        lanes: list[list[Span]] = []
        for span in sorted((one for one in spans if one.row in rows), key=lambda one: (one.start_s, one.end_s)):
            for lane in lanes:
                if lane[-1].end_s <= span.start_s:
                    lane.append(span)
                    break
            else:
                lanes.append([span])
        for number, lane in enumerate(lanes, start=1):
            yield timeline.name + ending + (f" {number}" if number > 1 else ""), lane


def _event(span: Span, thread: int) -> Event:
    told = {name: getattr(span, name) for name in ("stage", "microbatch", "unit", "peer")}
    args = {name: value for name, value in told.items() if value is not None}
    if span.waits_s:
        args["waits_us"] = span.waits_s * _US
    return {
        "name": span.kind if span.microbatch is None else f"{span.kind} {span.microbatch}",
        "cat": span.row,
        "ph": "X",
        "ts": span.start_s * _US,
        "dur": span.length_s * _US,
        "pid": span.rank,
        "tid": thread,
        "args": args,
    }


def _told(rank: int, thread: int, what: str, **args: Any) -> Event:
    """What a viewer is told of a process or thread."""
    return {"name": what, "ph": "M", "ts": 0, "dur": 0, "pid": rank, "tid": thread, "args": args}
