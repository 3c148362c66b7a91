"""A timeline on the screen: a row for each pipeline rank, time from left to right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from meshwright.cost.simulated import SimulatedStep
from meshwright.report.timeline.cells import divided, fullest, marks
from meshwright.report.timeline.figures import counted, figures, heading
from meshwright.report.timeline.palette import IDLE, LOOKS, Look, shade
from meshwright.schedule import COMPUTE, Span, Timeline
from meshwright.spec import Plan
from meshwright.spec.units import show_seconds

__all__ = ["timeline_view"]

#: Ranks that are shown; of more, evenly spaced ones.
_MOST_RANKS = 16
#: Screens narrower than this get short labels.
_NARROW = 60
_LEAST_CELLS = 8
#: Cells that an action has on average where actions are told apart.
_LEAST_LENGTH = 1.5
_BUBBLE = 7
_MARKS = {
    ">": ("> to a later stage", ""),
    "<": ("< to an earlier stage", ""),
    "x": ("x both", ""),
    "g": ("g gathers", LOOKS["gather"].colour),
    "r": ("r reduces", LOOKS["reduce"].colour),
}


def timeline_view(found: SimulatedStep, plan: Plan) -> RenderableType:
    """What is drawn, the drawing with its legend, and the figures."""
    first, second = heading(plan)
    title = Text.assemble((first, "bold"), "\n", (second, "dim"))
    return Group(title, _Drawing(found.timeline), *(Text(line) for line in figures(found, plan)))


class _Drawing:
    """The rows in the width that there is, with or without colours."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        timeline, width = self._timeline, options.max_width
        colours = console.color_system is not None and not console.no_color
        ranks = _chosen(len(timeline.ranks))
        labels = [str(rank) if width < _NARROW else f"rank {rank}" for rank in ranks]
        room = max(map(len, labels)) + 1
        cells = max(_LEAST_CELLS, width - room - _BUBBLE)
        cell_s = timeline.end_s / cells or 1.0
        computes = [span for span in timeline if span.row == "compute"]
        thin = sum(span.length_s for span in computes) < _LEAST_LENGTH * cell_s * len(computes)
        yield _line("", room, Text(" " * cells), Text("bubble"))
        seen: set[str] = set()
        for rank, label in zip(ranks, labels, strict=True):
            spans = [span for span in timeline.ranks[rank] if span.row in ("compute", "after")]
            shown = (divided if thin else fullest)(spans, cell_s, cells)
            row = (_coloured if colours else _plain)(shown, timeline.stages[rank], thin)
            yield _line(label, room, row, Text(f"{timeline.bubbles[rank]:.1%}"))
            line = [] if thin else marks(timeline.ranks[rank], cell_s, cells)
            if any(mark != " " for mark in line):
                seen.update(line)
                yield _line("", room, Text.assemble(*((m, _MARKS[m][1] if m in _MARKS else "") for m in line)))
        end = show_seconds(timeline.end_s)
        yield _line("", room, Text("0" + end.rjust(cells - 1)[: cells - 1], style="dim"))
        yield _legend(timeline, seen, colours=colours)
        yield from map(Text, _notes(timeline, len(ranks), cell_s, thin))


def _chosen(ranks: int) -> list[int]:
    """All ranks, or evenly spaced ones from the first to the last."""
    if ranks <= _MOST_RANKS:
        return list(range(ranks))
    return [round(index * (ranks - 1) / (_MOST_RANKS - 1)) for index in range(_MOST_RANKS)]


def _line(label: str, room: int, row: Text, bubble: Text | None = None) -> Text:
    line = Text(label.ljust(room), no_wrap=True, overflow="crop", end="\n")
    line.append_text(row)
    if bubble is not None:
        line.append_text(Text(bubble.plain.rjust(_BUBBLE)))
    return line


def _plain(shown: Iterable[Span | None], stages: tuple[int, ...], thin: bool) -> Text:
    """Letters and numbers; small letters for every second stage of a rank."""
    text = Text()
    for span, count in _blocks(shown, thin):
        if span is None:
            text.append(IDLE.fill * count)
            continue
        look = LOOKS[span.kind]
        letter = look.letter.lower() if span.stage in stages and stages.index(span.stage) % 2 else look.letter
        if thin or span.kind == "after":
            text.append(letter * count)
            continue
        label = f"{letter}{span.microbatch}"
        text.append((label if len(label) <= count else letter).ljust(count, look.fill))
    return text


def _coloured(shown: Iterable[Span | None], stages: tuple[int, ...], thin: bool) -> Text:
    """Blocks of colour with the microbatch's number."""
    text = Text()
    for span, count in _blocks(shown, thin):
        if span is None:
            text.append(" " * count)
            continue
        label = "" if thin or span.microbatch is None else str(span.microbatch)
        colour = LOOKS[span.kind].colour if thin else shade(span, stages)
        text.append((label if len(label) <= count else "").center(count), style=f"black on {colour}")
    return text


def _blocks(shown: Iterable[Span | None], thin: bool) -> Iterator[tuple[Span | None, int]]:
    """What is shown in a stretch of cells, and how many they are."""
    for _, group in groupby(shown, key=(lambda span: span and span.kind) if thin else None):
        cells = list(group)
        yield cells[0], len(cells)


def _legend(timeline: Timeline, seen: set[str], *, colours: bool) -> Text:
    kinds = [kind for kind in (*COMPUTE, "after") if any(span.kind == kind for span in timeline)]
    parts = [_swatch(LOOKS[kind], colours=colours) for kind in kinds] + [_swatch(IDLE, colours=colours)]
    parts += [Text(text, style=style) for mark, (text, style) in _MARKS.items() if mark in seen]
    if max(map(len, timeline.stages)) > 1:
        parts.append(Text("paler: a rank's later stages" if colours else "small letters: every second stage of a rank"))
    return Text("   ").join(parts)


def _swatch(look: Look, *, colours: bool) -> Text:
    if not colours:
        return Text(f"{look.letter} {look.name}")
    style = f"on {look.colour}" if look is not IDLE else ""
    return Text.assemble(("  ", style), f" {look.name}" if look is not IDLE else "blank: idle")


def _notes(timeline: Timeline, ranks: int, cell_s: float, thin: bool) -> Iterator[str]:
    if thin:
        yield (
            f"{counted(timeline.microbatches, 'microbatch', 'microbatches')} have no room: a column is "
            f"{show_seconds(cell_s)}, and the columns of a row are divided as its time is. Messages and collectives "
            "are left out. A wider screen or -o FILE.svg shows every action"
        )
    if ranks < len(timeline.ranks):
        yield f"{ranks} of {len(timeline.ranks)} ranks are shown; -o FILE.svg draws all"
