"""Evaluation batches cut into microbatches, equally many on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.runtime.batch import rows, split, to_device
from meshwright.runtime.ranks import global_rank, world_size
from meshwright.spec import Strategy

__all__ = ["evaluation_parts"]


def evaluation_parts(
    batches: Iterable[Any], strategy: Strategy, scope: str, device: torch.device
) -> Iterator[tuple[Any, bool]]:
    """Microbatches to run on this rank, and whether each counts: one that does not only keeps others' gathers company.

    Args:
        batches: the same whole batches on every rank with scope "global" (each takes its rows); else this rank's own.
        strategy: its microbatch is the most rows at once.
        scope: "global" or "local".
        device: this rank's.

    Raises:
        ConfigError: on every rank, when some rank was handed no batch at all while others were.
    """
    parts = _whole(batches, strategy) if scope == "global" else _own(batches, strategy.microbatch, device)
    for part, counts in parts:
        yield to_device(part, device), counts


def _whole(batches: Iterable[Any], strategy: Strategy) -> Iterator[tuple[Any, bool]]:
    for batch in batches:
        total = rows(batch)
        share = -(-total // strategy.dp)
        start = min(global_rank() * share, total)
        stop = min(start + share, total)
        for offset in range(0, share, strategy.microbatch):
            first, last = start + offset, min(start + offset + strategy.microbatch, stop)
            yield split(batch, first, last) if first < last else split(batch, 0, 1), first < last


def _own(batches: Iterable[Any], size: int, device: torch.device) -> Iterator[tuple[Any, bool]]:
    pieces = (split(b, i, min(i + size, rows(b))) for b in batches for i in range(0, rows(b), size))
    latest: Any = None
    while True:
        part = next(pieces, None)
        state = torch.tensor([float(part is not None), float(part is None and latest is None)], device=device)
        if world_size() > 1:
            dist.all_reduce(state)
        if state[0] == 0:
            return
        if state[1] > 0:
            raise ConfigError(
                f"{int(state[1])} ranks were handed no evaluation batch while others were",
                why="a rank without any batch cannot take part in the others' gathers",
                fix="hand every rank at least one batch",
            )
        latest = part if part is not None else latest
        yield latest, part is not None
