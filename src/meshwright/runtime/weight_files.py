"""Weight files: safetensors in Hugging Face's layout, mapped, of which each rank reads only its own boxes.

Only headers are read when they are opened; no pickle is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from meshwright.errors import CheckpointError, ConfigError
from meshwright.runtime.safetensors_file import DTYPES

__all__ = ["CONFIG", "INDEX", "WEIGHTS", "WeightFiles", "require_path"]

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_FETCH = "fetch the files again"


@dataclass(frozen=True)
class _Entry:
    """One tensor: its shape and dtype, and the mapped file that holds it."""

    shape: tuple[int, ...]
    code: str
    file: Any


class WeightFiles:
    """The tensors of a file, or of a folder with `model.safetensors` or an index of several, by their keys.

    Raises:
        ConfigError: there are no such files.
        CheckpointError: one is missing, cut or damaged.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._entries: dict[str, _Entry] = {}
        path = _file_in(place)
        if path.name.endswith(".json"):
            self._open_index(path)
        else:
            self._entries = _opened(path)

    def names(self) -> list[str]:
        """What the files name their tensors."""
        return list(self._entries)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""
        return self._entries[key].shape

    def dtype(self, key: str) -> torch.dtype | None:
        """The dtype of a tensor; None for one that this version does not know."""
        return DTYPES.get(self._entries[key].code)

    def read(self, key: str, box: tuple[slice, ...], target: torch.Tensor) -> None:
        """Copy a box of a tensor into `target`, converting it to its dtype; only the pages of the box are read.

        Raises:
            CheckpointError: it cannot be read.
        """
        if target.numel():
            target.copy_(self._part(key, box))

    def differs(self, key: str, box: tuple[slice, ...], value: torch.Tensor) -> bool:
        """Whether a box of a tensor, in the dtype of `value`, is not equal to it."""
        return bool(value.numel()) and not torch.equal(self._part(key, box).to(value), value)

    def whole(self, key: str) -> torch.Tensor:
        """A whole tensor in its own dtype, mapped: it takes memory where it is used.

        Raises:
            CheckpointError: it cannot be read.
        """
        return self._part(key, ())

    def _part(self, key: str, box: tuple[slice, ...]) -> torch.Tensor:
        try:
            whole = self._entries[key].file.get_slice(key)
            part: torch.Tensor = whole[box] if box else whole[...]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{key} in {self.place} cannot be read", why=str(error), fix=_FETCH) from error
        return part

    def _open_index(self, path: Path) -> None:
        names = _weight_map(path)
        for file in sorted(set(names.values())):
            if Path(file).name != file:
                raise CheckpointError(f"{path} points outside its folder", why=f"it names {file!r}", fix=_FETCH)
            if not (path.parent / file).is_file():
                raise CheckpointError(f"{path} names {file}", why="there is no such file beside it", fix=_FETCH)
            self._entries.update(_opened(path.parent / file))
        absent = [name for name in names if name not in self._entries]
        if absent:
            raise CheckpointError(f"{path} names {absent[0]}", why="none of its files holds that tensor", fix=_FETCH)


def require_path(place: Any) -> Path:
    """A user's path.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(place, (str, Path)):
        raise ConfigError(
            f"weights of type {type(place).__name__}", fix="give the path of a safetensors file or folder"
        )
    return Path(place)


def _file_in(place: Path) -> Path:
    """The safetensors file, or the index of several, that a user's path means."""
    if place.is_file():
        if place.name.endswith((".safetensors", ".safetensors.index.json")):
            return place
        raise _not_safetensors(f"weights={place} is no safetensors file")
    if not place.is_dir():
        raise ConfigError(
            f"weights={place}", why="there is no such file or folder", fix="give a safetensors file or its folder"
        )
    for name in (WEIGHTS, INDEX):
        if (place / name).is_file():
            return place / name
    what = f"weights={place} has neither {WEIGHTS} nor {INDEX}"
    if (place / "manifest.json").is_file():
        raise ConfigError(
            what, why="it is a checkpoint of Meshwright", fix="build the engine, then engine.load(folder)"
        )
    found = sorted(path.name for path in place.glob("*.safetensors"))
    if found:
        fix = "give the file itself, or fetch the index that belongs to these files"
        raise ConfigError(what, why=f"it holds {', '.join(found[:3])}", fix=fix)
    if any(path.suffix in (".bin", ".pt", ".pth", ".ckpt") for path in place.iterdir()):
        raise _not_safetensors(what)
    raise ConfigError(what, why="no file of it is a safetensors file", fix="give a safetensors file or its folder")


def _not_safetensors(what: str) -> ConfigError:
    return ConfigError(
        what,
        why="PyTorch's .bin and .pt files are pickles: reading one can execute code, so none is ever read",
        fix="convert it once where you trust it: from_pretrained(folder).save_pretrained(other) writes safetensors",
    )


def _weight_map(path: Path) -> Mapping[str, str]:
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read", why=f"{type(error).__name__}: {error}", fix=_FETCH) from error
    names = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{path} is no index", why="it has no weight_map of names to files", fix=_FETCH)
    return names


def _opened(path: Path) -> dict[str, _Entry]:
    try:
        file: Any = safe_open(str(path), framework="pt", device="cpu")
        parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  not a dict
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read", why=f"it is cut or damaged: {error}", fix=_FETCH) from error
    return {key: _Entry(tuple(part.get_shape()), part.get_dtype(), file) for key, part in parts.items()}
