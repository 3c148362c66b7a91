"""The bridge between TOML tables and the nouns: one reader, one writer, one style of error."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from meshwright.errors import ConfigError

__all__ = [
    "dump_toml",
    "from_table",
    "load_toml",
    "read_noun",
    "require_format",
    "to_table",
    "write_bytes",
    "write_text",
]

T = TypeVar("T")
Table = dict[str, Any]


def load_toml(path: str | Path) -> Table:
    """Read a TOML file.

    Raises:
        ConfigError: the file is missing, unreadable, not text or not TOML (with line and column).
    """
    place = Path(path)
    try:
        return tomllib.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no file {place}", why="the file does not exist", fix=_similar_file(place)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {place}", why=str(error), fix="give a readable TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{place} is not valid TOML", why=str(error), fix="correct the file at that place") from error


def from_table(cls: type[T], table: Any, where: str) -> T:
    """Build a noun from a table; `where` is the path of the table, used in errors.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), a missing key, a wrong type or an illegal value.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is not a table", why=f"found {table!r}", fix=f"write a [{where}] table")
    _check_keys(cls, table, where)
    try:
        return msgspec.convert(table, type=cls, strict=True)
    except msgspec.ValidationError as error:
        raise _plain(error, cls, table, where) from error


def read_noun(cls: type[T], path: str | Path) -> T:
    """Read a whole file as one noun with a format version."""
    table = load_toml(path)
    require_format(table, str(path))
    return from_table(cls, table, "")


def require_format(table: Table, where: str) -> None:
    """Refuse a file of another format version.

    Raises:
        ConfigError: `format` is missing or not the version that is read here.
    """
    from meshwright.spec.plan import PLAN_FORMAT

    found = table.get("format")
    if found != PLAN_FORMAT or isinstance(found, bool):
        raise ConfigError(
            f"{where}: format={found!r} cannot be read",
            why=f"this version reads format {PLAN_FORMAT}",
            fix=f"write `format = {PLAN_FORMAT}` at the top of a file with today's keys",
        )


def to_table(noun: Any) -> Table:
    """A noun as a TOML table; values that are None (not known) are left out."""
    table: Table = _plain_values(noun)
    return table


def dump_toml(table: Table) -> str:
    """A table as TOML text."""
    import tomli_w

    return tomli_w.dumps(table)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: beside it first, then renamed.

    Raises:
        ConfigError: the folder cannot be written.
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """The same with bytes. Raises what `write_text` raises."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            aside.write_bytes(data)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}", why=str(error), fix="choose a folder that you may write to"
        ) from error


def _check_keys(cls: Any, table: Table, where: str) -> None:
    hints = get_type_hints(cls)
    known = {entry.name for entry in fields(cls)}
    for key, value in table.items():
        place = f"{where}.{key}" if where else key
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            deeper = [f"{name}.{key}" for name in sorted(known) for c in _dataclasses_in(hints[name]) if _has(c, key)]
            meant = near[0] if near else deeper[0] if deeper else ""
            raise ConfigError(
                f"unknown key {place}",
                why=f"{where or 'the file'} has the keys {', '.join(sorted(known))}",
                fix=f"did you mean {meant}?" if meant else "remove the key",
            )
        for nested in _dataclasses_in(hints[key]):
            if isinstance(value, dict):
                _check_keys(nested, value, place)
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, dict):
                        _check_keys(nested, item, f"{place}[{index}]")


def _dataclasses_in(hint: Any) -> list[Any]:
    if is_dataclass(hint):
        return [hint]
    if get_origin(hint) in (tuple, list, Union, types.UnionType):
        return [found for arg in get_args(hint) for found in _dataclasses_in(arg)]
    return []


def _has(cls: Any, key: str) -> bool:
    return any(entry.name == key for entry in fields(cls))


def _choices(cls: Any, path: str) -> tuple[str, ...]:
    """The words that a field may hold, by its dotted path; empty where it is no choice of words."""
    hint = cls
    for part in path.split("."):
        nested = [found for found in _dataclasses_in(hint) if _has(found, part)]
        if not nested:
            return ()
        hint = get_type_hints(nested[0])[part]
    words = get_args(get_args(hint)[0]) if get_origin(hint) is tuple else get_args(hint)
    return words if words and all(isinstance(word, str) for word in words) else ()


def _plain(error: msgspec.ValidationError, cls: Any, table: Table, where: str) -> ConfigError:
    """msgspec's text, for example "Expected `int`, got `str` - at `$.dp`", in this project's form."""
    what, _, at = str(error).partition(" - at `$")
    path = f"{where}{at.rstrip('`')}".lstrip(".") or "the file"
    value: Any = table
    for part in at.rstrip("`").lstrip(".").replace("[", ".").replace("]", "").split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
    shown = "" if value is table else f"={value!r}"
    words = _choices(cls, re.sub(r"\[.*?\]", "", at.rstrip("`").lstrip(".")))
    if words and isinstance(value, str):
        near = difflib.get_close_matches(value, words, n=1)
        fix = f"did you mean {near[0]}?" if near else f"write for example {words[0]}"
        return ConfigError(f"{path}={value} is not known", why=f"it is one of {', '.join(words)}", fix=fix)
    return ConfigError(f"{path}{shown} is not right", why=what.replace("`", ""), fix=f"correct {path}")


def _similar_file(place: Path) -> str:
    folder = place.parent if place.parent.is_dir() else Path()
    near = difflib.get_close_matches(place.name, [entry.name for entry in folder.glob("*.toml")], n=1)
    return f"did you mean {folder / near[0]}?" if near else "give the path of an existing file"


def _plain_values(value: Any) -> Any:
    # Field by field: msgspec.to_builtins leaves out fields that msgspec.convert left at their defaults (0.23).
    if is_dataclass(value) and not isinstance(value, type):
        value = {entry.name: getattr(value, entry.name) for entry in fields(value)}
    if isinstance(value, dict):
        return {key: _plain_values(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain_values(item) for item in value]
    return value
