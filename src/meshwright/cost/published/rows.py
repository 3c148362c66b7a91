"""A published measurement as it stands in a table: cells of text, of which any may be empty."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ConfigError

__all__ = ["PublishedRow", "Unpriced", "read_rows"]

_SECTION = re.compile(r'section "+([^"]+)"+')
_RELEASE = re.compile(r"\b([0-9]{2}\.[0-9]{2}(?:\.[0-9]{2})?)(?= NeMo| container| release)", re.IGNORECASE)
_GIB = 2**30
#: Larger numbers are mistakes: of layers, of channels, of ranks along one dimension, of anything else.
_MOST = {
    "layers": 2000,
    "hidden": 10**6,
    "heads": 10**5,
    **dict.fromkeys(("tp", "pp", "vp", "cp", "ep"), 4096),
    "gpus": 10**6,
    "": 10**7,
}
#: What tables write into a cell that has nothing.
_NOTHING = ("", "-", "--", "\u2013", "n/a", "na", "nan", "none", "null", "?", "xxx", "xxxx", "oom")


class Unpriced(Exception):
    """A row cannot be priced; the text says what is not published or not described."""


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One row of a table: its file's name, its number from 0, and its cells.

    The column `distrust`, where a table has it, gives the reason why a row is not to be compared.
    """

    file: str
    index: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """A cell, "" where nothing was published."""
        return self.cells.get(column, "").strip()

    def has(self, *words: str) -> bool:
        """Whether the notes contain one of the words, whatever their case."""
        notes = self.text("notes").lower()
        return any(word.lower() in notes for word in words)

    def number(self, column: str) -> float | None:
        """A cell as a number, None where it is empty.

        Raises:
            Unpriced: something else stands there.
        """
        text = self.text(column)
        if text.lower() in _NOTHING:
            return None
        plain = text.replace(",", "").lstrip("~≈<>= ")
        share = plain.endswith("%")
        try:
            value = float(plain.rstrip("% "))
        except ValueError:
            raise Unpriced(f"{column} is {text!r}, which is no number") from None
        if not math.isfinite(value):
            raise Unpriced(f"{column} is {text!r}, which is no number")
        return value / 100 if share else value

    def maybe(self, column: str) -> float | None:
        """A cell as a number, None where it is empty or none."""
        try:
            return self.number(column)
        except Unpriced:
            return None

    def count(self, column: str, default: int | None = None) -> int:
        """A cell as a whole number.

        Raises:
            Unpriced: it is empty without a default, or no whole number.
        """
        value = self.number(column)
        if value is None and default is not None:
            return default
        if value is None:
            raise Unpriced(f"{column} is not published")
        if value != int(value):
            raise Unpriced(f"{column} is {value}, which is no whole number")
        if not 0 <= value <= _MOST.get(column, _MOST[""]):
            raise Unpriced(f"{column} is {value:g}, which cannot be right")
        return int(value)

    @property
    def section(self) -> str:
        """The part of its document that the row stands in, "" where the notes name none."""
        match = _SECTION.search(self.text("notes"))
        return match[1] if match else ""

    @property
    def release(self) -> str:
        """The release of the software that ran it, "" where the notes name none."""
        match = _RELEASE.search(self.text("notes"))
        return match[1] if match else ""

    @property
    def out_of_memory(self) -> bool:
        """Whether the row was published as running out of memory."""
        return bool(re.search(r"\bOOMs?\b|out of memory", f"{self.text('micro_batch')} {self.text('notes')}"))

    @property
    def peak_bytes(self) -> int | None:
        """The published peak in bytes, None where there is none. Tables write GB for what tools count in GiB."""
        peak = self.maybe("peak_mem_gb")
        return int(peak * _GIB) if peak and peak > 0 and not self.out_of_memory else None


def read_rows(path: str | Path) -> tuple[PublishedRow, ...]:
    """The rows of a table of published measurements.

    Raises:
        ConfigError: the file cannot be read, or its columns are not those of training runs.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            table = [
                {key.strip().lower(): value for key, value in row.items() if key and isinstance(value, str)}
                for row in csv.DictReader(file)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read", why=str(error), fix="give a CSV file with a header") from error
    columns = set(table[0]) if table else set()
    missing = [name for name in ("model", "gpu_type") if name not in columns]
    if "layers" in columns and "hidden" in columns:
        missing = [name for name in missing if name != "model"]
    if missing:
        raise ConfigError(
            f"{path} has no {' and no '.join(missing)} column",
            why="a training run names a model (or layers and hidden) and a device" if table else "it has no rows",
            fix="give a CSV of training runs with a header: source, model, ..., gpus, gpu_type, ..., step_time_s",
        )
    return tuple(PublishedRow(file=Path(path).stem, index=index, cells=row) for index, row in enumerate(table))
