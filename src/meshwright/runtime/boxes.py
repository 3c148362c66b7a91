"""Boxes: which parts of a whole tensor a rank holds, and how the whole one is seen again.

Two layouts lie on each other: tensor parallelism cuts the whole tensor (`cuts.py`), and ZeRO shards what a rank has of
it over the data-parallel ranks with the same part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from meshwright.runtime.cuts import Cut
from meshwright.runtime.mesh import RankMesh

__all__ = ["Box", "Held", "gather_to_all", "gather_to_first", "own_part", "zeros_like_own"]

#: A part of a whole tensor, in elements along each dim.
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Held:
    """What this rank holds of a whole tensor.

    Attributes:
        tensor: plain or, where ZeRO shards it, a DTensor; of the shape that this tensor-parallel rank has.
        cut: how that lies in the whole one; None where all of it is there.
        tp_rank: this rank's number in the cut.
        holder: the pipeline rank that speaks for it. On ranks without it `tensor` has no values, and its whole shape.
    """

    tensor: torch.Tensor
    cut: Cut | None = None
    tp_rank: int = 0
    holder: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.cut.shape if self.cut is not None else tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.tensor.dtype

    @property
    def is_cut(self) -> bool:
        """Whether there is a dim along which it is cut: scalars have none."""
        return self.cut is not None and self.cut.shape != ()

    def pieces(self, *, once: bool = False) -> list[tuple[Box, torch.Tensor]]:
        """Boxes of the whole tensor, each with its elements in this rank's own memory; none is empty, padding has none.

        A whole tensor without elements is one piece.

        Args:
            once: leave out what an earlier tensor-parallel rank holds too.
        """
        own, box = own_part(self.tensor), _own_box(self.tensor)
        if not math.prod(self.shape):
            return [(tuple(slice(0, size) for size in self.shape), own.new_empty(self.shape))]
        if not own.numel():
            return []
        if self.cut is None or not self.is_cut:
            return [(box, own)]
        dim, found = self.cut.dim, []
        for here, there in self.cut.first_places(self.tp_rank) if once else self.cut.places(self.tp_rank):
            start, stop = max(here.start, box[dim].start), min(here.stop, box[dim].stop)
            if start < stop:
                along = slice(start - here.start + there.start, stop - here.start + there.start)
                view = own.narrow(dim, start - box[dim].start, stop - start)
                found.append(((*box[:dim], along, *box[dim + 1 :]), view))
        return found


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, in the memory of the tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def zeros_like_own(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Zeros of the same layout on a device, only this rank's part allocated."""
    part = torch.zeros(own_part(tensor).shape, dtype=tensor.dtype, device=device)
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def gather_to_first(held: Held, dtype: torch.dtype, mesh: RankMesh) -> torch.Tensor | None:
    """The whole tensor in a dtype on the first rank, None on the others. All ranks call it, in the same order.

    The first rank holds the whole and one other part; the first of each tensor-parallel rank's shard group holds what
    that rank has of it, the others nothing more than their own. What another stage has is sent to the first rank.
    """
    holder = held.holder
    if mesh.pp_rank == holder:
        whole = _gather_in_stage(held, dtype, mesh)
        if holder and whole is not None:
            _send(whole, mesh.pp_group)
        return None if holder else whole
    if mesh.pp_rank or mesh.dp_rank or mesh.tp_rank:
        return None
    whole = torch.empty(held.shape, dtype=dtype, device=mesh.device)
    _receive(whole, mesh.pp_group, holder)
    return whole


def gather_to_all(held: Held, mesh: RankMesh) -> torch.Tensor:
    """The whole tensor on every rank, as memory of its own. All ranks call it, in the same order."""
    if mesh.pp == 1:
        return _gather_in_stage_to_all(held, mesh)
    whole = torch.empty(held.shape, dtype=held.dtype, device=mesh.device)
    if mesh.pp_rank == held.holder:
        whole = _gather_in_stage_to_all(held, mesh).contiguous()
    dist.broadcast(whole, group=mesh.pp_group, group_src=held.holder)
    return whole


def _gather_in_stage(held: Held, dtype: torch.dtype, mesh: RankMesh) -> torch.Tensor | None:
    """The whole tensor on the first rank of a stage."""
    cut = held.cut if held.is_cut else None
    if mesh.tp_rank and (cut is None or not cut.first_places(mesh.tp_rank)):
        return None  # an earlier rank has all of it
    local = _gather_shards(held.tensor, dtype, mesh)
    if cut is None or local is None:
        return local
    if mesh.tp_rank:
        for here, _ in cut.first_places(mesh.tp_rank):
            _send(_along(local, cut.dim, here), mesh.tp_group)
        return None
    whole = torch.empty(cut.shape, dtype=dtype, device=local.device)
    for here, there in cut.first_places(0):
        _along(whole, cut.dim, there).copy_(_along(local, cut.dim, here))
    del local
    for rank in range(1, mesh.tp):
        for _, there in cut.first_places(rank):
            _receive(_along(whole, cut.dim, there), mesh.tp_group, rank)
    return whole


def _gather_in_stage_to_all(held: Held, mesh: RankMesh) -> torch.Tensor:
    """The whole tensor on every rank of a stage."""
    tensor = held.tensor.detach()
    local = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
    if held.cut is None or not held.is_cut:
        return local
    cut = held.cut
    whole = torch.empty(cut.shape, dtype=local.dtype, device=local.device)
    for rank in range(mesh.tp):
        for here, there in cut.first_places(rank):
            place = _along(whole, cut.dim, there)
            part = (_along(local, cut.dim, here) if rank == mesh.tp_rank else torch.empty_like(place)).contiguous()
            if mesh.tp > 1:
                dist.broadcast(part, group=mesh.tp_group, group_src=rank)
            place.copy_(part)
    return whole


def _gather_shards(tensor: torch.Tensor, dtype: torch.dtype, mesh: RankMesh) -> torch.Tensor | None:
    """What a tensor-parallel rank has of a tensor, on the first of its data-parallel ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(dtype) if mesh.dp_rank == 0 else None
    coordinates, shards = _coordinates(tensor), tensor.device_mesh
    if any(coordinates[:-1]):
        return None  # a replica of what the first shard group holds
    group, part = shards.get_group(shards.ndim - 1), own_part(tensor).to(dtype)
    if coordinates[-1]:
        _send(part, group)
        return None
    whole = torch.empty(tensor.shape, dtype=dtype, device=part.device)
    whole[_box(tensor, coordinates)] = part
    for rank in range(1, shards.size(shards.ndim - 1)):
        _receive(whole[_box(tensor, [*coordinates[:-1], rank])], group, rank)
    return whole


def _send(part: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """To the first rank of a group, which knows the shape: nothing is sent of nothing."""
    if part.numel():
        dist.send(part.contiguous(), group=group, group_dst=0)


def _receive(place: torch.Tensor, group: dist.ProcessGroup | None, rank: int) -> None:
    if place.numel():
        arriving = torch.empty(place.shape, dtype=place.dtype, device=place.device)
        dist.recv(arriving, group=group, group_src=rank)
        place.copy_(arriving)


def _along(tensor: torch.Tensor, dim: int, span: slice) -> torch.Tensor:
    return tensor.narrow(dim, span.start, span.stop - span.start)


def _own_box(tensor: torch.Tensor) -> Box:
    """This rank's box of a tensor; all of one that is not sharded."""
    return _box(tensor, _coordinates(tensor) if isinstance(tensor, DTensor) else [])


def _coordinates(tensor: DTensor) -> list[int]:
    mesh = tensor.device_mesh
    return [mesh.get_local_rank(dim) for dim in range(mesh.ndim)]


def _box(tensor: torch.Tensor, coordinates: list[int]) -> Box:
    """The box at a place of the mesh: `torch.chunk` along each sharded dim, as `fully_shard` cuts."""
    starts, lengths = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        for at, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                dim = placement.dim
                share = -(-lengths[dim] // tensor.device_mesh.size(at))
                begin = min(coordinates[at] * share, lengths[dim])
                starts[dim] += begin
                lengths[dim] = min(share, lengths[dim] - begin)
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
