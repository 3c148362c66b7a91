"""Timelines: what each pipeline rank does in a step and when, simulated or executed, as one plain noun for both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from meshwright.schedule.action import COMPUTE, Kind

__all__ = ["Row", "Span", "SpanKind", "Timeline"]

#: What a span is of: an action of the schedule, or `after`: what comes after the schedule (the gradients' norm, the
#: optimizer, and in a simulated timeline whatever else is priced there).
SpanKind = Kind | Literal["after"]
#: The things of a rank that run beside each other.
Row = Literal["compute", "messages", "collectives", "after"]
_MESSAGES = ("send", "receive")


class Span(NamedTuple):
    """One action and its time, in seconds since the step began. A tuple, because there may be hundreds of thousands.

    Attributes:
        rank: the pipeline rank.
        kind: what is done.
        start_s, end_s: of a message: when it leaves and when it is there, on both of its ends.
        stage, microbatch: as in `Action`; None for `after`.
        unit: for gather, release and reduce: the ZeRO unit; None stands for every unit of the stage.
        peer: for send and receive: the other rank.
        peer_stage: for send and receive: the stage at the other end.
        waits_s: of a compute action: how long it pauses in between for parameters that are still being gathered.
    """

    rank: int
    kind: SpanKind
    start_s: float
    end_s: float
    stage: int | None = None
    microbatch: int | None = None
    unit: int | None = None
    peer: int | None = None
    peer_stage: int | None = None
    waits_s: float = 0.0

    @property
    def length_s(self) -> float:
        """From its start to its end."""
        return self.end_s - self.start_s

    @property
    def row(self) -> Row:
        """The part of its rank that does it."""
        if self.kind in COMPUTE:
            return "compute"
        if self.kind == "after":
            return "after"
        return "messages" if self.kind in _MESSAGES else "collectives"


@dataclass(frozen=True)
class Timeline:
    """A step of one pipeline, on every rank.

    Args:
        name: where it comes from: `simulated` or `executed`.
        ranks: by pipeline rank its spans. Those that compute are in order and do not overlap.
    """

    name: str
    ranks: tuple[tuple[Span, ...], ...]

    def __iter__(self) -> Iterator[Span]:
        for spans in self.ranks:
            yield from spans

    @cached_property
    def makespan_s(self) -> float:
        """From the start of the step to the end of the schedule on the last rank."""
        return max((span.end_s for span in self if span.kind != "after"), default=0.0)

    @cached_property
    def end_s(self) -> float:
        """From the start of the step to its end, what comes after the schedule included."""
        return max((span.end_s for span in self), default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """By rank: how long it computes in the schedule."""
        return tuple(sum(s.length_s - s.waits_s for s in spans if s.row == "compute") for spans in self.ranks)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """By rank: how long it does not compute before the schedule's end, whatever it waits for."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """By rank: idle time as a share of the schedule's."""
        return tuple(idle / self.makespan_s if self.makespan_s else 0.0 for idle in self.idle_s)

    @property
    def bubble(self) -> float:
        """Idle time as a share of the schedule's, all ranks together."""
        return sum(self.bubbles) / len(self.ranks) if self.ranks else 0.0

    @cached_property
    def microbatches(self) -> int:
        """How many each rank computes."""
        return 1 + max((span.microbatch for span in self if span.microbatch is not None), default=-1)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """By rank: the stages that it computes, ascending."""
        return tuple(
            tuple(sorted({s.stage for s in spans if s.stage is not None and s.row == "compute"}))
            for spans in self.ranks
        )
