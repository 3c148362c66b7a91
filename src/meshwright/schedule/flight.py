"""How many microbatches a rank holds at once: what its activations are multiplied by."""

from __future__ import annotations

from msgspec import Struct

from meshwright.schedule.action import Schedule

__all__ = ["InFlight", "in_flight"]


class InFlight(Struct, frozen=True, kw_only=True):
    """One rank: the most microbatches that are between forward and backward at one time.

    `peak` counts those of all its stages together, `stages` those of each stage alone.
    """

    peak: int
    stages: dict[int, int]


def in_flight(schedule: Schedule, *, until: str = "backward-weight") -> tuple[InFlight, ...]:
    """The microbatches held by each rank.

    A microbatch is held from the start of its forward to the end of its backward. Where the backward is split, part of
    what it holds is free after the input half and the rest after the weight half: `until` says which of both is counted
    (`backward-input` or `backward-weight`).
    """
    ends = ("backward", until)
    found = []
    for actions in schedule.ranks:
        held: dict[int, int] = {}
        peaks: dict[int, int] = {}
        now = peak = 0
        for kind, stage, *_ in actions:
            if kind == "forward":
                now += 1
                peak = max(peak, now)
                held[stage] = held.get(stage, 0) + 1
                peaks[stage] = max(peaks.get(stage, 0), held[stage])
            elif kind in ends:
                now -= 1
                held[stage] -= 1
        found.append(InFlight(peak=peak, stages=peaks))
    return tuple(found)
