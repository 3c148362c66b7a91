"""Batches that are not equally many on all ranks, or shorter than the others: every rank takes part in every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import ConfigError, RankFailure
from meshwright.runtime.batch import rows, split
from meshwright.runtime.ranks import world_size
from meshwright.runtime.same_batch import SameBatch
from meshwright.spec import Job, Strategy

__all__ = ["evaluation_parts", "require_no_failure", "share_of", "together", "wrong_rows"]


def together(
    batches: Iterable[Any], shared: SameBatch, device: torch.device, *, least: int = 0, same: bool = False
) -> Iterator[tuple[Any, int]]:
    """This rank's batches until all ranks have run out, each with how many of its rows count.

    A rank that has run out goes on with the last batch it had, of which no row counts.

    Args:
        batches: this rank's.
        shared: with the ranks that compute the same rows.
        device: this rank's.
        least: rows that every rank has to have, where the model computes over those of all ranks.
        same: all ranks are handed the same batches.

    Raises:
        ConfigError: on every rank, when some rank was handed no batch at all while others were, too few rows, or other
            numbers of rows than the rest.
        RankFailure: on the others, when a rank's batches raise; there their own error is raised.
    """
    left, latest = shared.all_of(_iterator(batches)), None
    while True:
        batch, count, failed = None, 0, None
        try:
            batch = next(left, None)
            count = rows(batch) if batch is not None else 0
        except Exception as error:
            failed = error  # told below: the others wait there
        said = [batch is not None, batch is None and latest is None, count < least, failed is not None]
        state = torch.tensor([*map(float, said), count, count**2], dtype=torch.float64, device=device)
        if world_size() > 1:
            dist.all_reduce(state)
        require_no_failure(failed, int(state[3]), "the next batch")
        if state[0] == 0:
            return
        if same and world_size() * state[5] != state[4] ** 2:
            raise ConfigError(
                f"ranks were handed other numbers of rows than each other (this one {count})",
                why='with batch_scope="global" every rank is handed the same global batch, and takes its rows of it',
                fix='hand all ranks the same, or their own rows with batch_scope="local"',
            )
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


def wrong_rows(found: int, expected: str, job: Job, strategy: Strategy, scope: str) -> ConfigError:
    """What to say of a batch of another size than a step takes."""
    return ConfigError(
        f"the batch has {found} sequences, {expected}",
        why=f"global_batch={job.global_batch}, dp={strategy.dp}, batch_scope={scope!r}",
        fix="make batches of that size, change job.global_batch, or take shorter last ones by Engine.steps",
    )


def require_no_failure(own: Exception | None, count: int, where: str) -> None:
    """Raise what failed on this rank, or that it did on others; all ranks know that `count` of them failed.

    Raises:
        RankFailure: on a rank where nothing failed.
    """
    if own is not None:
        raise own
    if count:
        raise RankFailure(
            f"{where} failed on {count} other ranks",
            why="every rank takes part in it, so this one ends too",
            fix="see the error of the rank that failed",
        )


def share_of(batch: Any, share: int, dp_rank: int) -> tuple[Any, int]:
    """A data-parallel rank's part of rows that all were handed, in order and `share` for each, and how many it has.

    A rank without a row gets one that does not count.
    """
    total = rows(batch)
    start = min(dp_rank * share, total)
    stop = min(start + share, total)
    return (split(batch, start, stop), stop - start) if start < stop else (split(batch, 0, 1), 0)


def evaluation_parts(
    batches: Iterable[Any], shared: SameBatch, strategy: Strategy, scope: str, dp_rank: int
) -> Iterator[Any]:
    """This rank's microbatches of batches without training.

    Args:
        batches: the same whole batches on every rank with scope "global" (each takes its rows); else this rank's own.
        shared: with the ranks that compute the same rows.
        strategy: its microbatch is the most rows at once.
        scope: "global" or "local".
        dp_rank: this data-parallel rank.
    """
    for batch in shared.all_of(_iterator(batches)):
        mine, count = batch, rows(batch)
        if scope == "global":
            mine, count = share_of(batch, -(-count // strategy.dp), dp_rank)
        for start in range(0, count, strategy.microbatch):
            yield split(mine, start, min(start + strategy.microbatch, count))


def _iterator(batches: Any) -> Iterator[Any]:
    try:
        return iter(batches)
    except TypeError as error:
        raise ConfigError(
            f"batches of type {type(batches).__name__}",
            why="they are taken one after the other",
            fix="give a list, a generator, a DataLoader or meshwright.Batches; of a single batch, [batch]",
        ) from error
