"""A model as large as it is, by what a user has of it, without its values: nothing is allocated for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.measure.target import load_built, load_model
from meshwright.measure.verify.asked import ask_model
from meshwright.measure.verify.hugging_face import any_class, require_transformers, whole_config
from meshwright.runtime.init import meta_parameters

__all__ = ["whole_model"]


def whole_model(model: Any) -> tuple[nn.Module, str]:
    """The model and its name.

    Args:
        model: a name of the catalogue, the path of a `config.json` or its folder, a mapping with its keys, a function
            that builds a module (or a tuple that begins with one) or its name, or a module.

    Raises:
        ConfigError: it is none, or cannot be built.
    """
    if isinstance(model, nn.Module):
        return model, type(model).__name__
    if not isinstance(model, (str, Path, Mapping)):
        return load_model(model), getattr(model, "__qualname__", type(model).__name__)
    asked = ask_model(model, Path())
    name = str(asked["name"])
    if asked["kind"] == "config":
        return _of_config(asked["table"], name), name
    built = load_built(asked["text"])
    module = built[0] if isinstance(built, tuple) and built else built
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{name} returned a {type(built).__name__}", fix="return an nn.Module from it")
    return module, name


def _of_config(table: Mapping[str, Any], name: str) -> nn.Module:
    require_transformers(name)
    config = whole_config(table, name=name)
    kind = any_class(config, table.get("architectures"), name)
    try:
        try:
            with torch.device("meta"):
                built = kind(config)
        except (RuntimeError, NotImplementedError):  # its constructor reads numbers from a tensor
            with torch.random.fork_rng(devices=[]), meta_parameters():
                built = kind(config)
    except MeshwrightError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be built: {kind.__name__}",
            why=f"{type(error).__name__}: {error}",
            fix="correct its config.json, or give a function that builds it: file.py:function",
        ) from error
    module: nn.Module = built
    return module
