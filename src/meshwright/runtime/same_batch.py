"""Ranks that compute the same rows see the same batches, whatever each one's loader hands it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import RankFailure
from meshwright.runtime.batch import to_device
from meshwright.runtime.mesh import RankMesh

__all__ = ["SameBatch"]

_LOG = logging.getLogger("meshwright")


class SameBatch:
    """Compares batches by hash over the tensor-parallel ranks; where they differ, the first rank's is taken by all.

    Args:
        mesh: of this rank.
        device: of the tensors that its group carries.
    """

    def __init__(self, mesh: RankMesh, device: torch.device) -> None:
        self._group, self._device = mesh.rows_group, device
        self._places = f"{mesh.dp} data-parallel ranks, this one number {mesh.dp_rank}"
        self._warned = False

    def of(self, batch: Any) -> Any:
        """The batch that all ranks of the group use; all of them call it."""
        return self._shared(batch, None) if self._group is not None else batch

    def all_of(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same of one batch after the other; they end for all where they end for the first rank.

        Raises:
            RankFailure: on the others, when a rank's batches raise; there their own error is raised.
        """
        if self._group is None:
            yield from batches
            return
        while True:
            batch, failed = None, None
            try:
                batch = next(batches, None)
            except Exception as error:
                failed = error  # told below: the others wait there
            batch = self._shared(batch, failed)
            if batch is None:
                return
            yield batch

    def _shared(self, batch: Any, failed: Exception | None) -> Any:
        mark = _fingerprint(batch)
        said = torch.tensor([mark, -mark, int(failed is not None)], device=self._device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._group)
        most, least, failures = said.tolist()
        if failed is not None:
            raise failed
        if failures:
            raise RankFailure(
                "the batches of another rank of this tensor-parallel group failed",
                why="its ranks compute the same rows together",
                fix="see the error of the rank that failed",
            )
        if most == -least:
            return batch
        if not self._warned:
            self._warned = True
            if dist.get_rank(self._group) == 0:
                _LOG.warning(
                    "ranks of one tensor-parallel group were handed different batches: all of them use that of the "
                    "first. Give samplers the data-parallel ranks (%s): num_replicas=engine.data_ranks, "
                    "rank=engine.data_rank",
                    self._places,
                )
        told = [to_device(batch, torch.device("cpu")) if batch is not None else None]
        dist.broadcast_object_list(told, group=self._group, group_src=0, device=self._device)
        return told[0]


def _fingerprint(batch: Any) -> int:
    """62 bits of a batch's structure, shapes, dtypes and values."""
    digest = hashlib.blake2b(digest_size=8)

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        elif isinstance(value, Mapping):
            digest.update(repr(list(value)).encode())
            for part in value.values():
                add(part)
        elif isinstance(value, (tuple, list)):
            digest.update(f"{type(value).__name__} {len(value)}".encode())
            for part in value:
                add(part)
        elif isinstance(value, (str, bytes, int, float, bool, type(None))):
            digest.update(repr(value).encode())
        else:
            digest.update(type(value).__name__.encode())  # what it holds is not looked at

    add(batch)
    return int.from_bytes(digest.digest(), "big") >> 2
