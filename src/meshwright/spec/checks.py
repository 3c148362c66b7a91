"""Checks that several nouns share."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from meshwright.errors import ConfigError

__all__ = ["require_choice"]


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a value that is none of the choices; the nearest one is named.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        raise ConfigError(
            f"{name}={value} is not known",
            why=f"it is one of {', '.join(choices)}",
            fix=f"did you mean {near[0]}?" if near else f"write for example {name}={choices[0]}",
        )
