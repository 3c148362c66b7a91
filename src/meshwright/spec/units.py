"""Sizes and times as people read them: bytes in code, GiB (2^30) and MiB on screen."""

from __future__ import annotations

__all__ = ["show_bytes", "show_seconds"]

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_STEPS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def show_bytes(size: int) -> str:
    """Three significant digits with a binary unit: `show_bytes(1_610_612_736)` is `1.50 GiB`."""
    for step, unit in _STEPS:
        if abs(size) >= step:
            value = size / step
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{size} B"


def show_seconds(seconds: float) -> str:
    """Three significant digits or more: `show_seconds(0.0421)` is `42.1 ms`, `show_seconds(1234)` is `1,234 s`."""
    for step, unit in _TIMES:
        if abs(seconds) >= step:
            value = seconds / step
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{value:,.{digits}f} {unit}"
    return f"{seconds * 1e6:.1f} us" if abs(seconds) >= 5e-8 else "0 s"
