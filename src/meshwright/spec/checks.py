"""Checks that several nouns share."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from typing import Any, get_type_hints

from meshwright.errors import ConfigError

__all__ = ["require_choice", "require_types"]

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def require_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a value that is none of the choices; the nearest one is named.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in choices:
        near = difflib.get_close_matches(str(value).lower(), choices, n=1)
        raise ConfigError(
            f"{name}={value} is not known",
            why=f"it is one of {', '.join(choices)}",
            fix=f"did you mean {near[0]}?" if near else f"write for example {name}={choices[0]}",
        )


def require_types(noun: Any, where: str = "") -> None:
    """Refuse a noun built in Python with a field of the wrong type. Fields of other types than these are left alone.

    Args:
        noun: a dataclass instance.
        where: put before the field's name, such as "job.".

    Raises:
        ConfigError: an `int`, `float`, `bool` or `str` field holds something else; true and false are no numbers.
    """
    kind: Any = type(noun)
    for name, wanted in _plain_fields(kind).items():
        value = getattr(noun, name)
        if type(value) is wanted:
            continue
        accepted = (int, float) if wanted is float else wanted
        if not isinstance(value, accepted) or (wanted is not bool and isinstance(value, bool)):
            raise ConfigError(
                f"{where}{name}={value!r} is not {_WORDS[wanted]}",
                why=f"it is of type {type(value).__name__}",
                fix=f"give {where}{name} as {_WORDS[wanted]}",
            )


@cache
def _plain_fields(cls: Any) -> dict[str, type]:
    return {name: hint for name, hint in get_type_hints(cls).items() if hint in _WORDS}
