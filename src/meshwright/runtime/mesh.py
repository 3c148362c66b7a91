"""The device mesh of a strategy: each rank's place in it, and the groups along its dimensions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.runtime._torch import group_timeout
from meshwright.runtime.ranks import global_rank, world_size
from meshwright.schedule import stage_ranks
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
        tp_group: ranks with the same rows and stages, and the other parts of the matrices; None where there is one.
        pp: pipeline ranks: each holds other stages.
        pp_rank: which of them this one is.
        pp_group: ranks with the same rows and part of the matrices, and the other stages; None where there is one.
        loss_rank: the pipeline rank that has the last stage, and so the loss.
        rows_group: ranks that compute the same rows; None where this one is alone.
        stage_group: ranks with the same stages, for coordination on the host; None for all ranks.
        shard: the mesh over which ZeRO shards: `dp_shard`, preceded by `dp_replicate` for hybrid sharding; None where
            nothing is sharded.
        device: of this rank.
    """

    dp: int = 1
    dp_rank: int = 0
    dp_group: dist.ProcessGroup | None = None
    tp: int = 1
    tp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    pp: int = 1
    pp_rank: int = 0
    pp_group: dist.ProcessGroup | None = None
    loss_rank: int = 0
    rows_group: dist.ProcessGroup | None = None
    stage_group: dist.ProcessGroup | None = None
    shard: DeviceMesh | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for those with the same rows: the first of those that have the loss."""
        return self.tp_rank == 0 and self.pp_rank == self.loss_rank


def rank_mesh(strategy: Strategy, device: torch.device) -> RankMesh:
    """Lay the ranks out in the strategy's order and make the groups; all ranks call it.

    The groups have the timeout of the default group.
    """
    if world_size() == 1:
        return RankMesh(device=device)
    dp, tp, pp = strategy.dp, strategy.tp, strategy.pp
    sizes = {"pp": pp, "dp_replicate": strategy.replicas, "dp_shard": strategy.shard, "tp": tp}
    names = [name for name in strategy.mesh_order if name in sizes]
    ranks = torch.arange(strategy.world_size).reshape([sizes[name] for name in names])
    data = [name for name in names if name.startswith("dp_")]  # outer, inner: the order of rows
    grid = ranks.permute([names.index(name) for name in ("pp", *data, "tp")])
    place = strategy.place(global_rank())
    tp_group = _groups(grid.reshape(-1, tp), device) if tp > 1 else None
    dp_group = _groups(grid.permute(0, 3, 1, 2).reshape(-1, dp), device) if dp > 1 and tp * pp > 1 else None
    pp_group = _groups(grid.permute(1, 2, 3, 0).reshape(-1, pp), device) if pp > 1 else None
    rows_group = tp_group
    if pp > 1:
        rows_group = _groups(grid.permute(1, 2, 0, 3).reshape(-1, pp * tp), device) if tp > 1 else pp_group
    by_shard = grid if data[0] == "dp_replicate" else grid.transpose(1, 2)  # pp, replicas, shards, tp
    return RankMesh(
        dp=dp,
        dp_rank=strategy.data_rank(global_rank()),
        dp_group=dp_group,
        tp=tp,
        tp_rank=place["tp"],
        tp_group=tp_group,
        pp=pp,
        pp_rank=place["pp"],
        pp_group=pp_group,
        loss_rank=stage_ranks(strategy.schedule, pp, strategy.virtual_stages)[-1] if pp > 1 else 0,
        rows_group=rows_group,
        stage_group=_groups(grid.reshape(pp, -1), device, backend="gloo") if pp > 1 and dp * tp > 1 else None,
        shard=_shard_mesh(strategy, by_shard, place, dp_group, device) if strategy.shard > 1 else None,
        device=device,
    )


def _shard_mesh(
    strategy: Strategy,
    grid: torch.Tensor,
    place: dict[str, int],
    dp_group: dist.ProcessGroup | None,
    device: torch.device,
) -> DeviceMesh:
    """`grid`: all ranks as stages x replicas x shards x tp."""
    mine = grid[place["pp"], :, :, place["tp"]]
    if strategy.replicas == 1:
        if dp_group is not None:
            return DeviceMesh.from_group(dp_group, device.type, mesh_dim_names=("dp_shard",))
        return DeviceMesh(device.type, mine.reshape(-1), mesh_dim_names=("dp_shard",))
    replicate = _groups(grid.permute(0, 2, 3, 1).reshape(-1, strategy.replicas), device)
    shard = _groups(grid.permute(0, 1, 3, 2).reshape(-1, strategy.shard), device)
    return DeviceMesh.from_group(
        [replicate, shard], device.type, mesh=mine.contiguous(), mesh_dim_names=("dp_replicate", "dp_shard")
    )


def _groups(lines: torch.Tensor, device: torch.device, backend: str | None = None) -> dist.ProcessGroup:
    """A group for each row of rank numbers; this rank's."""
    found: dist.ProcessGroup = dist.new_subgroups_by_enumeration(
        lines.tolist(), timeout=group_timeout(device), backend=backend
    )[0]
    return found
