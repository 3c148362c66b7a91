"""What is to be described: a module, a function that builds one, or text that names such a function."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.runtime.init import meta_parameters

__all__ = ["ModelLike", "load_built", "load_function", "load_model"]

ModelLike = nn.Module | Callable[[], nn.Module] | str


def load_function(text: str) -> Callable[..., Any]:
    """The function that `package.module:function` or `file.py:function` names; modules of the working folder, and of
    the file's, are found too.

    Raises:
        ConfigError: the text has another form, the module cannot be imported, or has no such function.
    """
    module_name, colon, name = text.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(
            f"{text!r} does not name a function",
            fix="write package.module:function or file.py:function, for example my_project.models:build",
        )
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        module = _of_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"module {module_name} of {text} cannot be imported",
            why=f"{type(error).__name__}: {error}",
            fix="start from the folder that holds it, or install its package",
        ) from error
    finally:
        sys.path[:] = before
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        names = ", ".join(sorted(key for key, value in vars(module).items() if callable(value) and key[0] != "_")[:8])
        raise ConfigError(
            f"module {module_name} has no function {name}",
            why=f"it has {names}" if names else "it has no public function",
            fix="name a function without arguments that returns the model",
        )
    function: Callable[..., Any] = found
    return function


def _of_file(path: Path) -> ModuleType:
    """The module in a file, imported under the file's name."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    path = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem if known is None else f"_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def load_model(model: ModelLike) -> nn.Module:
    """The module itself, or built with its parameters on the meta device, so that nothing is allocated for them.

    Raises:
        ConfigError: it is neither a module nor builds one.
    """
    if isinstance(model, nn.Module):
        return model
    build = load_function(model) if isinstance(model, str) else model
    if not callable(build):
        raise ConfigError(
            f"a model of type {type(model).__name__}",
            fix="give an nn.Module, a function without arguments that builds one, or its name package.module:function",
        )
    built = _built(build)
    if not isinstance(built, nn.Module):
        raise ConfigError(f"the model builder returned a {type(built).__name__}", fix="return an nn.Module from it")
    return built


def load_built(text: str) -> Any:
    """What the function that the text names returns, with parameters on the meta device.

    Raises:
        ConfigError: there is no such function, or it wants arguments.
    """
    try:
        return _built(load_function(text))
    except MeshwrightError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{text} failed", why=f"{type(error).__name__}: {error}", fix="let the function build the model by itself"
        ) from error


def _built(build: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        try:
            with meta_parameters():
                return build()
        except ConfigError:  # it loads weights, or sets values: those cost memory
            return build()
        except TypeError as error:
            if _missing_arguments(error):
                raise ConfigError(
                    f"the model builder {getattr(build, '__name__', build)} wants arguments: {error}",
                    fix="give a function without arguments: lambda: build(config)",
                ) from error
            raise


def _missing_arguments(error: TypeError) -> bool:
    traceback = error.__traceback__
    deepest = 0
    while traceback is not None:
        deepest, traceback = deepest + 1, traceback.tb_next
    return "required positional argument" in str(error) and deepest == 1
