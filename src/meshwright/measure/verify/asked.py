"""What is to be verified, as plain data: where the model comes from, and whether the strategy runs here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.spec import Job, Strategy, require_executable
from meshwright.spec.catalogue import is_function, is_path, named_model
from meshwright.spec.families import read_table

__all__ = ["ACCUMULATION", "CLIP_NORM", "MOST_RANKS", "ask_model", "job_of", "require_annotations", "require_possible"]

#: Ranks that are started at most: they share this machine's cores.
MOST_RANKS = 8
#: Microbatches of a rank in each step, for each of its pipeline's ranks.
ACCUMULATION = 2
#: So low that gradients of usual models are clipped.
CLIP_NORM = 0.1


def job_of(strategy: Strategy, sequence: int) -> Job:
    """The job that the strategy is verified with: some microbatches on every rank, all in float64, clipped."""
    return Job(
        global_batch=strategy.dp * strategy.microbatch * ACCUMULATION * strategy.pp,
        sequence=sequence,
        param_dtype="float64",
        compute_dtype="float64",
        reduce_dtype="float64",
        clip_norm=CLIP_NORM,
    )


def require_possible(strategy: Strategy, sequence: int) -> None:
    """Refuse what cannot be run here, before anything is started.

    Raises:
        UnsupportedCombination: the strategy is not executable by this version.
        ConfigError: it has too many ranks, or sequences are too short.
    """
    if sequence < 4:
        raise ConfigError(
            f"sequences of {sequence} tokens", why="some are padded, and some labels do not count", fix="use 4 or more"
        )
    require_executable(strategy, job_of(strategy, sequence))
    if strategy.world_size > MOST_RANKS:
        raise ConfigError(
            f"the strategy {strategy} has {strategy.world_size} ranks",
            why=f"they are processes of this machine, at most {MOST_RANKS} are started, and the numbers of a strategy "
            "do not depend on how many there are",
            fix="verify the same strategy with a smaller " + _smaller(strategy),
        )


def _smaller(strategy: Strategy) -> str:
    if strategy.pp > 1:
        return "dp, tp or pp, for example dp=2 tp=2 pp=2"
    if strategy.tp == 1:
        return f"dp, for example dp={min(MOST_RANKS, 4)}"
    tp = strategy.tp if strategy.tp < MOST_RANKS else 2
    return f"dp{'' if tp == strategy.tp else ' and tp'}, for example dp={max(1, MOST_RANKS // tp)} tp={tp}"


def require_annotations(given: Any) -> None:
    """Refuse annotations that no JSON file can hold; whether modules have these names, the engine says.

    Raises:
        ConfigError: they are no mapping of texts.
    """
    pairs = given.items() if isinstance(given, Mapping) else [(given, "")]
    if not all(isinstance(part, str) for pair in pairs for part in pair):
        raise ConfigError(f"sharding={given!r}", fix='give name patterns and styles: {"layers.*.up": "colwise"}')


def ask_model(model: Any, place: Path) -> dict[str, Any]:
    """Where a model comes from, as JSON has it; a module is written to `place`.

    Raises:
        ConfigError: it is none, its file cannot be read, or its name is unknown.
    """
    if isinstance(model, Path):
        model = str(model)
    if isinstance(model, Mapping):
        return _config(dict(model), str(model.get("model_type", "")))
    if isinstance(model, str):
        return _by_text(model)
    torch = sys.modules.get("torch")  # who has a module has imported it
    if torch is not None and isinstance(model, torch.nn.Module):
        try:
            torch.save(model, place)
        except Exception as error:
            raise ConfigError(
                f"a {type(model).__name__} that cannot be pickled",
                why=str(error),
                fix="give a function at the top of a module that builds it",
            ) from error
        return {"kind": "module", "file": str(place), "name": type(model).__name__}
    if callable(model):
        return _by_function(model)
    raise ConfigError(
        f"a model of type {type(model).__name__}",
        fix="give a name, a config.json or its keys, a module, or a function that builds one",
    )


def _config(table: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(table.get("model_type"), str):
        raise ConfigError(
            f"config.json of {name or 'the model'} has no model_type",
            why="it names the class that the keys belong to",
            fix="add model_type, for example llama",
        )
    return {"kind": "config", "table": table, "name": name or table["model_type"]}


def _by_text(text: str) -> dict[str, Any]:
    if is_function(text):
        return {"kind": "function", "text": text, "name": text}
    path = Path(text).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(
            f"{text} has no config.json", why="it is a folder without one", fix="give the folder of a model"
        )
    if text.endswith(".py"):
        raise ConfigError(f"{text} is a file, not a function in it", fix=f"write {text}:build, with its name")
    if is_path(text):
        table, name = read_table(path)
        return _config(dict(table), name)
    entry = named_model(text)
    return _config(entry.table, entry.name)


def _by_function(function: Any) -> dict[str, Any]:
    name = getattr(function, "__qualname__", "<lambda>")
    module = getattr(function, "__module__", "")
    if "<" in name or not module:
        raise ConfigError(
            f"a model builder {name}",
            why="ranks are processes of their own, and find it by its name",
            fix="give a function at the top of a module, or its name package.module:function",
        )
    if module == "__main__":
        module = inspect.getsourcefile(function) or ""
        if not module.endswith(".py"):
            raise ConfigError(f"a model builder {name} that is in no file", fix="write it into a file")
    return {"kind": "function", "text": f"{module}:{name}", "name": name}
