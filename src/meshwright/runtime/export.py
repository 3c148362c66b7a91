"""Export: a trained model as other tools read it, Hugging Face's safetensors or PEFT's adapters, tensor by tensor."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.errors import CheckpointError, ConfigError
from meshwright.runtime.agreement import failing_together
from meshwright.runtime.boxes import Held, gather_to_all, gather_to_first
from meshwright.runtime.checkpoint_files import Draft, explained
from meshwright.runtime.ranks import global_rank
from meshwright.runtime.safetensors_file import CODES, Piece, as_bytes, write_pieces
from meshwright.runtime.weight_files import INDEX, WEIGHTS, WeightFiles
from meshwright.runtime.zero import Zero

__all__ = ["export_model", "read_tensor"]


@dataclass(frozen=True)
class _File:
    """A file of an export: its name in the folder, and what it holds, each with what this rank holds of it."""

    name: str
    entries: tuple[tuple[Piece, Held], ...]

    @property
    def pieces(self) -> list[Piece]:
        return [piece for piece, _ in self.entries]


def export_model(
    model: nn.Module,
    zero: Zero,
    folder: Path,
    *,
    max_shard_bytes: int,
    dtype: torch.dtype | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Write a model's tensors, whole or not at all; all ranks call it, the first one writes.

    Args:
        zero: how this rank holds the model's parameters.
        folder: the final name; its parents are made.
        max_shard_bytes: the most bytes of tensors in one file (one larger tensor has a file of its own).
        dtype: of floating-point parameters; as they are stored where None.
        group: carries short Python objects between all ranks.

    Raises:
        ConfigError: a dtype that safetensors does not have.
        CheckpointError: on all ranks; nothing is left then.
    """
    with failing_together(group):
        files = _planned(model, zero, max_shard_bytes=max_shard_bytes, dtype=dtype)
        needed_bytes = sum(piece.size_bytes for file in files for piece in file.pieces)
    with ExitStack() as stack:
        draft: Draft | None = None
        with failing_together(group):
            if global_rank() == 0:
                with explained("make the folder for", folder, needed_bytes=needed_bytes):
                    draft = Draft(folder, needed_bytes=needed_bytes)
                stack.callback(draft.close)
        try:
            with failing_together(group):
                entries = (entry for file in files for entry in file.entries)
                gathered = (gather_to_first(held, piece.dtype, zero.mesh) for piece, held in entries)
                try:
                    if draft is not None:
                        with explained("write", folder, needed_bytes=needed_bytes):
                            _write(draft, files, gathered, model)
                finally:
                    for _ in gathered:  # other ranks go on sending, whatever happened to the first one's disk
                        pass
        except BaseException:
            if draft is not None:
                draft.discard()
            raise


def read_tensor(model: nn.Module, zero: Zero, name: str) -> torch.Tensor:
    """A whole parameter or buffer on every rank, by any of its global names; all ranks call it with the same one.

    Raises:
        ConfigError: the model has none of that name.
    """
    tensors = dict(model.named_buffers()) | zero.everything()
    first = zero.first_names(model).get(name, name)
    if first not in tensors:
        raise ConfigError(
            f"the model has no parameter or buffer {name!r}",
            why=f"it has {', '.join(list(zero.everything())[:5])}, ...",
            fix="name it as model.named_parameters() or model.named_buffers() does",
        )
    return gather_to_all(zero.held(first, tensors[first]), zero.mesh)


# ---------------------------------------------------------------------------------------------------- what is written


def _planned(
    model: nn.Module,
    zero: Zero,
    *,
    max_shard_bytes: int,
    dtype: torch.dtype | None,
) -> list[_File]:
    """The files of an export, the same on every rank."""
    if dtype is not None and not (dtype.is_floating_point and dtype in CODES):
        raise ConfigError(f"dtype={dtype}", why="weights are floating-point numbers", fix="use torch.bfloat16, say")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes={max_shard_bytes}", fix="give the most bytes of a file, 5 * 2**30 say")
    entries: list[tuple[Piece, Held]] = []
    chosen = _expected_names(model, zero)
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    parameters = zero.everything()
    for name, tensor in {**parameters, **buffers}.items():
        turned = dtype if dtype is not None and name in parameters and tensor.is_floating_point() else tensor.dtype
        if turned not in CODES:
            raise ConfigError(f"{name} is of {turned}", why="safetensors has no such dtype", fix="export with dtype=")
        held = zero.held(name, tensor)
        entries.append((Piece(name=chosen.get(name, name), dtype=turned, shape=held.shape), held))
    if _is_adapted(model):
        return _adapter_files(model, entries)
    entries.sort(key=lambda entry: -entry[0].dtype.itemsize)
    shards: list[list[tuple[Piece, Held]]] = [[]]
    held_bytes = 0
    for entry in entries:
        if shards[-1] and held_bytes + entry[0].size_bytes > max_shard_bytes:
            shards.append([])
            held_bytes = 0
        shards[-1].append(entry)
        held_bytes += entry[0].size_bytes
    if len(shards) == 1:
        return [_File(WEIGHTS, tuple(shards[0]))]
    return [
        _File(f"model-{number:05d}-of-{len(shards):05d}.safetensors", tuple(shard))
        for number, shard in enumerate(shards, start=1)
    ]


def _expected_names(model: nn.Module, zero: Zero) -> dict[str, str]:
    """Tied weights by their first name: the name under which Hugging Face's `from_pretrained` looks for them."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    chosen: dict[str, str] = {}
    for name, first in zero.first_names(model).items():
        if name not in tied:
            chosen.setdefault(first, name)
    return chosen


def _is_adapted(model: nn.Module) -> bool:
    """Whether PEFT has put adapters in, around the model or only inside it."""
    if "peft" not in sys.modules or not hasattr(model, "peft_config"):
        return False
    peft: Any = sys.modules["peft"]
    inside = (isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer) for module in model.modules())
    return isinstance(model, peft.PeftModel) or any(inside)


def _adapter_files(model: Any, entries: Sequence[tuple[Piece, Held]]) -> list[_File]:
    """Only the adapters of a PEFT model, under the names and in the folders that PEFT gives them."""
    peft: Any = sys.modules["peft"]
    utils, files = peft.utils, []
    prefix = "" if isinstance(model, peft.PeftModel) else "base_model.model."
    by_name = {piece.name: (piece, held) for piece, held in entries}
    for adapter in model.peft_config:
        stand_ins = {name: torch.empty(0, device="meta") for name in by_name}
        names = {id(stand_in): name for name, stand_in in stand_ins.items()}
        kept = utils.get_peft_model_state_dict(
            model, state_dict=stand_ins, adapter_name=adapter, save_embedding_layers=False
        )
        chosen = []
        for key, stand_in in kept.items():
            piece, held = by_name[names[id(stand_in)]]
            chosen.append((Piece(name=prefix + key, dtype=piece.dtype, shape=piece.shape), held))
        chosen.sort(key=lambda entry: -entry[0].dtype.itemsize)
        place = "" if adapter == "default" else f"{adapter}/"
        files.append(_File(f"{place}{utils.SAFETENSORS_WEIGHTS_NAME}", tuple(chosen)))
    return files


# ------------------------------------------------------------------------------------------------------- the first rank


def _write(draft: Draft, files: Sequence[_File], gathered: Iterator[torch.Tensor | None], model: nn.Module) -> None:
    """Write all files, look at what lies on the disk, and give the folder its name."""
    sizes: dict[str, int] = {}
    for file in files:
        path = draft.path / file.name
        path.parent.mkdir(exist_ok=True)
        whole = zip(file.pieces, islice(gathered, len(file.pieces)), strict=True)
        buffers = (_bytes_of(piece, tensor) for piece, tensor in whole)
        sizes[file.name] = write_pieces(path, file.pieces, buffers, metadata={"format": "pt"})
        _verify(path, file)
    if len(files) > 1 and not _is_adapted(model):
        total_bytes = sum(piece.size_bytes for file in files for piece in file.pieces)
        weight_map = {piece.name: file.name for file in files for piece in file.pieces}
        table = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (draft.path / INDEX).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    _write_configs(draft.path, model, files)
    draft.commit(sizes, None)


def _bytes_of(piece: Piece, tensor: torch.Tensor | None) -> memoryview:
    """The bytes of a gathered tensor, once it has all elements."""
    if tensor is None or tuple(tensor.shape) != piece.shape:
        found = "nothing" if tensor is None else f"{tensor.numel()} elements ({_shape(tensor.shape)})"
        raise CheckpointError(
            f"{piece.name} cannot be exported",
            why=f"{found} of {math.prod(piece.shape)} ({_shape(piece.shape)}) were gathered",
            fix="report it: this is a fault of Meshwright",
        )
    return as_bytes(tensor)


def _verify(path: Path, file: _File) -> None:
    """Read back what lies on the disk: refuse a file that holds other tensors or shapes than the model."""
    found = WeightFiles(path)
    shapes = {name: found.shape(name) for name in found.names()}
    if shapes != {piece.name: piece.shape for piece in file.pieces}:
        raise CheckpointError(
            f"{path.name} does not hold what was written", why="read back, it differs", fix="check the disk"
        )


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "a scalar"


def _write_configs(folder: Path, model: Any, files: Sequence[_File]) -> None:
    """What belongs beside the weights: the adapters' configs, or the model's with its class and dtype."""
    if _is_adapted(model):
        for adapter, adapter_config in model.peft_config.items():
            written = copy.deepcopy(adapter_config)
            written.inference_mode = True
            written.save_pretrained(str(folder if adapter == "default" else folder / adapter))
        return
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    written = copy.deepcopy(config)
    dtypes = [piece.dtype for file in files for piece in file.pieces if piece.dtype.is_floating_point]
    if dtypes:
        written.dtype = str(max(dtypes, key=dtypes.count)).removeprefix("torch.")
    kind = type(model).__mro__[2] if isinstance(model, FSDPModule) else type(model)  # a class that FSDP2 derived
    written.architectures = [kind.__name__]
    written.save_pretrained(str(folder))
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained") and getattr(model, "can_generate", bool)():
        generation.save_pretrained(str(folder))
