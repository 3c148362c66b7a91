"""Models on the command line: a name, a `config.json`, or a function that makes one."""

from __future__ import annotations

from meshwright.spec.catalogue import find_model, is_function
from meshwright.spec.families import Described

__all__ = ["find_described"]


def find_described(model: str, sequence: int) -> Described:
    """A model by its name, its `config.json`, or a function that makes it (`package.module:function`,
    `file.py:function`).

    Raises:
        ConfigError: it is not found or not understood.
    """
    if is_function(model):
        from meshwright.measure import named_module

        return named_module(model, sequence=sequence)
    return find_model(model)
