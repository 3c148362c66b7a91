"""A picture as PNG, by Pillow, which only this file needs."""

from __future__ import annotations

import io

from meshwright.errors import ConfigError
from meshwright.report.timeline.picture import Picture

__all__ = ["png", "require_pillow"]

#: Pixels of the file for each pixel of the picture, where it is not too large for that.
_SHARP, _SHARP_WIDTH = 2, 4000
_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}


def require_pillow() -> None:
    """Refuse where Pillow is not installed.

    Raises:
        ConfigError: with what installs it.
    """
    try:
        import PIL  # noqa: F401  (only whether it is there)
    except ImportError as error:
        raise ConfigError(
            "a .png needs Pillow, which is not installed",
            why="only PNG pictures use it; SVG needs nothing",
            fix="write a .svg, or install the extra: pip install 'meshwright[pictures]'",
        ) from error


def png(picture: Picture) -> bytes:
    """The bytes of a PNG file.

    Raises:
        ConfigError: Pillow is not installed.
    """
    require_pillow()
    from PIL import Image, ImageDraw, ImageFont

    sharp = _SHARP if picture.width <= _SHARP_WIDTH else 1
    image = Image.new("RGB", (round(picture.width * sharp), round(picture.height * sharp)), "white")
    canvas = ImageDraw.Draw(image)
    for box in picture.boxes:
        left, top = box.x * sharp, box.y * sharp
        right, bottom = max(left, left + box.width * sharp - 1), max(top, top + box.height * sharp - 1)
        canvas.rectangle((left, top, right, bottom), fill=box.colour)
    fonts = {size: ImageFont.load_default(size * sharp) for size in {label.size for label in picture.labels}}
    for label in picture.labels:
        place = (label.x * sharp, label.y * sharp)
        width = sharp / 4 if label.bold else 0
        canvas.text(
            place,
            label.text,
            fill="black",
            font=fonts[label.size],
            anchor=_ANCHORS[label.anchor],
            stroke_width=width,
        )
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
