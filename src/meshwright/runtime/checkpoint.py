"""Saves and loads tensors by their global names, so that any number of ranks in any layout loads what any other wrote.

Distributed Checkpoint (PyTorch's DCP) decides which rank writes and reads which box of which tensor, and carries a
failure on one rank to all of them; what lies on the disk is `checkpoint_files.py` and `checkpoint_storage.py`.

The group (the default one where none is given) carries only short Python objects: one that works on the CPU is best.
Every rank of it makes every call. Without `torch.distributed` all of it works in one process.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright.errors import CheckpointError
from meshwright.runtime.boxes import Held
from meshwright.runtime.checkpoint_files import complete, newest, read_manifest, remove_stale
from meshwright.runtime.checkpoint_planner import PieceLoader, PieceSaver
from meshwright.runtime.checkpoint_storage import Reader, Writer, is_distributed, read_metadata

__all__ = [
    "complete",
    "load_checkpoint",
    "newest",
    "read_manifest",
    "remove_stale",
    "save_checkpoint",
    "shared_manifest",
    "stored",
]

T = TypeVar("T")

#: How many differences an error names.
_NAMED = 3


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor | Held],
    manifest: Mapping[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a checkpoint, whole or not at all. All ranks of the group call it with the same folder.

    Args:
        folder: the final name, on a file system that all hosts share; its parents are made.
        tensors: global name to a plain tensor (the same on every rank: written once), a DTensor of any mesh, or what
            this rank holds of a tensor that is cut over tensor-parallel ranks.
        manifest: the caller's own values, as JSON takes them; those of the first rank are kept.
        group: the ranks that save.

    Raises:
        CheckpointError: on every rank, with rank, host, path and cause. Nothing is left under the final name, and
            nothing beside it.
        RuntimeError: another rank died. The temporary folder stays; `newest` passes over it.
    """
    writer = Writer(folder, manifest)
    try:
        with torch.no_grad(), _one_error(f"saving {folder} failed"):
            save(_held(tensors), storage_writer=writer, planner=PieceSaver(), process_group=group)
    except CheckpointError:
        # DCP has heard of every rank: none writes any more.
        if writer.draft is not None:
            writer.draft.discard()
        raise
    finally:
        if writer.draft is not None:
            writer.draft.close()


def load_checkpoint(
    folder: Path, tensors: Mapping[str, torch.Tensor | Held], *, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Fills tensors in place, each rank reading only the boxes that it needs. All ranks of the group call it.

    Args:
        folder: a checkpoint.
        tensors: global name to a tensor, as for the save, in any layout. Of each kind that is asked for at all (the
            part of a name before its first dot), the ranks together must ask for every tensor that is stored.
        group: the ranks that load.

    Returns:
        What was given as `manifest` to the save.

    Raises:
        CheckpointError: on every rank: not a complete checkpoint; of another model (names, shapes, dtypes), with no
            tensor touched; or a file that cannot be read, and then the values of the tensors are undefined.
    """
    manifest, metadata = _from_first(group, lambda: (read_manifest(folder), read_metadata(folder)))
    held = _held(tensors)
    _require_same_model(folder, metadata, held, group)
    with torch.no_grad(), _one_error(f"loading {folder} failed"):
        load(held, storage_reader=Reader(folder, metadata), planner=PieceLoader(), process_group=group)
    return manifest


def shared_manifest(
    folder: Path, *, group: dist.ProcessGroup | None = None
) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """What `read_manifest` and `stored` give, read once and handed to all ranks of the group.

    Raises:
        CheckpointError: on every rank, when the folder is not a complete checkpoint.
    """
    return _from_first(group, lambda: (read_manifest(folder), stored(folder)))


def stored(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Global names, shapes and dtypes in a checkpoint; not collective.

    Raises:
        CheckpointError: the folder is not a complete checkpoint.
    """
    entries = read_metadata(folder).state_dict_metadata.items()
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in entries
        if isinstance(entry, TensorStorageMetadata)
    }


def _held(tensors: Mapping[str, torch.Tensor | Held]) -> dict[str, Held]:
    return {name: tensor if isinstance(tensor, Held) else Held(tensor) for name, tensor in tensors.items()}


# ---------------------------------------------------------------------------------------------------- among the ranks


def _from_first(group: dist.ProcessGroup | None, make: Callable[[], T]) -> T:
    """What `make` gives on the first rank of the group, on every rank; its CheckpointError likewise."""
    if not is_distributed():
        return make()
    told: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            told[0] = make()
        except CheckpointError as error:
            told[0] = error
    dist.broadcast_object_list(told, group=group, group_src=0)
    if isinstance(told[0], CheckpointError):
        raise told[0]
    answer: T = told[0]
    return answer


def _require_same_model(
    folder: Path, metadata: Metadata, tensors: Mapping[str, Held], group: dist.ProcessGroup | None
) -> None:
    """Compares what all ranks ask for with what is stored; every rank raises the same CheckpointError."""
    names = sorted(metadata.state_dict_metadata)
    # One bit per stored name, so that stages of a pipeline can each ask for their own part.
    asked = sum(1 << index for index, name in enumerate(names) if name in tensors)
    kinds = {_kind(name) for name in tensors}
    own = (_differences(metadata, tensors), asked, kinds)
    answers: list[Any] = [own]
    if is_distributed():
        answers *= dist.get_world_size(group)
        dist.all_gather_object(answers, own, group=group)
    found = list(dict.fromkeys(text for texts, _, _ in answers for text in texts))
    for index, name in enumerate(names):
        if not any(bits >> index & 1 for _, bits, _ in answers) and any(_kind(name) in some for _, _, some in answers):
            found.append(f"{name} is stored, and this model has none")
    if found:
        more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise CheckpointError(
            f"checkpoint {folder} is of another model",
            why="; ".join(found[:_NAMED]) + more,
            fix="load it with the model, optimizer and dtypes that it was saved with, or choose another checkpoint",
        )


def _kind(name: str) -> str:
    return name.partition(".")[0]


def _differences(metadata: Metadata, tensors: Mapping[str, Held]) -> list[str]:
    found = []
    for name, held in sorted(tensors.items()):
        entry = metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            found.append(f"{name} is not stored")
        elif entry.size != held.shape:
            found.append(f"{name} is stored as {_shape(entry.size)}, and is {_shape(held.shape)} here")
        elif entry.properties.dtype != held.dtype:
            found.append(f"{name} is stored in {entry.properties.dtype}, and is in {held.dtype} here")
    return found


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "a scalar"


@contextlib.contextmanager
def _one_error(what: str) -> Iterator[None]:
    """DCP's report of all ranks' failures as one CheckpointError, the same on every rank."""
    with warnings.catch_warnings():
        # One process without a group is a way to use this, not a mistake.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as report:
            rank, (error, _) = min(report.failures.items(), key=lambda failure: failure[0])
            if not isinstance(error, Exception):
                raise error from None
            others = f" (and so did {len(report.failures) - 1} other ranks)" if len(report.failures) > 1 else ""
            if isinstance(error, CheckpointError):
                raise CheckpointError(error.what + others, why=error.why, fix=error.fix) from report
            raise CheckpointError(f"{what} on rank {rank}{others}", why=f"{type(error).__name__}: {error}") from report
