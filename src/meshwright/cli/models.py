"""Models on the command line: a name, a `config.json`, or a function that makes one."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright.spec.catalogue import find_model
from meshwright.spec.families import Described

__all__ = ["find_described"]

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def find_described(model: str, sequence: int) -> Described:
    """A model by its name, its `config.json`, or a function that makes it (`package.module:function`).

    Raises:
        ConfigError: it is not found or not understood.
    """
    if _FUNCTION.fullmatch(model) and not Path(model).exists():
        from meshwright.measure import named_module

        return named_module(model, sequence=sequence)
    return find_model(model)
