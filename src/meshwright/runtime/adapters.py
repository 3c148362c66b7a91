"""Adapters: the initial values that PEFT gives to what it adds to a model, where a builder's model has lost them.

LoRA as peft 0.21 has it (`LoraLayer.reset_lora_parameters`): A by kaiming_uniform(a=sqrt(5)) or a normal distribution,
B zero; of embeddings A zero, B normal. Modules that are trained whole (`modules_to_save`) begin as their originals.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.errors import ConfigError

__all__ = ["adapter_init", "original_name"]

_LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def original_name(model: nn.Module, name: str) -> str:
    """A module's name; for a copy that is trained whole, that of its original, so that both draw the same values."""
    if "peft" in sys.modules:
        wrapper = sys.modules["peft"].utils.ModulesToSaveWrapper
        for prefix, module, rest in _path(model, name):
            if isinstance(module, wrapper) and rest[:1] == ["modules_to_save"]:
                return ".".join([*prefix, "original_module", *rest[2:]])
    return name


def adapter_init(model: nn.Module, module: nn.Module, name: str) -> Callable[[], Any] | None:
    """The init function of a module that PEFT has added; None for any other module.

    Raises:
        ConfigError: the method's initial values are not known here.
    """
    if "peft" not in sys.modules:
        return None
    peft: Any = sys.modules["peft"]
    for _, layer, rest in _path(model, name):
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer) and rest and rest[0] != "base_layer":
            if not isinstance(layer, peft.tuners.lora.LoraLayer) or rest[0] not in _LORA:
                raise _unknown(name, f"they are of {type(layer).__module__}")
            return partial(_init_lora, model, layer, module, name, rest)
    if isinstance(model, peft.PeftModel) and name.partition(".")[0] != "base_model":
        raise _unknown(name, f"they are of {model.active_peft_config.peft_type}")
    return None


def _init_lora(model: nn.Module, layer: Any, module: nn.Module, place: str, path: list[str]) -> None:
    """Set LoRA's parameters in one module: a layer of one adapter, or the list of all adapters' embedding matrices."""
    for name, parameter in module.named_parameters(recurse=False):
        part, adapter = path[0], path[1] if len(path) > 1 else name
        config = getattr(model, "peft_config", {}).get(adapter)
        way = getattr(config, "init_lora_weights", "unknown")
        if way not in (True, False, "gaussian"):
            raise _unknown(place, f"init_lora_weights={way!r} computes them from the model's weights")
        if part in ("lora_embedding_A", "lora_embedding_B"):
            if part == "lora_embedding_A" and way is not False:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter)
        elif way is False:
            _init_as_linear(parameter, module)
        elif part == "lora_B" or name == "bias":
            nn.init.zeros_(parameter)
        elif way == "gaussian":
            nn.init.normal_(parameter, std=1 / layer.r[adapter])
        else:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))


def _init_as_linear(parameter: torch.Tensor, module: nn.Module) -> None:
    """As `nn.Linear` and convolutions do (PyTorch 2.13), one parameter of them."""
    if parameter.dim() > 1:
        nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
    else:
        inputs = module.get_parameter("weight")[0].numel()
        nn.init.uniform_(parameter, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))


def _path(model: nn.Module, name: str) -> Iterator[tuple[list[str], nn.Module, list[str]]]:
    """The modules on the way to one, from the outermost: the names that lead to each, and those that lead on."""
    parts, module = name.split(".") if name else [], model
    for at in range(len(parts) + 1):
        yield parts[:at], module, parts[at:]
        if at < len(parts):
            module = module.get_submodule(parts[at])


def _unknown(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"the initial values of {name} are not known",
        why=f"a builder's model gets its initial values from its init functions, and {why}",
        fix="pass the built model instead of the function: Engine(build(), ...)",
    )
