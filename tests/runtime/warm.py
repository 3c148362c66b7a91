"""Engines that begin with the values of weight files, and how these are compared with the model that wrote them."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from meshwright.errors import MeshwrightError
from meshwright.runtime import Engine, ModelLoss
from meshwright.spec import Job, Strategy
from tests.harness.hugging_face import FAMILIES, ROWS, make_model

__all__ = ["changed", "differing", "hollow", "listening", "quiet", "refused", "start", "written"]


def written(folder: Path, name: str, *, tied: bool = False, files: int = 1, dtype: torch.dtype = torch.float32) -> Path:
    """A folder as Hugging Face writes it, with an index where there are several files."""
    model = make_model(name, tied=tied, dtype=torch.float32)
    size = sum(parameter.nbytes for parameter in model.parameters())
    with quiet():
        model.to(dtype).save_pretrained(folder, max_shard_size=-(-size // files) + 64)
    assert (folder / "model.safetensors.index.json").exists() == (files > 1)
    return folder


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that transformers and peft raise in code of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def hollow(name: str, *, tied: bool = False) -> Any:
    """A function that builds the model, without copying any value of `make_model`."""
    config = make_model(name, tied=tied, dtype=torch.float32).config
    return lambda: FAMILIES[name][0](config)


def start(model: Any, weights: Path | None, *, zero: int = 0, loss: Any = None, **changes: Any) -> Engine:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return Engine(
        model,
        loss or ModelLoss(),
        lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1),
        Job(global_batch=ROWS if ROWS % ranks == 0 else ranks),
        Strategy(dp=ranks, zero=zero if ranks > 1 else 0, microbatch=1, **changes),
        weights=weights,
        measure_memory="never",
    )


def differing(engine: Engine, wanted: nn.Module | dict[str, Tensor]) -> list[str]:
    """Names of the parameters and buffers of which this rank does not hold its part to the bit."""
    if isinstance(wanted, nn.Module):
        wanted = dict(wanted.named_parameters()) | dict(wanted.named_buffers())
    held = engine.named_parameters() | dict(engine.model.named_buffers())
    return [name for name, value in wanted.items() if not _same_part(held[name], value)]


def _same_part(held: Tensor, whole: Tensor) -> bool:
    if not isinstance(held, DTensor):
        return torch.equal(held, whole)
    mesh, placement = held.device_mesh, held.placements[-1]
    assert isinstance(placement, Shard)
    chunks = whole.detach().chunk(mesh.size(mesh.ndim - 1), placement.dim)
    rank, part = mesh.get_local_rank(mesh.ndim - 1), held.detach().to_local()
    return torch.equal(part, chunks[rank]) if rank < len(chunks) else not part.numel()


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """What the library logs inside, as texts."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("meshwright").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("meshwright").removeHandler(handler)


def refused(call: Any, *args: Any, **kwargs: Any) -> str:
    """Kind and text of the error that a call raises, or "" where it raises none of ours."""
    try:
        call(*args, **kwargs)
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def changed(folder: Path, change: Any) -> Path:
    """Rewrite the one file of a folder with what `change` makes of its tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return folder
