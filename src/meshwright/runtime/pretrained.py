"""Pretrained weights as initial values: each rank reads its own boxes of safetensors, straight into what it holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import ConfigError
from meshwright.runtime.agreement import failing_together
from meshwright.runtime.boxes import Held
from meshwright.runtime.ranks import global_rank, world_size
from meshwright.runtime.seeds import seed_for
from meshwright.runtime.weight_conversions import Conversion
from meshwright.runtime.weight_files import WeightFiles, require_path
from meshwright.runtime.weight_names import Names, find_keys

__all__ = ["Pretrained"]

_LOG = logging.getLogger("meshwright")
#: How many names an error or a warning shows.
_NAMED = 5
_READABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Pretrained:
    """Which key of weight files each parameter and persistent buffer of a model is read from.

    Made on all ranks together, before anything is sharded; nothing of the model is touched before all ranks have found
    files, names, shapes and dtypes right. One warning of rank 0 names what is not stored, another what has no place.

    Args:
        model: real or with meta parameters.
        place: a safetensors file, or a folder of Hugging Face's layout.
        group: carries short Python objects between all ranks.

    Raises:
        ConfigError: no such files, none of their keys is the model's, or a shape or dtype differs.
        CheckpointError: a file is missing, cut or damaged.
    """

    def __init__(self, model: nn.Module, place: str | Path, group: dist.ProcessGroup | None) -> None:
        self._group = group
        with failing_together(group):
            self._files = WeightFiles(require_path(place))
            names = find_keys(model, self._files.names())
            self._keys = {name: keys for name, keys in names.keys.items() if keys}
            self._made = names.made
            self._check(model, names)
        self._require_same_files()
        if global_rank() == 0:
            self._warn(names)

    def __contains__(self, name: str) -> bool:
        return name in self._keys or name in self._made

    def fill(self, targets: Mapping[str, Held]) -> None:
        """Copy this rank's boxes from the files into what it holds of the model's tensors, by global name.

        All ranks call it. Elements are converted to the tensor's dtype box by box. What transformers makes of several
        tensors is made whole, one at a time. Padding is left as it is.

        Raises:
            CheckpointError: on all ranks, when one cannot read; the tensors are undefined then.
            ConfigError: a tied weight is stored twice with different values.
        """
        with failing_together(self._group), torch.no_grad():
            for name, held in targets.items():
                if name in self._made:
                    made = self._made[name].make(self._files.whole)
                    for box, part in held.pieces():
                        part.copy_(made[box])
                    continue
                first, *others = self._keys[name]
                for box, part in held.pieces():
                    self._files.read(first, box, part)
                    if other := next((key for key in others if self._files.differs(key, box, part)), None):
                        raise ConfigError(
                            f"{self._files.place} stores {first} and {other} with different values",
                            why=f"the model ties the two ({name}), so one of them would be lost",
                            fix="build the model without tying them (tie_word_embeddings=False)",
                        )

    def fill_buffers(self, model: nn.Module) -> None:
        """The same for all persistent buffers that are stored."""
        self.fill({name: Held(buffer) for name, buffer in model.named_buffers() if name in self})

    def _require_same_files(self) -> None:
        """Refuse machines whose files hold other tensors: they would take other parts in what follows."""
        if world_size() == 1:
            return
        mine = seed_for(*sorted(self._keys), "made", *sorted(self._made))
        found = [mine] * world_size()
        dist.all_gather_object(found, mine, group=self._group)
        if len(set(found)) > 1:
            raise ConfigError(
                f"{self._files.place} holds other tensors on some ranks than on others",
                why="every rank reads its slices from the files of its own machine",
                fix="put the same files on every machine, or on a shared file system",
            )

    def _check(self, model: nn.Module, names: Names) -> None:
        place, files = self._files.place, self._files
        if not self._keys and not self._made:
            raise ConfigError(
                f"{place} holds no weight of this model",
                why=f"it has {_some(files.names())}; the model has {_some(list(names.keys))}",
                fix="give the files of this model, or build the model that its config.json describes",
            )
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, conversion in self._made.items():
            self._check_made(name, conversion, tensors[name])
        pairs = [(tensors[name], name, key) for name, keys in self._keys.items() for key in keys]
        other = [
            f"{key} is stored as {_shape(files.shape(key))}, and {name} is {_shape(tensor.shape)}"
            for tensor, name, key in pairs
            if files.shape(key) != tuple(tensor.shape)
        ]
        if other:
            raise ConfigError(
                f"{place} is of a model with other sizes",
                why=_some(other, "; "),
                fix="build the model from the config.json beside the files; for a new head, give that part another "
                "name or leave its tensors out of the files",
            )
        unlike = [
            f"{key} is stored in {files.dtype(key) or 'an unknown dtype'}, and {name} is {tensor.dtype}"
            for tensor, name, key in pairs
            if not _convertible(files.dtype(key), tensor.dtype)
        ]
        if unlike:
            raise ConfigError(
                f"{place} stores weights that cannot be converted",
                why=_some(unlike, "; "),
                fix="convert quantised weights to bfloat16 or float32 first",
            )

    def _check_made(self, name: str, conversion: Conversion, tensor: torch.Tensor) -> None:
        """Make one tensor without data, and see that it fits."""
        files = self._files
        try:
            made = conversion.make(lambda key: torch.empty(files.shape(key), dtype=files.dtype(key), device="meta"))
            found, fits = _shape(made.shape), made.shape == tensor.shape and _convertible(made.dtype, tensor.dtype)
        except Exception as error:  # whatever another library's conversion raises
            found, fits = f"nothing: {type(error).__name__}: {error}", False
        if not fits:
            raise ConfigError(
                f"{files.place}: {name} cannot be made as transformers makes it",
                why=f"it is {_shape(tensor.shape)} and {_some(conversion.keys)} make {found}",
                fix="write the files once as the model has it: from_pretrained(folder).save_pretrained(other, "
                "save_original_format=False), or pass the model that from_pretrained built",
            )

    def _warn(self, names: Names) -> None:
        place = self._files.place
        if names.missing:
            text = "%s does not hold %d of the model's tensors, which keep their initial values: %s"
            _LOG.warning(text, place, len(names.missing), _some(names.missing))
        if names.unknown:
            text = "%s holds %d tensors that the model has no place for: %s"
            _LOG.warning(text, place, len(names.unknown), _some(names.unknown))


def _convertible(stored: torch.dtype | None, wanted: torch.dtype) -> bool:
    return stored in _READABLE if wanted.is_floating_point else stored == wanted


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "a scalar"


def _some(names: Sequence[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return separator.join(names[:_NAMED]) + more
