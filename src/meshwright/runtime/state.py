"""Model and optimizer states by global name: what a checkpoint holds, whatever the layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.errors import CheckpointError

__all__ = ["allocate_optimizer_states", "group_options", "named_states", "restore_group_options"]

_MODEL, _OPTIMIZER = "model.", "optimizer."


def named_states(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Every parameter (tied ones once), persistent buffer and optimizer state under its global name.

    `model.<name>` and `optimizer.<parameter name>.<state>`; sharded ones are DTensors.
    """
    states: dict[str, torch.Tensor] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, weight in model.named_parameters():
        states[_MODEL + name] = weight.detach()
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in persistent:
            states[_MODEL + name] = buffer
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                states[f"{_OPTIMIZER}{names[id(parameter)]}.{key}"] = value
    return states


def allocate_optimizer_states(
    model: nn.Module, optimizer: Optimizer, stored: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Make room for the optimizer states that a checkpoint holds, each laid out like its parameter.

    (No step with zero gradients: it would count as a step.)
    """
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for full, (shape, dtype) in stored.items():
        if not full.startswith(_OPTIMIZER):
            continue
        name, _, key = full[len(_OPTIMIZER) :].rpartition(".")
        parameter = parameters.get(name)
        if parameter is None or id(parameter) not in groups:
            raise CheckpointError(
                f"the checkpoint holds optimizer states of {name}, which this model does not train",
                why="it is a checkpoint of another model",
                fix="resume with the model that wrote it",
            )
        if shape == tuple(parameter.shape) and shape:
            value: torch.Tensor = torch.zeros_like(parameter.detach(), dtype=dtype)
        else:
            group = groups[id(parameter)]
            on_device = group.get("fused") or group.get("capturable")
            value = torch.zeros(shape, dtype=dtype, device=_device(parameter) if on_device else "cpu")
        optimizer.state[parameter][key] = value


def group_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each parameter group's options that are plain numbers, texts or tuples of them (learning rate, betas, ...)."""
    return [
        {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in group.items()
            if key != "params" and _plain(value)
        }
        for group in optimizer.param_groups
    ]


def restore_group_options(optimizer: Optimizer, options: list[dict[str, Any]]) -> None:
    """Set the saved options of each parameter group.

    Raises:
        CheckpointError: another number of groups.
    """
    if len(options) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(options)} parameter groups, the optimizer {len(optimizer.param_groups)}",
            fix="build the optimizer with the same parameter groups",
        )
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _device(parameter: torch.Tensor) -> torch.device:
    return parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
