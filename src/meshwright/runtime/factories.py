"""Optimizers and schedulers are built by the engine, from functions: they must hold the sharded parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from meshwright.errors import ConfigError
from meshwright.runtime.elementwise import require_elementwise
from meshwright.spec import Strategy

__all__ = ["make_optimizer", "make_scheduler"]


def make_optimizer(factory: Any, mine: list[nn.Parameter], strategy: Strategy) -> Optimizer:
    """Build the optimizer over trainable parameters, after sharding.

    Raises:
        ConfigError: it is built already, is none, needs more than one evaluation a step, looks beyond the elements that
            a rank holds, or holds other parameters.
    """
    if isinstance(factory, Optimizer):
        raise ConfigError(
            f"an optimizer that is already built ({type(factory).__name__})",
            why="it holds the parameters from before sharding, so it would train nothing",
            fix="pass a function: optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
        )
    if not callable(factory):
        raise ConfigError(
            f"optimizer of type {type(factory).__name__}", fix="pass a function of parameters that returns an optimizer"
        )
    made = factory(mine)
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"the optimizer function returned a {type(made).__name__}", fix="return a torch.optim.Optimizer"
        )
    if isinstance(made, torch.optim.LBFGS):
        raise ConfigError("LBFGS calls the loss again and again", why="a step is played once", fix="use AdamW or SGD")
    require_elementwise(made, strategy)
    known = {id(parameter) for parameter in mine}
    if any(id(parameter) not in known for group in made.param_groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer holds parameters that are not this model's",
            why="sharding replaced the parameters, so those from before would never be trained",
            fix="build it from the parameters that the function is called with",
        )
    return made


def make_scheduler(factory: Any, optimizer: Optimizer) -> LRScheduler | None:
    """Build the learning-rate scheduler over the optimizer.

    Raises:
        ConfigError: it is built already, is none, or needs more than the number of steps.
    """
    if factory is None:
        return None
    made = factory(optimizer) if callable(factory) and not isinstance(factory, LRScheduler) else factory
    if made is factory or not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            f"scheduler {type(made).__name__} cannot be used",
            why="it is built from the sharded optimizer and stepped once a step, without arguments",
            fix="pass a function: scheduler=lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 1000)",
        )
    return made
