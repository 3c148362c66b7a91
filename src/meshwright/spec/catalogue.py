"""Known models by name, and one way to find a model: by path, by table or by name. No torch."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.spec.families import DecoderModel, Described, read_config

__all__ = ["KnownModel", "find_model", "is_function", "is_path", "known_model", "known_models", "named_model"]

_DATA = Path(__file__).with_name("models.toml")
#: Words around a name that change nothing of the shape: organisations' prefixes, kinds of tuning, file formats.
_NOISE = re.compile("meta|openai|community|instruct|chat|base|pt|hf|it|fp16|bf16|model")
_WORD = re.compile(r"[a-z]+|[0-9][0-9.]*[a-z0-9]*")
_MOST_NAMED = 8
_FUNCTION = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*")


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """One entry of the catalogue; `config` has Hugging Face's keys, `parameters` counts tied weights once."""

    name: str
    repository: str
    parameters: int
    config: dict[str, Any]
    also: tuple[str, ...] = ()
    null: tuple[str, ...] = field(default=(), repr=False)

    @property
    def table(self) -> dict[str, Any]:
        """The `config.json` keys that decide its shape."""
        return {**self.config, **dict.fromkeys(self.null)}

    @property
    def described(self) -> Described:
        """The model, ready for a layout."""
        described = read_config(self.table, name=self.name)
        if not isinstance(described, DecoderModel):
            return described
        return replace(described, source=f"{described.source}, of {self.repository}")


@lru_cache(maxsize=1)
def known_models() -> tuple[KnownModel, ...]:
    """All models of the catalogue."""
    table = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    return tuple(KnownModel(**{**entry, "also": tuple(entry.get("also", ()))}) for entry in table["model"])


def known_model(name: str) -> Described:
    """The model of the catalogue that a name means; `named_model` says which names are understood.

    Raises:
        ConfigError: unknown, or it can mean several.
    """
    return named_model(name).described


def named_model(name: str) -> KnownModel:
    """The entry that a name means: `llama-3-70b`, `Llama3-70B`, `meta-llama/Meta-Llama-3-70B-Instruct`, `gpt2-xl`.

    Case, separators, the organisation and words such as `instruct` or `hf` do not matter; version and size do.

    Raises:
        ConfigError: unknown (the nearest name is given), or it can mean several (they are given).
    """
    asked = _words(name)
    spelled = _spelled()
    if asked in spelled:
        return spelled[asked]
    wider = list(dict.fromkeys(entry.name for words, entry in spelled.items() if asked and set(asked) <= set(words)))
    if len(wider) > 1:
        shown = ", ".join(wider[:_MOST_NAMED]) + (", ..." if len(wider) > _MOST_NAMED else "")
        raise ConfigError(
            f"model {name!r} can mean {shown}", why="they differ in shape", fix=f"write for example {_slug(wider[0])}"
        )
    near = wider or _near(name)
    if near:
        raise ConfigError(
            f"model {name!r} is not in the catalogue",
            why=f"nearest are {', '.join(near)}",
            fix=f"did you mean {_slug(near[0])}? Otherwise give the path of its config.json",
        )
    families = dict.fromkeys(entry.name.split()[0] for entry in known_models())
    raise ConfigError(
        f"model {name!r} is not in the catalogue",
        why=f"known are sizes of {', '.join(families)}",
        fix="give the path of its config.json, or trace the model from its code",
    )


def find_model(source: str | Path | Mapping[str, Any]) -> Described:
    """A model by what a user has: the path of a `config.json` or of its folder, its table, or a name of the catalogue.

    A path is what ends in `.json`, begins like a path, or leads to a file, or to a folder with a `config.json`.

    Raises:
        ConfigError: the file or its table is not understood, or the name is unknown or ambiguous.
    """
    if isinstance(source, Mapping):
        return read_config(source)
    if isinstance(source, Path) or is_path(source):
        return read_config(Path(source).expanduser())
    return known_model(source)


def is_function(text: str) -> bool:
    """Whether a text has the form `package.module:function` or `file.py:function`, and is no file."""
    return bool(_FUNCTION.fullmatch(text)) and not Path(text).exists()


def is_path(text: str) -> bool:
    """Whether a text is taken for a path, as `find_model` does."""
    if "\0" in text or not text.strip():
        return False
    try:
        path = Path(text).expanduser()
        leads = path.is_file() or (path / "config.json").is_file()
    except (OSError, RuntimeError, ValueError):  # too long a name, no home folder
        return False
    return leads or text.endswith((".json", os.sep)) or text.startswith((".", "~", os.sep))


def _words(name: str) -> tuple[str, ...]:
    """The words of a name that count, sorted: letters, versions (`3.1`) and sizes (`70b`, `8x7b`)."""
    tail = name.strip().lower().rstrip("/").rsplit("/", 1)[-1]
    found = (word.strip(".") for word in _WORD.findall(tail))
    return tuple(sorted(word for word in found if word and not _NOISE.fullmatch(word)))


@lru_cache(maxsize=1)
def _spelled() -> dict[tuple[str, ...], KnownModel]:
    spelled: dict[tuple[str, ...], KnownModel] = {}
    for entry in known_models():
        for name in (entry.name, *entry.also, entry.repository.partition(" ")[0]):
            spelled.setdefault(_words(name), entry)
    return spelled


def _near(name: str) -> list[str]:
    """Names of the catalogue that look like it, the likest first."""
    names = {_slug(spelling): entry.name for entry in known_models() for spelling in (entry.name, *entry.also)}
    close = difflib.get_close_matches("-".join(_in_order(name)), names, n=3, cutoff=0.6)
    return list(dict.fromkeys(names[slug] for slug in close))


def _in_order(name: str) -> list[str]:
    tail = name.strip().lower().rstrip("/").rsplit("/", 1)[-1]
    return [word for word in _WORD.findall(tail) if not _NOISE.fullmatch(word)]


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")
