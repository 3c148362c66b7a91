"""Sizes as people read them: bytes in code, GiB (2^30) and MiB on screen."""

from __future__ import annotations

__all__ = ["show_bytes"]

_STEPS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def show_bytes(size: int) -> str:
    """Three significant digits with a binary unit: `show_bytes(1_610_612_736)` is `1.50 GiB`."""
    for step, unit in _STEPS:
        if abs(size) >= step:
            value = size / step
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{size} B"
