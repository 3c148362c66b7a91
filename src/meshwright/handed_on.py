"""Names of a package that come from its modules when they are first asked for (PEP 562): importing it is quick."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["handed_on"]


def handed_on(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A package's `__getattr__`: a name from the module in `homes`, kept; AttributeError for any other name."""

    def find(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
