"""A small model with its optimizer states in any layout, and how checkpoints of it are made and compared."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwright.errors import CheckpointError
from meshwright.runtime.checkpoint import load_checkpoint, save_checkpoint

__all__ = [
    "MANIFEST",
    "bits_of",
    "differing",
    "load_zeros",
    "refusal",
    "save_filled",
    "small_checkpoint",
    "small_disk",
    "tensors_of",
    "values_of",
]

MANIFEST = {"step": 7, "model": {"vocab_size": 101}, "loss": 0.1 + 0.2, "text": "\u00e4", "nested": [1, [2, None]]}
STATES = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float64}


class Tiny(nn.Module):
    """Dims that divide nothing: 101 x 10, and tensors with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 10)
        self.narrow = nn.Linear(10, 3)
        self.norm = nn.LayerNorm(10)


def values_of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The whole tensor of a name, the same in every process, with values that a careless copy would change."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    whole = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    for index, odd in enumerate((float("nan"), -0.0, float("inf"))):
        whole.reshape(-1)[index] = odd
    return whole


def tensors_of(layout: str, *, filled: bool) -> dict[str, torch.Tensor]:
    """A model and its optimizer states by name. `layout`: plain, shard (1-D mesh) or hybrid (replicate x shard)."""
    model = Tiny()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = values_of(f"model.{name}", tuple(parameter.shape), parameter.dtype)
            parameter.copy_(whole if filled else torch.zeros_like(whole))
    if layout != "plain":
        world = dist.get_world_size()
        shape = (world,) if layout == "shard" else (2, world // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
        fully_shard(model.embedding, mesh=mesh)
        fully_shard(model, mesh=mesh)
    tensors: dict[str, torch.Tensor] = {f"model.{name}": value for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for state, dtype in STATES.items():
            key = f"optimizer.{name}.{state}"
            whole = values_of(key, tuple(parameter.shape), dtype)
            whole = whole if filled else torch.zeros_like(whole)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            tensors[key] = whole
        tensors[f"optimizer.{name}.step"] = torch.tensor(7.0 if filled else 0.0)
    turned = values_of("turned", (5, 4), torch.float32)
    tensors["optimizer.turned"] = (turned if filled else torch.zeros_like(turned)).t()
    return tensors


def bits_of(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    data: bytes = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def differing(tensors: dict[str, torch.Tensor], layout: str) -> list[str]:
    wanted = tensors_of(layout, filled=True)
    return [name for name in wanted if bits_of(tensors[name]) != bits_of(wanted[name])]


def save_filled(layout: str, folder: Path) -> None:
    save_checkpoint(folder, tensors_of(layout, filled=True), MANIFEST)


def load_zeros(layout: str, folder: Path) -> list[str]:
    """Loads; names of the tensors with a bit that differs."""
    tensors = tensors_of(layout, filled=False)
    assert load_checkpoint(folder, tensors) == MANIFEST
    return differing(tensors, layout)


def small_checkpoint(folder: Path, **tensors: torch.Tensor) -> Path:
    """A checkpoint made by this process alone."""
    named = tensors or {"a": torch.arange(6.0).reshape(2, 3)}
    save_checkpoint(folder, {f"model.{name}": value for name, value in named.items()}, {"step": 1})
    return folder


def refusal(fn: Any, *args: Any) -> str:
    """The text of the CheckpointError that a call raises, or "" where it raises none."""
    try:
        fn(*args)
    except CheckpointError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of that size; skips the test where nobody may mount one."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
