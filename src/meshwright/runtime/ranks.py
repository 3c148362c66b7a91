"""The ranks: joining the process group, and how many there are."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.errors import ConfigError
from meshwright.runtime._torch import group_timeout
from meshwright.spec import Strategy

__all__ = ["global_rank", "host_group", "join_ranks", "local_device", "require_world", "world_size"]


def local_device(wanted: torch.device | str | None = None) -> torch.device:
    """This rank's device, made the current one: its own accelerator where there is one, otherwise the CPU.

    Args:
        wanted: the device, or only its type; None for the accelerator if there is one.

    Raises:
        ConfigError: this machine has fewer accelerators than ranks on it.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(wanted if wanted is not None else accelerator or "cpu")
    if device.type == "cpu":
        return device
    given = device != torch.device(device.type)
    index = device.index if given else int(os.environ.get("LOCAL_RANK", 0))
    count = torch.accelerator.device_count()
    if index >= count:
        raise ConfigError(
            f"rank {index} of this machine has no device of its own",
            why=f"the machine has {count} of type {device.type}",
            fix=f"start at most {count} ranks on this machine",
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def join_ranks(device: torch.device, *, timeout_s: float = 600.0) -> None:
    """Join the process group that a launcher described in the environment; nothing to do where there is none."""
    if dist.is_initialized() or "RANK" not in os.environ:
        return
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    atexit.register(_leave)


def _leave() -> None:
    """Leave the group when the script ends: its threads would outlive the interpreter. Not after an error, when others
    may wait for what this rank no longer does."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


def host_group(device: torch.device) -> dist.ProcessGroup | None:
    """A group for coordination on the host (checkpoints), where the default group only speaks to accelerators.

    None where the default group serves, or there is none.
    """
    if not dist.is_initialized() or device.type == "cpu":
        return None
    group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=group_timeout(device))
    return group


def world_size() -> int:
    """Ranks in the process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def global_rank() -> int:
    """This rank's number; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def require_world(strategy: Strategy) -> None:
    """Refuse a strategy for another number of ranks than there are.

    Raises:
        ConfigError: with both numbers, and how to launch.
    """
    world = world_size()
    if world != strategy.world_size:
        launched = (
            f"this process group has {world} ranks"
            if dist.is_initialized()
            else "there is one process without a process group: RANK and WORLD_SIZE are not set"
        )
        raise ConfigError(
            f"the strategy {strategy} needs {strategy.world_size} ranks, but the world size is {world}",
            why=launched,
            fix=f"launch with torchrun --nproc-per-node={strategy.world_size} or meshwright train, or set dp={world}",
        )
