"""What is to be described: a module, a function that builds one, or text that names such a function."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.runtime.init import meta_parameters

__all__ = ["ModelLike", "load_built", "load_function", "load_model"]

ModelLike = nn.Module | Callable[[], nn.Module] | str


def load_function(text: str) -> Callable[..., Any]:
    """The function that `package.module:function` names; modules of the working folder are found too.

    Raises:
        ConfigError: the text has another form, the module cannot be imported, or has no such function.
    """
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(
            f"{text!r} does not name a function",
            fix="write package.module:function, for example my_project.models:build",
        )
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
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
