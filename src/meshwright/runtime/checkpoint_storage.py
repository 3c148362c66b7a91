"""A storage back end for Distributed Checkpoint (PyTorch's DCP): safetensors files of each rank, no pickle.

Why not PyTorch's own (2.13): `FileSystemReader` unpickles `.metadata` and reads every saved piece whole;
`HuggingFaceStorageWriter` holds a rank's whole share twice in memory, refuses tensors that are not contiguous and
finds its files by their endings. The layout written here is the latter's, and its reader reads it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from meshwright.errors import CheckpointError
from meshwright.runtime.checkpoint_files import Draft, complete, explained, read_files
from meshwright.runtime.safetensors_file import CODES, DTYPES, Piece, as_bytes, write_pieces

__all__ = ["Reader", "Writer", "is_distributed", "read_metadata"]

#: Where PyTorch's `HuggingFaceStorageReader` looks for the place of a piece in its tensor (2.13).
SHARDING_KEY = "DCP_SHARDING_INFO"


class Writer(StorageWriter):
    """DCP's steps of a save: the first rank makes a draft, every rank writes its files, the first rank commits."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.rank = _own_rank()
        self.draft: Draft | None = None

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            if item.tensor_data is None or item.tensor_data.properties.dtype not in CODES:
                kind = "no tensor" if item.tensor_data is None else f"of {item.tensor_data.properties.dtype}"
                raise CheckpointError(f"{item.index.fqn} cannot be saved", why=f"it is {kind}")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        try:
            json.dumps(self.manifest)
        except (TypeError, ValueError) as error:
            raise CheckpointError("the manifest cannot be saved", why=f"it is not JSON: {error}") from error
        needed_bytes = sum(_piece(item).size_bytes for plan in plans for item in plan.items)
        with explained("make the folder for", self.folder, rank=self.rank, needed_bytes=needed_bytes):
            self.draft = Draft(self.folder, needed_bytes=needed_bytes)
        return [dataclasses.replace(plan, storage_data=self.draft.path.name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        folder = self.folder.with_name(plan.storage_data)
        results: list[WriteResult] = []
        for number, items in enumerate(_files(plan.items), start=1):
            more = f"-{number}" if number > 1 else ""
            results += self._write_file(folder / f"rank-{self.rank:05d}{more}.safetensors", items, planner)
        done.set_result(results)
        return done

    def _write_file(self, path: Path, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        items.sort(key=lambda item: -_piece(item).dtype.itemsize)
        pieces = [_piece(item) for item in items]
        needed_bytes = sum(piece.size_bytes for piece in pieces)
        with explained("write", path, rank=self.rank, needed_bytes=needed_bytes):
            if not path.parent.is_dir():
                raise FileNotFoundError(
                    f"{path.parent}, made by the first rank, is not there: hosts must share the file system"
                )
            buffers = (as_bytes(cast(torch.Tensor, planner.resolve_data(item))) for item in items)
            size = write_pieces(path, pieces, buffers, metadata=_about(pieces))
        return [
            WriteResult(index=item.index, size_in_bytes=piece.size_bytes, storage_data=(path.name, size))
            for piece, item in zip(pieces, items, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self.draft is not None
        with explained("complete", self.folder, rank=self.rank):
            self.draft.commit(dict(result.storage_data for share in results for result in share), self.manifest)


class Reader(StorageReader):
    """DCP's steps of a load over metadata that is already known."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder = folder
        self.metadata = metadata
        self.rank = _own_rank()

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.metadata.storage_data[item.storage_index], []).append(item)
        for name, items in by_file.items():
            with explained("read", self.folder / name, rank=self.rank), _open(self.folder / name) as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    # The file is mapped: only the pages of the box are read.
                    target.copy_(_box(file.get_slice(item.storage_index.fqn), item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_metadata(folder: Path) -> Metadata:
    """What is stored where, from the headers of all files. Raises CheckpointError for an incomplete checkpoint."""
    files = read_files(folder)
    if (reason := complete(folder)) is not None:
        fix = "take an older checkpoint, or copy this one again"
        raise CheckpointError(f"{folder} is not a complete checkpoint", why=reason, fix=fix)
    tensors: dict[str, Any] = {}
    where: dict[MetadataIndex, str] = {}
    for file in files:
        with explained("read", folder / file, rank=_own_rank()), _open(folder / file) as pieces:
            offsets = json.loads(pieces.metadata()[SHARDING_KEY])
            for name in pieces.keys():  # noqa: SIM118  not a dict
                piece = pieces.get_slice(name)
                start = torch.Size(offsets[name]["saved_offsets"])
                shape = torch.Size(piece.get_shape())
                end = torch.Size(map(sum, zip(start, shape, strict=True)))
                properties = TensorProperties(dtype=DTYPES[piece.get_dtype()])
                entry = tensors.setdefault(name, TensorStorageMetadata(properties, end, []))
                entry.size = torch.Size(map(max, zip(entry.size, end, strict=True)))
                entry.chunks.append(ChunkStorageMetadata(start, shape))
                where[MetadataIndex(name, start)] = file
    for name, entry in tensors.items():
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise CheckpointError(f"{folder} is not a complete checkpoint", why=f"pieces of {name} are missing")
    return Metadata(state_dict_metadata=tensors, storage_data=where)


def _open(path: Path) -> Any:
    return safe_open(str(path), framework="pt")


def _box(piece: Any, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    ranges = [slice(start, start + length) for start, length in zip(offsets, lengths, strict=True)]
    box: torch.Tensor = piece[tuple(ranges)]
    return box


def _files(items: Iterable[WriteItem]) -> list[list[WriteItem]]:
    """What goes into each file of a rank: a file holds one piece of a name, and fused weights have several."""
    files: list[list[WriteItem]] = []
    found: Counter[str] = Counter()
    for item in items:
        number = found[item.index.fqn]
        found[item.index.fqn] += 1
        if number == len(files):
            files.append([])
        files[number].append(item)
    return files


def _piece(item: WriteItem) -> Piece:
    assert item.tensor_data is not None
    chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
    return Piece(name=item.index.fqn, dtype=dtype, shape=tuple(chunk.sizes), offsets=tuple(chunk.offsets))


def _about(pieces: Iterable[Piece]) -> dict[str, str]:
    offsets = {piece.name: {"saved_offsets": piece.offsets} for piece in pieces}
    return {SHARDING_KEY: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _own_rank() -> int:
    return dist.get_rank() if is_distributed() else 0
