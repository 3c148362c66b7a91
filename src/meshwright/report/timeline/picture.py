"""A timeline as shapes on a plane, whatever format they are written in: a row for each pipeline rank."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from msgspec import Struct

from meshwright.cost.simulated import SimulatedStep
from meshwright.report.timeline.figures import counted, figures, heading
from meshwright.report.timeline.palette import IDLE, LOOKS, shade
from meshwright.schedule import COMPUTE, Row, Span, Timeline
from meshwright.spec import Plan
from meshwright.spec.units import show_seconds

__all__ = ["Box", "Label", "Picture", "draw"]

_LEFT, _RIGHT, _MARGIN = 64.0, 70.0, 16.0
#: Heights: of a row's compute, of a thin line of messages or collectives, of the space between rows.
_COMPUTE, _THIN, _BETWEEN = 22.0, 5.0, 7.0
#: Pixels of an action on average where there is room, and of the whole time at least.
_BLOCK, _LEAST_WIDTH = 22.0, 880.0
_TEXT, _SMALL, _DIGIT = 12.0, 10.0, 6.2
_LEAST_BOX = 0.4
_TEXT_WIDTH = 6.4


class Box(Struct, frozen=True):
    """A rectangle. `kind` is what it stands for: a kind of action, `idle` behind a rank's row, `waits` or `legend`."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    kind: str
    title: str = ""


class Label(Struct, frozen=True):
    """A line of text at a height where its middle lies; `anchor` says which part of it lies at `x`."""

    x: float
    y: float
    text: str
    size: float = _TEXT
    anchor: str = "start"
    bold: bool = False


class Picture(Struct, frozen=True):
    """Shapes in the order in which they are drawn, in pixels."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    labels: tuple[Label, ...]


def draw(found: SimulatedStep, plan: Plan, *, most_width: float = 20000.0) -> Picture:
    """The picture of a step, as wide as its actions need and no wider than `most_width`."""
    return _Layout(found, plan, most_width).picture()


class _Layout:
    def __init__(self, found: SimulatedStep, plan: Plan, most_width: float) -> None:
        self.found, self.plan, self.timeline = found, plan, found.timeline
        computes = [span for span in self.timeline if span.row == "compute"]
        mean = sum(span.length_s for span in computes) / max(1, len(computes))
        wanted = self.timeline.end_s / mean * _BLOCK if mean else _LEAST_WIDTH
        self.across = min(max(wanted, _LEAST_WIDTH), most_width - _LEFT - _RIGHT)
        self.scale = self.across / (self.timeline.end_s or 1.0)
        self.width = _LEFT + self.across + _RIGHT
        rows: list[Row] = ["messages", "collectives"]
        #: The thin lines that there is something for.
        self.thin = [row for row in rows if any(span.row == row and span.kind != "release" for span in self.timeline)]
        self.boxes: list[Box] = []
        self.labels: list[Label] = []

    def picture(self) -> Picture:
        y = self._titles(_MARGIN + _TEXT / 2)
        for rank in range(len(self.timeline.ranks)):
            y = self._rank(rank, y)
        y = self._axis(y)
        y = self._legend(y)
        for line in figures(self.found, self.plan):
            y = self._text(line, y)
        return Picture(self.width, y + _MARGIN - _TEXT / 2, tuple(self.boxes), tuple(self.labels))

    def _text(self, text: str, y: float, *, bold: bool = False) -> float:
        for line in textwrap.wrap(text, int((self.width - 2 * _MARGIN) / _TEXT_WIDTH)):
            self.labels.append(Label(_MARGIN, y, line, bold=bold))
            y += 1.5 * _TEXT
        return y

    def _titles(self, y: float) -> float:
        first, second = heading(self.plan)
        y = self._text(second, self._text(first, y, bold=True))
        self.labels.append(Label(self.width - _MARGIN, y, "bubble", _SMALL, "end"))
        return y + _TEXT

    def _rank(self, rank: int, y: float) -> float:
        timeline, stages = self.timeline, self.timeline.stages[rank]
        middle = y + _COMPUTE / 2
        self.labels.append(Label(_MARGIN, middle, f"rank {rank}"))
        self.labels.append(Label(self.width - _MARGIN, middle, f"{timeline.bubbles[rank]:.1%}", anchor="end"))
        self.boxes.append(
            Box(_LEFT, y, timeline.makespan_s * self.scale, _COMPUTE, IDLE.colour, "idle", f"rank {rank}, idle")
        )
        tops: dict[Row, float] = {"compute": y, "after": y, "messages": y + _COMPUTE, "collectives": y + _COMPUTE}
        for place, row in enumerate(self.thin):
            tops[row] = y + _COMPUTE + 1 + place * _THIN
        for span in timeline.ranks[rank]:
            self._span(span, tops[span.row], stages)
        return y + _COMPUTE + len(self.thin) * _THIN + _BETWEEN

    def _span(self, span: Span, y: float, stages: tuple[int, ...]) -> None:
        x, width = _LEFT + span.start_s * self.scale, max(_LEAST_BOX, span.length_s * self.scale)
        wide = span.row in ("compute", "after")
        height = _COMPUTE if wide else _THIN - 1
        colour = shade(span, stages) if wide else LOOKS[span.kind].colour
        self.boxes.append(Box(x, y, width, height, colour, span.kind, _told(span)))
        if span.waits_s:
            waits = span.waits_s * self.scale
            title = f"waits {show_seconds(span.waits_s)} in all for gathered parameters"
            self.boxes.append(Box(x + width - waits, y, waits, height, IDLE.colour, "waits", title))
        if span.row == "compute":
            text = str(span.microbatch)
            if len(text) * _DIGIT < width:
                self.labels.append(Label(x + width / 2, y + height / 2, text, _SMALL, "middle"))

    def _axis(self, y: float) -> float:
        for part in range(5):
            x = _LEFT + self.across * part / 4
            anchor = ("start", "middle", "middle", "middle", "end")[part]
            text = show_seconds(self.timeline.end_s * part / 4) if part else "0"
            self.labels.append(Label(x, y + _SMALL / 2, text, _SMALL, anchor))
        return y + 2.5 * _TEXT

    def _legend(self, y: float) -> float:
        x = _MARGIN
        for colour, text in _legend(self.timeline):
            room = 2 * _TEXT + len(text) * _TEXT_WIDTH
            if x + room > self.width and x > _MARGIN:
                x, y = _MARGIN, y + 1.6 * _TEXT
            if colour:
                self.boxes.append(Box(x, y - _TEXT / 2, _TEXT, _TEXT, colour, "legend"))
            self.labels.append(Label(x + (1.4 * _TEXT if colour else 0), y, text))
            x += room + _TEXT
        return y + 2 * _TEXT


def _told(span: Span) -> str:
    """A span in words."""
    text = LOOKS[span.kind].name
    if span.stage is not None:
        text += f", stage {span.stage}, microbatch {span.microbatch}"
    if span.peer is not None:
        text += f", {'to' if span.kind == 'send' else 'from'} rank {span.peer}"
    if span.unit is not None:
        text += f", unit {span.unit}"
    return f"{text}: {show_seconds(span.length_s)} from {show_seconds(span.start_s)}"


def _legend(timeline: Timeline) -> Iterator[tuple[str, str]]:
    """Colours and what they mean; no colour where words are enough."""
    there = {span.kind for span in timeline}
    for kind in (*COMPUTE, "after"):
        if kind in there:
            yield LOOKS[kind].colour, LOOKS[kind].name
    yield IDLE.colour, "idle"
    for kind in ("send", "receive", "gather", "reduce"):
        if kind in there:
            yield LOOKS[kind].colour, LOOKS[kind].name
    most = max(map(len, timeline.stages), default=0)
    if most > 1:
        yield "", f"paler: the later of a rank's {counted(most, 'stage')}"
    if "forward" in there:
        yield "", "numbers: microbatches"
