"""A timeline as a file: a picture, or a trace for Perfetto, by the ending of its name."""

from __future__ import annotations

from pathlib import Path

from meshwright.cost.simulated import SimulatedStep
from meshwright.errors import ConfigError
from meshwright.report.timeline.picture import draw
from meshwright.report.timeline.png import png, require_pillow
from meshwright.report.timeline.svg import svg
from meshwright.report.trace import write_trace
from meshwright.spec import Plan
from meshwright.spec.files import write_bytes, write_text

__all__ = ["OUTPUTS", "require_output", "write_timeline"]

#: Endings of files that are written.
OUTPUTS = (".svg", ".png", ".json")
_PNG_WIDTH = 8000.0


def require_output(path: Path) -> None:
    """Refuse a file that cannot be written whatever is drawn, before anything is worked out.

    Raises:
        ConfigError: its ending is not known, it is a folder, or what writes it is not installed.
    """
    ending = path.suffix.lower()
    if ending not in OUTPUTS:
        raise ConfigError(
            f"cannot write {path}: {f'no picture ends in {ending}' if ending else 'its name has no ending'}",
            why="the ending says what is written: a picture (.svg, .png), or a trace for ui.perfetto.dev (.json)",
            fix=f"write for example -o {path.with_suffix('.svg').name if path.name else 'timeline.svg'}",
        )
    if path.is_dir():
        raise ConfigError(f"cannot write {path}", why="it is a folder", fix="give the name of a file")
    if ending == ".png":
        require_pillow()


def write_timeline(path: Path, found: SimulatedStep, plan: Plan) -> None:
    """Write what the ending of a file's name says.

    Raises:
        ConfigError: as `require_output`, or the folder cannot be written.
    """
    require_output(path)
    ending = path.suffix.lower()
    if ending == ".svg":
        write_text(path, svg(draw(found, plan)))
    elif ending == ".png":
        write_bytes(path, png(draw(found, plan, most_width=_PNG_WIDTH)))
    else:
        write_trace(path, [found.timeline])
