"""Agreement: what fails on one rank fails on all of them, with one error and without waiting for a rank that left."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from meshwright.errors import MeshwrightError, RankFailure
from meshwright.runtime.ranks import global_rank, world_size

__all__ = ["failing_together"]


@contextmanager
def failing_together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """All ranks enter and leave together; an error inside on any of them is raised on each, the lowest rank's.

    What is inside must not wait for other ranks after it may have failed.

    Args:
        group: carries short Python objects between all ranks; None for the default one.

    Raises:
        MeshwrightError: a rank's own; a `RankFailure` in place of any other exception.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    told: list[MeshwrightError | None] = [_portable(own)] * world_size()
    if world_size() > 1:
        dist.all_gather_object(told, _portable(own), group=group)
    for rank, theirs in enumerate(told):
        if theirs is not None:
            raise theirs from (own if rank == global_rank() else None)


def _portable(error: Exception | None) -> MeshwrightError | None:
    if error is None or isinstance(error, MeshwrightError):
        return error
    where = f"rank {global_rank()} on host {socket.gethostname()}"
    return RankFailure(f"{where} failed", why=f"{type(error).__name__}: {error}")
