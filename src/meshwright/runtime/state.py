"""Model and optimizer states by global name: what a checkpoint holds, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwright.errors import CheckpointError
from meshwright.runtime.boxes import Held, own_part
from meshwright.runtime.zero import Zero

__all__ = [
    "adopt_optimizer_states",
    "group_options",
    "model_states",
    "new_optimizer_states",
    "optimizer_numbers",
    "optimizer_states",
    "require_same_optimizer",
    "restore_group_options",
    "scheduler_state",
]

_MODEL, _OPTIMIZER = "model.", "optimizer."
#: How an optimizer's code runs, not what it computes: each run decides for itself.
_EXECUTION = ("params", "fused", "foreach", "capturable", "differentiable")
Parameters = Mapping[str, nn.Parameter]


def model_states(model: nn.Module, zero: Zero) -> dict[str, Held]:
    """What this rank holds of every parameter (tied ones once) and persistent buffer, as `model.<name>`."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent and zero.holds(name)}
    return {_MODEL + name: zero.held(name, tensor) for name, tensor in {**zero.stored, **buffers}.items()}


def optimizer_states(optimizer: Optimizer, zero: Zero) -> dict[str, Held]:
    """What it holds of every tensor of the optimizer's states, as `optimizer.<parameter name>.<state>`."""
    return {
        f"{_OPTIMIZER}{name}.{key}": zero.held(name, value) if _lies_like(key, value, parameter) else Held(value)
        for name, parameter in zero.stored.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def optimizer_numbers(optimizer: Optimizer, parameters: Parameters) -> dict[str, dict[str, Any]]:
    """States that are plain numbers (a step count, often), by parameter name.

    Raises:
        CheckpointError: a state that is neither a tensor nor a number: it would be lost.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, (bool, int, float)):
                found.setdefault(name, {})[key] = value
            elif value is not None and not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"the optimizer keeps {key} of {name} as a {type(value).__name__}",
                    why="a checkpoint holds tensors and numbers, so it would be lost",
                    fix="use an optimizer whose states are tensors or numbers",
                )
    return found


def new_optimizer_states(
    optimizer: Optimizer, zero: Zero, stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Held]:
    """Room for the optimizer states of a checkpoint, each laid out like its parameter; the optimizer is not touched.

    (No step with zero gradients to create them: it would count as a step.)

    Raises:
        CheckpointError: states of a parameter that this optimizer does not train.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    states: dict[str, Held] = {}
    for full, (shape, dtype) in stored.items():
        if not full.startswith(_OPTIMIZER):
            continue
        name, _, key = full[len(_OPTIMIZER) :].rpartition(".")
        parameter = zero.stored.get(name)
        if parameter is None and name in zero.used.names:
            continue  # another stage's
        if parameter is None or id(parameter) not in groups:
            raise CheckpointError(
                f"the checkpoint holds optimizer states of {name}, which this model does not train",
                why="it is a checkpoint of another model",
                fix="resume with the model that wrote it",
            )
        if shape == zero.held(name, parameter).shape and key != "step":
            states[full] = zero.held(name, torch.zeros_like(parameter.detach(), dtype=dtype))
        else:
            group = groups[id(parameter)]
            on_device = group.get("fused") or group.get("capturable")
            device = own_part(parameter).device if on_device else "cpu"
            states[full] = Held(torch.zeros(shape, dtype=dtype, device=device))
    return states


def adopt_optimizer_states(
    optimizer: Optimizer, parameters: Parameters, states: Mapping[str, Held], numbers: Mapping[str, Any]
) -> None:
    """Give the optimizer loaded states in place of its own."""
    optimizer.state.clear()
    for full, held in states.items():
        name, _, key = full[len(_OPTIMIZER) :].rpartition(".")
        optimizer.state[parameters[name]][key] = held.tensor
    for name, values in numbers.items():
        if name in parameters:
            optimizer.state[parameters[name]].update(values)


def require_same_optimizer(optimizer: Optimizer, scheduler: LRScheduler | None, saved: Mapping[str, Any]) -> None:
    """Refuse the states of another optimizer before anything is touched.

    Raises:
        CheckpointError: another optimizer, number of parameter groups or scheduler.
    """
    own = {"optimizer": type(optimizer).__name__, "parameter groups": len(optimizer.param_groups)}
    theirs = {"optimizer": saved["optimizer"], "parameter groups": len(saved["groups"])}
    own["scheduler"] = type(scheduler).__name__ if scheduler is not None else "none"
    theirs["scheduler"] = saved["scheduler_name"]
    for what, value in own.items():
        if theirs[what] != value:
            raise CheckpointError(
                f"the checkpoint was written with {what} {theirs[what]}, this engine has {value}",
                why="its states and learning rates belong to that one",
                fix="build the engine with the same optimizer, groups and scheduler",
            )


def group_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each parameter group's options that are plain numbers, texts or tuples of them (learning rate, betas, ...)."""
    return [
        {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in group.items()
            if key not in _EXECUTION and _plain(value)
        }
        for group in optimizer.param_groups
    ]


def restore_group_options(optimizer: Optimizer, options: list[dict[str, Any]]) -> None:
    """Set the saved options of each parameter group."""
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})


def scheduler_state(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """A scheduler's state as JSON can hold it; functions and tables with numbers as keys are left to its maker."""
    if scheduler is None:
        return None
    state: dict[str, Any] = _jsonable(scheduler.state_dict())
    return state


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        # LambdaLR asks for its functions when it loads; None stands for one, which stays the maker's.
        lambdas = {key: [None] * len(item) for key, item in value.items() if key == "lr_lambdas"}
        kept = {key: _jsonable(item) for key, item in value.items() if isinstance(key, str) and _keeps(item)}
        return kept | lambdas
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return value


def _keeps(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value)
    if isinstance(value, (list, tuple)):
        return all(_keeps(item) for item in value)
    return _plain(value)


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _lies_like(key: str, value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state has an element for each of the parameter's; a count of steps is one even beside a scalar."""
    return value.shape == parameter.shape and key != "step"
