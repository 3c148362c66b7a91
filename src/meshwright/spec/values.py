"""Values in the text form: what `dp=2 stages=[4] offload.path="/a b"` puts behind `=`."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

__all__ = ["parse_value", "show_value"]

_PLAIN = re.compile(r"[\w./~+\-]+", re.ASCII)


def parse_value(text: str) -> Any:
    """A TOML value; `1,2,3` is a list; anything else is text."""
    if "," in text and not text.startswith(("[", "{", '"', "'")):
        return [parse_value(part) for part in text.split(",") if part]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def show_value(value: Any) -> str:
    """The text that `parse_value` reads as this value; text is quoted where it could be taken for something else."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if _is_plain(value) else _quoted(value)
    if isinstance(value, (list, tuple)):
        if len(value) > 1 and all(not isinstance(item, str) or _is_plain(item) for item in value):
            return ",".join(show_value(item) for item in value)
        return f"[{', '.join(_quoted(item) if isinstance(item, str) else show_value(item) for item in value)}]"
    return str(value)


def _is_plain(text: str) -> bool:
    return _PLAIN.fullmatch(text) is not None and parse_value(text) == text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
