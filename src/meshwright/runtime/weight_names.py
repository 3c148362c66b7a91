"""Weight names: which keys of weight files a model's parameters and persistent buffers are read from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from meshwright.runtime.weight_conversions import Conversion, conversions

__all__ = ["Names", "find_keys", "spelled"]

#: What PEFT puts into the names of what it wraps.
_PEFT_PREFIXES = ("base_model.model.", "base_model.")
_PEFT_PARTS = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


@dataclass
class Names:
    """For every parameter and persistent buffer, by its first global name, the keys that hold it.

    `keys` has several where a tied weight is stored more than once, none where it is not stored as it is. `made` are
    those that transformers makes of other tensors, `unknown` keys that the model has no place for.
    """

    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    made: dict[str, Conversion] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """Names that no key holds."""
        return [name for name, keys in self.keys.items() if not keys and name not in self.made]


def spelled(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every parameter and persistent buffer by its first global name, with all its names (several when it is tied)."""
    persistent = model.state_dict(keep_vars=True)
    named: list[tuple[str, Tensor]] = list(model.named_parameters(remove_duplicate=False))
    named += [(name, b) for name, b in model.named_buffers(remove_duplicate=False) if name in persistent]
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return {found[0]: tuple(found) for found in names.values()}


def find_keys(model: nn.Module, keys: Iterable[str]) -> Names:
    """Match names with keys: exactly, with or without the model's `base_model_prefix`, without what PEFT adds to names,
    and by what transformers renames, merges or splits when it loads.

    Several parameters may read the same key (PEFT's copies of a module that is trained whole).
    """
    stored = list(keys)
    renamed, made = conversions(model, stored)
    places = renamed | {key: key for key in stored}
    prefix = getattr(model, "base_model_prefix", "")
    found = Names()
    for first, names in spelled(model).items():
        spellings = [text for name in names for text in _spellings(name, prefix)]
        conversion = next((made[text] for text in spellings if text in made), None)
        if conversion is not None:  # even where a key has the very name: its layout may be another
            found.made[first] = conversion
            found.keys[first] = ()
        else:
            found.keys[first] = tuple(dict.fromkeys(places[text] for text in spellings if text in places))
    used = {key for some in found.keys.values() for key in some}
    used.update(key for conversion in found.made.values() for key in conversion.keys)
    # What needs no place: buffers that the model makes itself, and what its class says to pass over.
    computed = {text for name, _ in model.named_buffers() for text in _spellings(name, prefix)}
    passed_over = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    found.unknown = [
        key
        for key in stored
        if key not in used and key not in computed and not any(re.search(pattern, key) for pattern in passed_over)
    ]
    return found


def _spellings(name: str, prefix: str) -> Iterator[str]:
    for plain in dict.fromkeys((name, *_without_peft(name))):
        yield plain
        if prefix:
            yield f"{prefix}.{plain}"
            if plain.startswith(f"{prefix}."):
                yield plain.removeprefix(f"{prefix}.")


def _without_peft(name: str) -> Iterator[str]:
    for prefix in ("", *_PEFT_PREFIXES):
        if name.startswith(prefix):
            yield _PEFT_PARTS.sub("", name.removeprefix(prefix))
