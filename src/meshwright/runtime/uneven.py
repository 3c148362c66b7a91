"""Batches that are not equally many on all ranks, or shorter than the others: every rank takes part in every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.runtime.batch import rows, split
from meshwright.runtime.ranks import global_rank, world_size
from meshwright.spec import Strategy

__all__ = ["evaluation_parts", "share_of", "together"]


def together(batches: Iterable[Any], device: torch.device, *, least: int = 0) -> Iterator[tuple[Any, int]]:
    """This rank's batches until all ranks have run out, each with how many of its rows count.

    A rank that has run out goes on with the last batch it had, of which no row counts.

    Args:
        batches: this rank's.
        device: this rank's.
        least: rows that every rank has to have, where the model computes over those of all ranks.

    Raises:
        ConfigError: on every rank, when some rank was handed no batch at all while others were, or too few rows.
    """
    left, latest = iter(batches), None
    while True:
        batch = next(left, None)
        count = rows(batch) if batch is not None else 0
        said = [batch is not None, batch is None and latest is None, count < least]
        state = torch.tensor([float(one) for one in said], device=device)
        if world_size() > 1:
            dist.all_reduce(state)
        if state[0] == 0:
            return
        if state[1] > 0:
            raise ConfigError(
                f"{int(state[1])} ranks were handed no batch at all while others were",
                why="a rank without any batch has nothing to take part in a step with",
                fix="hand every rank at least one batch",
            )
        if state[2] > 0:
            raise ConfigError(
                f"{int(state[2])} ranks have less than {least} rows for a step",
                why="SyncBatchNorm normalises over the rows of all ranks, and rows without weight would count in it",
                fix="leave out shorter last batches, or use LayerNorm or GroupNorm",
            )
        latest = batch if batch is not None else latest
        yield latest, count


def share_of(batch: Any, strategy: Strategy) -> tuple[Any, int]:
    """This rank's part of rows that all ranks were handed, in order and as equal as they go, and how many it has.

    A rank without a row gets one that does not count.
    """
    total = rows(batch)
    share = -(-total // strategy.dp)
    start = min(global_rank() * share, total)
    stop = min(start + share, total)
    return (split(batch, start, stop), stop - start) if start < stop else (split(batch, 0, 1), 0)


def evaluation_parts(batches: Iterable[Any], strategy: Strategy, scope: str) -> Iterator[Any]:
    """This rank's microbatches of batches without training.

    Args:
        batches: the same whole batches on every rank with scope "global" (each takes its rows); else this rank's own.
        strategy: its microbatch is the most rows at once.
        scope: "global" or "local".
    """
    for batch in batches:
        mine, count = share_of(batch, strategy) if scope == "global" else (batch, rows(batch))
        for start in range(0, count, strategy.microbatch):
            yield split(mine, start, min(start + strategy.microbatch, count))
