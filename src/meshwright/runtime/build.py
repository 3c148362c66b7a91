"""Build: from a model and a strategy to modules that a rank can run, one transformation after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import ConfigError
from meshwright.runtime.batch_norm import couple_batch_norms
from meshwright.runtime.collectives import Traffic
from meshwright.runtime.cuts import Cuts
from meshwright.runtime.init import materialise, meta_parameters, share_values, store_parameters_as
from meshwright.runtime.mesh import RankMesh, rank_mesh
from meshwright.runtime.pp.apply import PipelineParallel
from meshwright.runtime.pp.stage import Stage
from meshwright.runtime.pp.staged import StagedZero
from meshwright.runtime.precision import cast_inputs
from meshwright.runtime.pretrained import Pretrained
from meshwright.runtime.ranks import require_world
from meshwright.runtime.recompute import apply_recompute
from meshwright.runtime.replicas import Replicas
from meshwright.runtime.seeds import DropoutStreams, preserved_random_state, seed_for
from meshwright.runtime.shards import Shards
from meshwright.runtime.tp import TensorParallel, plan_sharding
from meshwright.runtime.units import Unit, choose_blocks, finer_blocks, make_units
from meshwright.runtime.zero import Used, Zero
from meshwright.spec import Job, Strategy

__all__ = ["Built", "build"]


@dataclass(frozen=True)
class Built:
    """A model made ready for a strategy on this rank.

    Attributes:
        coupled: its forward computes over the rows of all ranks, so that every rank must have them.
        tp: how it is divided over the tensor-parallel ranks; None where it is not.
        pipeline: how it is cut into stages; None where it is not.
    """

    model: nn.Module
    zero: Zero
    mesh: RankMesh
    dropout: DropoutStreams
    traffic: Traffic
    coupled: bool
    tp: TensorParallel | None
    pipeline: PipelineParallel | None


def build(
    model: nn.Module | Callable[[], nn.Module],
    job: Job,
    strategy: Strategy,
    device: torch.device,
    block_names: Sequence[str] | None,
    host: dist.ProcessGroup | None,
    weights: str | Path | None = None,
    sharding: Mapping[str, str] | None = None,
    example: Any = None,
    labels: bool = False,
) -> Built:
    """Apply tensor parallelism, the cut into stages, recompute, then ZeRO, then initial values.

    Args:
        sharding: which modules tensor parallelism divides how, where the model's own plan does not say so.
        weights: safetensors with initial values, as `pretrained.py` reads them.
        example: a batch as steps take them, to cut the model by.
        labels: whether the model is called with labels.
        host: the group for coordination on the host; None where the default group serves.

    Raises:
        ConfigError: the model is neither a module nor a builder of one, cannot run under the strategy, or the weights
            are of another one.
        CheckpointError: the weights cannot be read.
    """
    require_world(strategy)
    mesh = rank_mesh(strategy, device)
    module = _module(model, job.seed, device)
    _refuse_what_cannot_be_sharded(module, strategy)
    stored, compute = getattr(torch, job.param_dtype), getattr(torch, job.compute_dtype)
    coupled = couple_batch_norms(module, strategy, device, compute)
    given = Pretrained(module, weights, host) if weights is not None else None
    share_values(module, device, given)
    store_parameters_as(module, stored)
    blocks = choose_blocks(module, block_names)
    traffic, tp, pipeline = Traffic(), None, None
    if mesh.pp == 1:
        _refuse_stages(strategy, len(blocks))
    else:
        count = strategy.pp * strategy.virtual_stages
        if block_names is None and len(blocks) < count:
            blocks = finer_blocks(module, count)
        pipeline = PipelineParallel(module, blocks, strategy, mesh, device, example=example, labels=labels)
    if mesh.tp > 1:
        cut_sequences = strategy.sequence_parallel
        tp = TensorParallel(
            module, blocks, mesh, traffic, device, annotations=sharding or {}, sequence_parallel=cut_sequences
        )
    elif sharding:
        plan_sharding(module, sharding)
    cuts = tp.sharding.cuts if tp is not None else {}
    part = mesh.tp_rank if strategy.sequence_parallel else 0
    dropout = DropoutStreams(job.seed, blocks, device, part=part, split=tp.streams if tp is not None else None)
    recomputed = apply_recompute(blocks, strategy)
    make = partial(
        _hold,
        job=job,
        strategy=strategy,
        mesh=mesh,
        cuts=cuts,
        traffic=traffic,
        host=host,
        values=lambda: materialise(module, device=device, seed=job.seed, given=given, cuts=cuts, tp_rank=mesh.tp_rank),
    )
    if pipeline is None:
        units = make_units(module, unit_blocks=_unit_blocks(strategy), blocks=blocks)
        if compute != stored:
            cast_inputs(list(dict.fromkeys([module, *(part for unit in units for part in unit.modules)])), compute)
        return Built(module, make({0: (module, units)}, used=None)[0], mesh, dropout, traffic, coupled, tp, None)
    pipeline.keep_own(sharded=mesh.shard is not None)
    pipeline.recomputed.update(recomputed)
    pipeline.watch_dropout(dropout)
    if tp is not None and strategy.sequence_parallel:
        pipeline.watch_length(tp.wire)
    zero = _cut(module, pipeline, make, strategy, mesh, cuts, traffic, compute if compute != stored else None)
    return Built(module, zero, mesh, dropout, traffic, coupled, tp, pipeline)


def _cut(
    module: nn.Module,
    pipeline: PipelineParallel,
    make: Callable[..., dict[int, Zero]],
    strategy: Strategy,
    mesh: RankMesh,
    cuts: Cuts,
    traffic: Traffic,
    narrow: torch.dtype | None,
) -> StagedZero:
    """Give each stage of this rank its units, and those their way to hold parameters.

    Args:
        narrow: the compute dtype, where parameters are stored in another.
    """
    stages = {stage: (own, pipeline.units(stage, _unit_blocks(strategy))) for stage, own in pipeline.stages.items()}
    if narrow is not None:
        parts = (part for _, units in stages.values() for unit in units for part in unit.modules)
        cast_inputs(list(dict.fromkeys([module, *(part for part in parts if not isinstance(part, Stage))])), narrow)
    held = make(stages, used=pipeline.used)
    pipeline.mark_late(held)
    return StagedZero(held, mesh, cuts, pipeline, traffic)


def _unit_blocks(strategy: Strategy) -> int:
    """Blocks of a unit: several are gathered and reduced at once, and without data-parallel ranks none are."""
    return strategy.unit_blocks if strategy.dp > 1 else 1


def _refuse_stages(strategy: Strategy, blocks: int) -> None:
    if strategy.stages not in ((), (blocks,)):
        raise ConfigError(
            f"stages={','.join(map(str, strategy.stages))} for a model of {blocks} blocks with pp=1",
            why="without a pipeline there is one stage, which has all blocks",
            fix="set pp above 1, or leave stages out",
        )


def _hold(
    stages: Mapping[int, tuple[nn.Module, list[Unit]]],
    *,
    job: Job,
    strategy: Strategy,
    mesh: RankMesh,
    cuts: Cuts,
    traffic: Traffic,
    host: dist.ProcessGroup | None,
    values: Callable[[], None],
    used: Used | None,
) -> dict[int, Zero]:
    """Give stages (a whole model is one) their way to hold parameters, and parameters their values."""
    stored, compute, reduced = (getattr(torch, name) for name in (job.param_dtype, job.compute_dtype, job.reduce_dtype))
    dtypes = {"compute_dtype": compute, "stored_dtype": stored, "reduce_dtype": reduced}
    found: dict[int, Zero] = {}
    if mesh.shard is None:
        values()
        for stage, (_, units) in stages.items():
            found[stage] = Replicas(units, mesh, cuts, **dtypes, traffic=traffic, used=used)
        return found
    for stage, (module, units) in stages.items():
        found[stage] = Shards(
            module,
            units,
            mesh,
            cuts,
            zero=strategy.zero,
            prefetch=strategy.prefetch,
            **dtypes,
            traffic=traffic,
            host=host,
            used=used,
        )
    for part in found.values():
        part.point_to_stored()
    values()
    for part in found.values():
        part.find_stored()
    return found


def _module(model: nn.Module | Callable[[], nn.Module], seed: int, device: torch.device) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise ConfigError(
            f"a model of type {type(model).__name__}",
            fix="give an nn.Module, or a function without arguments that builds one",
        )
    with meta_parameters(), preserved_random_state(device):
        torch.manual_seed(seed_for(seed, "build"))
        built = model()
    if not isinstance(built, nn.Module):
        raise ConfigError(f"the model builder returned a {type(built).__name__}", fix="return an nn.Module from it")
    for name, buffer in built.named_buffers():
        if buffer.is_meta:
            raise ConfigError(
                f"buffer {name} has no values when the model builder returns",
                why="a builder's parameters have none, and the buffer was computed from one",
                fix="pass the built model instead of the function: Engine(build(), ...)",
            )
    return built


def _refuse_what_cannot_be_sharded(module: nn.Module, strategy: Strategy) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError("no parameter of the model is trainable", fix="set requires_grad on what is to be trained")
    if strategy.zero and strategy.shard > 1:
        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise ConfigError(
                    f"parameter {name} is a scalar and the strategy has zero={strategy.zero}",
                    why="parameters are sharded along their first dim, and a scalar has none",
                    fix="give it the shape (1,), or use zero=0",
                )
