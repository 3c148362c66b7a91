"""A picture as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from meshwright.report.timeline.picture import Box, Label, Picture

__all__ = ["svg"]

#: How far below the middle of its letters a line of text stands, as a share of its size.
_MIDDLE = 0.35


def svg(picture: Picture) -> str:
    """A standalone document. Every box is a `rect` whose class is its kind; its `title` shows when pointed at."""
    return "\n".join(_lines(picture)) + "\n"


def _lines(picture: Picture) -> Iterator[str]:
    width, height = _short(picture.width), _short(picture.height)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif">'
    )
    yield f'<rect class="paper" width="{width}" height="{height}" fill="#ffffff"/>'
    yield from map(_box, picture.boxes)
    yield from map(_label, picture.labels)
    yield "</svg>"


def _box(box: Box) -> str:
    place = f'x="{_short(box.x)}" y="{_short(box.y)}" width="{_short(box.width)}" height="{_short(box.height)}"'
    head = f'<rect class={quoteattr(box.kind)} {place} fill="{box.colour}"'
    return f"{head}><title>{escape(box.title)}</title></rect>" if box.title else head + "/>"


def _label(label: Label) -> str:
    more = (f' text-anchor="{label.anchor}"' if label.anchor != "start" else "") + (
        ' font-weight="bold"' if label.bold else ""
    )
    baseline = label.y + _MIDDLE * label.size  # not every reader of SVG knows dominant-baseline
    place = f'x="{_short(label.x)}" y="{_short(baseline)}" font-size="{_short(label.size)}"'
    return f"<text {place}{more}>{escape(label.text)}</text>"


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
