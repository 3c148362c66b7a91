"""Everything under every layout in `make test-all`, and a part of it, in turn, in `make test`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

__all__ = ["LAYOUTS", "every", "some"]

#: Ranks and ZeRO stages.
LAYOUTS = tuple((world, zero) for world in (2, 3) for zero in (0, 1, 2, 3))


def every(cases: Sequence[tuple[Any, ...]], fast: Collection[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test: each case with each layout behind it; those that are not in `fast` are slow."""
    rows = dict.fromkeys([*fast, *((*case, *layout) for case in cases for layout in LAYOUTS)])
    unknown = [row for row in fast if row[-2:] not in LAYOUTS]
    assert not unknown, f"no layout of theirs: {unknown}"
    return [pytest.param(*row, marks=() if row in fast else pytest.mark.slow) for row in rows]


def some(fast: Sequence[tuple[Any, ...]], slow: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test: the fast ones, and those that `make test-all` adds (a fast one is not added again)."""
    return [*fast, *(pytest.param(*row, marks=pytest.mark.slow) for row in slow if row not in fast)]
