"""How each kind of action looks: a letter, a fill, a colour."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.schedule import Span

__all__ = ["IDLE", "LOOKS", "Look", "look_of", "shade"]


class Look(NamedTuple):
    """A kind: what it is called, its letter and filling without colour, its colour as #rrggbb."""

    name: str
    letter: str
    fill: str
    colour: str


#: The letters are those of schedule files (`schedule/files.py`), the colours tell apart without red against green
#: (Okabe and Ito, Color Universal Design, 2008).
LOOKS = {
    "forward": Look("forward", "F", "-", "#56b4e9"),
    "backward": Look("backward", "B", "=", "#e69f00"),
    "backward-input": Look("backward of the input", "I", "=", "#e69f00"),
    "backward-weight": Look("backward of the weights", "W", "~", "#5fbf9f"),
    "after": Look("after the schedule", "#", "#", "#8c8c8c"),
    "send": Look("message sent", ">", " ", "#4d4d4d"),
    "receive": Look("message received", "<", " ", "#a6a6a6"),
    "gather": Look("gather", "g", " ", "#0072b2"),
    "release": Look("release", "", " ", "#cccccc"),
    "reduce": Look("reduce", "r", " ", "#cc5577"),
}
IDLE = Look("idle", ".", ".", "#eeeeee")
#: How much paler each further stage of a rank is than the one before it, and odd microbatches than even ones.
_PALER, _PALEST, _ODD = 0.3, 0.6, 0.12


def look_of(span: Span | None) -> Look:
    """How a span looks; without one, idle."""
    return IDLE if span is None else LOOKS[span.kind]


def shade(span: Span, stages: tuple[int, ...]) -> str:
    """The colour of a span of a rank with these stages: paler for its later stages, and slightly for odd microbatches,
    so that neighbours differ."""
    later = stages.index(span.stage) if span.stage in stages else 0
    pale = min(_PALEST, _PALER * later)
    if span.microbatch is not None and span.microbatch % 2 and span.row == "compute":
        pale += _ODD
    parts = (int(LOOKS[span.kind].colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * pale):02x}" for part in parts)
