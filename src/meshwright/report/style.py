"""What the tables share."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from rich import box
from rich.table import Table

__all__ = ["CATEGORY_HEADERS", "Scale", "bar", "numbers", "totals"]

_UNITS = ((2**30, "GiB"), (2**20, "MiB"))
_EIGHTHS = " ▏▎▍▌▋▊▉"

#: Categories of memory as narrow columns.
CATEGORY_HEADERS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "gathered": "gathered",
    "activations": "acts",
    "logits": "logits",
}


class Scale(Struct, frozen=True):
    """One unit for all cells of a table: GiB, or MiB where the largest is below 10 GiB."""

    step: int
    unit: str

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Scale:
        """The unit for sizes in bytes."""
        return cls(*(_UNITS[0] if max(sizes, default=0) >= 10 * 2**30 else _UNITS[1]))

    def show(self, size: int) -> str:
        """Bytes in this unit, without its name; a dash for nothing."""
        return "-" if not size else f"{size / self.step:,.1f}"


def bar(share: float, width: int) -> str:
    """A bar of `share` (0 to 1) of `width` cells, to an eighth of a cell; never empty for anything above 0."""
    eighths = max(round(max(0.0, min(1.0, share)) * width * 8), 1 if share > 0 else 0)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def numbers(title: str) -> Table:
    """A table of numbers."""
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def totals(title: str) -> Table:
    """A table with a total at its end."""
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, pad_edge=False)
