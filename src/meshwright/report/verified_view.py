"""A verification on the screen: every module's largest deviations as parts of what is allowed."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.report.style import numbers
from meshwright.spec.verified import Verified

__all__ = ["share", "verified_view"]

_MOST_SHOWN = 8


def verified_view(found: Verified) -> RenderableType:
    """What was run and how far each part of it is from one process; the verdict itself is `str(found)`."""
    return Group(*_what(found), *([_table(found)] if found.modules else []), *_remarks(found))


def share(part: float) -> str:
    """A part of what is allowed."""
    if part == 0:
        return "0"
    return f"{part:.1e}" if part < 1e100 else "none is allowed"


def _what(found: Verified) -> list[Text]:
    copy = found.copy
    lines = [
        f"{copy.model}: {copy.kind}, {copy.blocks} blocks, {copy.parameters:,} parameters",
        f"classes: {', '.join(copy.classes)}",
        f"made smaller: {', '.join(copy.changes)}" if copy.changes else "run as it is",
        f"besides: {', '.join(copy.notes)}" if copy.notes else "",
        f"the loss is the mean over {copy.labels}" if copy.labels != "what its loss counts" else "",
        *(f"divided {words}" for words in copy.divided),
        f"{found.strategy}: {found.ranks} ranks, {found.global_batch} sequences a step, 3 steps of SGD with momentum "
        "and of AdamW, float64" + (", clipped" if found.clipped else ""),
    ]
    return [Text(line) for line in lines if line]


def _table(found: Verified) -> RenderableType:
    table = numbers("Largest deviation from one process, as a part of what is allowed")
    table.add_column("module", overflow="fold")
    table.add_column("class", style="dim", overflow="fold")
    table.add_column("parameters", justify="right")
    table.add_column("gradient", justify="right")
    table.add_column("update", justify="right")
    for row in found.modules:
        style = "red" if max(row.gradient, row.update) > 1 else ""
        cells = (Text(row.name), Text(row.kind), f"{row.parameters:,}", share(row.gradient), share(row.update))
        table.add_row(*cells, style=style)
    table.add_section()
    table.add_row("loss", "", "", share(found.loss), "")
    table.add_row("gradient norm", "", "", share(found.norm), "")
    return table


def _remarks(found: Verified) -> list[Text]:
    lines = [f"{share(part)} against {name}" for name, part in found.against.items()]
    if found.worst:
        lines.append(f"worst: {found.worst}")
    beyond = found.mismatches[:_MOST_SHOWN]
    lines += [f"beyond its bound: {told}" for told in beyond]
    if found.beyond > len(beyond):
        lines.append(f"and {found.beyond - len(beyond)} more")
    if found.log:
        lines.append(found.log)
    engine, *others = found.against.values() or (0.0,)
    if engine <= 1 < max(others, default=0.0):
        lines.append(
            "equal to one process with the same microbatches, but not to the whole batch at once: the loss or the "
            "model does not add up over sequences"
        )
    return [Text(line) for line in lines]
