"""Annotations for tensor parallelism on the command line: how modules are divided, by patterns of their names."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import ConfigError

__all__ = ["read_annotations"]


def read_annotations(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Options like `layers.*.mlp.up=colwise` as a table.

    Args:
        option: its name, for messages.
        texts: each as it was written.

    Raises:
        ConfigError: one has no `=`, or two say different things of one pattern.
    """
    found: dict[str, str] = {}
    for text in texts:
        pattern, equals, style = (part.strip() for part in text.partition("="))
        if not (equals and pattern and style):
            raise ConfigError(
                f"{option} {text!r} is no annotation",
                why="it has the form PATTERN=STYLE",
                fix=f"write for example {option} 'layers.*.mlp.up=colwise'",
            )
        if found.setdefault(pattern, style) != style:
            raise ConfigError(
                f"{option} {pattern} is both {found[pattern]} and {style}",
                why="a module is held in one way",
                fix="keep one of them",
            )
    return found
