"""The device mesh of a strategy: each rank's place in it, and the groups along its dimensions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.runtime._torch import group_timeout
from meshwright.runtime.ranks import global_rank, world_size
from meshwright.spec import Strategy

__all__ = ["RankMesh", "rank_mesh"]


@dataclass(frozen=True)
class RankMesh:
    """This rank's place among all, and the groups it speaks in.

    Attributes:
        dp: data-parallel ranks: each computes other rows.
        dp_rank: which of them this one is; ranks with the same number compute the same rows.
        dp_group: ranks with other rows and this rank's part of the model; None for all ranks, or where it is alone.
        tp: tensor-parallel ranks: each holds a part of the matrices.
        tp_rank: which of them this one is.
        tp_group: ranks with the same rows and the other parts of the matrices; None where there is one.
        shard: the mesh over which ZeRO shards: `dp_shard`, preceded by `dp_replicate` for hybrid sharding; None where
            nothing is sharded.
    """

    dp: int = 1
    dp_rank: int = 0
    dp_group: dist.ProcessGroup | None = None
    tp: int = 1
    tp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    shard: DeviceMesh | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of those with the same rows: it speaks for them."""
        return self.tp_rank == 0


def rank_mesh(strategy: Strategy, device: torch.device) -> RankMesh:
    """Lay the ranks out in the strategy's order and make the groups; all ranks call it.

    The groups have the timeout of the default group.
    """
    if world_size() == 1:
        return RankMesh()
    sizes = {"dp_replicate": strategy.replicas, "dp_shard": strategy.shard, "tp": strategy.tp}
    names = [name for name in strategy.mesh_order if name in sizes]
    ranks = torch.arange(strategy.dp * strategy.tp).reshape([sizes[name] for name in names])
    data = [name for name in names if name != "tp"]
    place = strategy.place(global_rank())
    by_data = ranks.movedim(names.index("tp"), -1)  # the data dimensions in order, then tp
    tp_group = _groups(by_data.reshape(-1, strategy.tp), device) if strategy.tp > 1 else None
    dp_group = None
    if strategy.tp > 1 and strategy.dp > 1:
        dp_group = _groups(by_data.reshape(-1, strategy.tp).transpose(0, 1), device)
    mine = by_data[..., place["tp"]]  # the ranks with this one's part of the model
    if data[0] == "dp_shard":
        mine, by_data = mine.transpose(0, 1), by_data.transpose(0, 1)
    return RankMesh(
        dp=strategy.dp,
        dp_rank=strategy.data_rank(global_rank()),
        dp_group=dp_group,
        tp=strategy.tp,
        tp_rank=place["tp"],
        tp_group=tp_group,
        shard=_shard_mesh(strategy, by_data, mine, dp_group, device) if strategy.shard > 1 else None,
    )


def _shard_mesh(
    strategy: Strategy,
    by_data: torch.Tensor,
    mine: torch.Tensor,
    dp_group: dist.ProcessGroup | None,
    device: torch.device,
) -> DeviceMesh:
    """`by_data`: all ranks as replicas x shards x tp; `mine`: replicas x shards with this rank's part of the model."""
    if strategy.replicas == 1:
        if dp_group is not None:
            return DeviceMesh.from_group(dp_group, device.type, mesh_dim_names=("dp_shard",))
        return DeviceMesh(device.type, mine.reshape(-1), mesh_dim_names=("dp_shard",))
    replicate = _groups(by_data.permute(1, 2, 0).reshape(-1, strategy.replicas), device)
    shard = _groups(by_data.permute(0, 2, 1).reshape(-1, strategy.shard), device)
    return DeviceMesh.from_group(
        [replicate, shard], device.type, mesh=mine.contiguous(), mesh_dim_names=("dp_replicate", "dp_shard")
    )


def _groups(lines: torch.Tensor, device: torch.device) -> dist.ProcessGroup:
    """A group for each row of rank numbers; this rank's."""
    found: dist.ProcessGroup = dist.new_subgroups_by_enumeration(lines.tolist(), timeout=group_timeout(device))[0]
    return found
