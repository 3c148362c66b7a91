"""An engine as a checkpoint: its weights, optimizer states, counters and learning rates, and an engine from one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from meshwright.errors import CheckpointError
from meshwright.runtime.checkpoint import load_checkpoint, save_checkpoint, shared_manifest
from meshwright.runtime.state import (
    adopt_optimizer_states,
    group_options,
    model_states,
    new_optimizer_states,
    optimizer_numbers,
    optimizer_states,
    require_same_optimizer,
    restore_group_options,
    scheduler_state,
)

if TYPE_CHECKING:
    from meshwright.runtime.engine import Engine

__all__ = ["load_engine", "save_engine"]


def save_engine(engine: Engine, folder: Path, extra: dict[str, Any]) -> None:
    """Write an engine's checkpoint.

    Raises:
        CheckpointError: it cannot be written.
    """
    zero = engine._zero
    manifest = {
        "engine": {
            "steps_done": engine.steps_done,
            "skipped_steps": engine.skipped_steps,
            "samples_seen": engine.samples_seen,
            "loss_scale": engine._scale.state(),
            "optimizer": type(engine.optimizer).__name__,
            "groups": group_options(engine.optimizer),
            "numbers": _of_all_stages(engine, optimizer_numbers(engine.optimizer, zero.stored)),
            "scheduler_name": type(engine.scheduler).__name__ if engine.scheduler is not None else "none",
            "scheduler": scheduler_state(engine.scheduler),
        },
        "extra": extra,
    }
    states = model_states(engine.model, zero) | optimizer_states(engine.optimizer, zero)
    save_checkpoint(folder, states, manifest, group=engine._host_group)


def _of_all_stages(engine: Engine, numbers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What every pipeline rank knows of its parameters, together."""
    if engine._mesh.pp == 1:
        return numbers
    told: list[Any] = [None] * engine._mesh.pp
    dist.all_gather_object(told, numbers, group=engine._mesh.pp_group)
    return {name: values for found in told for name, values in found.items()}


def load_engine(engine: Engine, folder: Path) -> dict[str, Any]:
    """Let an engine go on from a checkpoint; what the saver gave as `extra`.

    Raises:
        CheckpointError: the folder is no complete checkpoint, or one of another model.
    """
    zero = engine._zero
    manifest, found = shared_manifest(folder, group=engine._host_group)
    saved = manifest.get("engine")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{folder} was not written by Engine.save", fix="give a checkpoint of a training run")
    require_same_optimizer(engine.optimizer, engine.scheduler, saved)
    states = new_optimizer_states(engine.optimizer, zero, found)
    load_checkpoint(folder, model_states(engine.model, zero) | states, group=engine._host_group)
    adopt_optimizer_states(engine.optimizer, zero.stored, states, saved["numbers"])
    restore_group_options(engine.optimizer, saved["groups"])
    if engine.scheduler is not None and saved["scheduler"] is not None:
        engine.scheduler.load_state_dict(saved["scheduler"])
    engine.steps_done, engine.skipped_steps = saved["steps_done"], saved["skipped_steps"]
    engine.samples_seen = saved["samples_seen"]
    engine._scale.restore(saved.get("loss_scale", {}))
    engine._measured_steps = 0
    extra: dict[str, Any] = manifest["extra"]
    return extra
