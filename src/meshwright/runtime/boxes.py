"""Boxes: which part of a whole tensor a rank holds, and how the whole one is seen again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from meshwright.runtime.ranks import global_rank

__all__ = ["empty_like_own", "gather_to_first", "own_box", "own_part"]

Box = tuple[slice, ...]


def own_box(tensor: torch.Tensor) -> Box:
    """This rank's box of a tensor, in elements of the whole; all of one that is not sharded."""
    coordinates = _coordinates(tensor) if isinstance(tensor, DTensor) else []
    return _box(tensor, coordinates)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, in the memory of the tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def empty_like_own(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same layout on a device, only this rank's part allocated, its values not set."""
    part = torch.empty(own_part(tensor).shape, dtype=tensor.dtype, device=device)
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def gather_to_first(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The whole tensor in a dtype on the first rank, None on the others. All ranks call it, in the same order.

    The first rank holds the whole and one other part, the others nothing more than their own.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(dtype) if global_rank() == 0 else None
    coordinates, mesh = _coordinates(tensor), tensor.device_mesh
    if any(coordinates[:-1]):
        return None  # a replica of what the first shard group holds
    group, part = mesh.get_group(mesh.ndim - 1), own_part(tensor).to(dtype)
    if coordinates[-1]:
        if part.numel():
            dist.send(part.contiguous(), group=group, group_dst=0)
        return None
    whole = torch.empty(tensor.shape, dtype=dtype, device=part.device)
    whole[_box(tensor, coordinates)] = part
    for rank in range(1, mesh.size(mesh.ndim - 1)):
        place = whole[_box(tensor, [*coordinates[:-1], rank])]
        if place.numel():
            arriving = torch.empty(place.shape, dtype=dtype, device=place.device)
            dist.recv(arriving, group=group, group_src=rank)
            place.copy_(arriving)
    return whole


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
