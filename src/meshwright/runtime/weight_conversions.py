"""Conversions: what transformers renames, merges or splits when it loads weight files, by its own table.

transformers has no public way to that table: the names used here are those of 5.24, where PEFT calls the same.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["Conversion", "conversions"]


@dataclass(frozen=True)
class Conversion:
    """How one tensor of the model is made of tensors of the files: all experts of a layer, for example."""

    target: str
    first_target: str
    sources: tuple[tuple[str, str], ...]
    converter: Any
    model: Any

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the files that it is made of."""
        return tuple(key for key, _ in self.sources)

    def make(self, read: Callable[[str], Tensor]) -> Tensor:
        """The whole tensor, of whole tensors as `read` gives them by key; whatever transformers raises."""
        converter = copy.deepcopy(self.converter)
        for key, pattern in self.sources:
            converter.add_tensor(self.first_target, key, pattern, read(key))
        made = converter.convert(self.first_target, model=self.model, config=self.model.config)[self.target]
        whole: Tensor = made[0] if isinstance(made, list) else made
        return whole


def conversions(model: nn.Module, keys: Sequence[str]) -> tuple[dict[str, str], dict[str, Conversion]]:
    """What becomes of keys: a new name to its key where only the name changes, and names to how they are made.

    Names are those of the Hugging Face model inside, with or without its `base_model_prefix`.
    """
    if "transformers" not in sys.modules:
        return {}, {}
    inner = next((m for m in model.modules() if isinstance(m, sys.modules["transformers"].PreTrainedModel)), None)
    if inner is None:
        return {}, {}
    loading: Any = importlib.import_module("transformers.core_model_loading")
    table = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(inner)
    renamings = [entry for entry in table if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    renamed: dict[str, str] = {}
    sources: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(keys, key=loading.dot_natural_key):
        new, pattern = loading.rename_source_key(key, renamings, converters)
        if pattern is not None:
            sources.setdefault(new, []).append((key, pattern))
        elif new != key:
            renamed[new] = key
    made: dict[str, Conversion] = {}
    for first, found in sources.items():
        converter = by_pattern[found[0][1]]
        for pattern in converter.target_patterns:
            target = first.replace(converter.target_patterns[0], pattern)
            made[target] = Conversion(target, first, tuple(found), converter, inner)
    return renamed, made
