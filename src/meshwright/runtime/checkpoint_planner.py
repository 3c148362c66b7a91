"""Planners for Distributed Checkpoint (PyTorch's DCP): a rank saves and loads the boxes that it holds, several of one
tensor where fused weights are cut over tensor-parallel ranks, each from and into its own memory.

Its own planners (2.13) know one box of a tensor on each rank: all of a plain one, or the shard of a DTensor.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from meshwright.runtime.boxes import Box, Held

__all__ = ["PieceLoader", "PieceSaver"]


class PieceSaver(DefaultSavePlanner):
    """Of what several ranks hold, one rank writes each box: DCP sees that replicas offer the same name and offsets."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._views: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """What this rank could write."""
        items = []
        for name, held in self.state_dict.items():
            for box, view in held.pieces(once=True):
                index, chunk = _place(name, box)
                data = TensorWriteData(chunk, TensorProperties(dtype=held.dtype), torch.Size(held.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self._views[index] = view
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The elements of a box."""
        return self._views[index]


class PieceLoader(DefaultLoadPlanner):
    """Every rank reads all that it holds, whoever else holds it too; padding is left as it is."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._views: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(
        self, state_dict: dict[str, Held], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Without the default's look at values, which knows nothing but tensors."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """From which stored boxes this rank's own are filled."""
        assert self.metadata is not None
        items = []
        for name, held in self.state_dict.items():
            entry = self.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)  # what is no tensor was refused before
            chunks = []
            for box, view in held.pieces():
                index, chunk = _place(name, box)
                chunks.append(chunk)
                self._views[index] = view
            items += create_read_items_for_chunk_list(name, entry, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of a box."""
        return self._views[index]


def _place(name: str, box: Box) -> tuple[MetadataIndex, ChunkStorageMetadata]:
    offsets = torch.Size(span.start for span in box)
    sizes = torch.Size(span.stop - span.start for span in box)
    return MetadataIndex(name, offsets), ChunkStorageMetadata(offsets, sizes)
