"""Model families: a Hugging Face `config.json` described without torch.

A family is a function that reads the keys of its `model_type` and composes the blocks on a tape (`tape.py`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.spec.families.config import Keys
from meshwright.spec.families.described import DecoderModel, Described

__all__ = ["FAMILIES", "DecoderModel", "Described", "read_config", "read_table"]

#: By model_type: the start of its classes' names, and the function that describes it, which is loaded when it is asked
#: for.
FAMILIES: dict[str, tuple[str, str]] = {
    "bloom": ("Bloom", "gpt.bloom"),
    "deepseek_v2": ("DeepseekV2", "deepseek.deepseek_v2"),
    "deepseek_v3": ("DeepseekV3", "deepseek.deepseek_v3"),
    "gemma": ("Gemma", "llama.gemma"),
    "gemma2": ("Gemma2", "llama.gemma2"),
    "gemma3_text": ("Gemma3", "llama.gemma3_text"),
    "gpt2": ("GPT2", "gpt.gpt2"),
    "gpt_neox": ("GPTNeoX", "gpt.gpt_neox"),
    "llama": ("Llama", "llama.llama"),
    "mistral": ("Mistral", "llama.mistral"),
    "mixtral": ("Mixtral", "mixtral.mixtral"),
    "mpt": ("Mpt", "gpt.mpt"),
    "opt": ("OPT", "gpt.opt"),
    "phi": ("Phi", "gpt.phi"),
    "phi3": ("Phi3", "llama.phi3"),
    "qwen2": ("Qwen2", "llama.qwen2"),
    "qwen2_moe": ("Qwen2Moe", "mixtral.qwen2_moe"),
    "qwen3": ("Qwen3", "llama.qwen3"),
    "qwen3_moe": ("Qwen3Moe", "mixtral.qwen3_moe"),
}


def read_config(source: str | Path | Mapping[str, Any], *, name: str = "") -> Described:
    """Describe the model of a Hugging Face `config.json`.

    Args:
        source: its path, the folder it lies in, or its table.
        name: the model's name; without one the folder's name or the model_type.

    Raises:
        ConfigError: there is no such file, it is no JSON table, or something in it is not understood.
    """
    table, found = (source, "") if isinstance(source, Mapping) else read_table(Path(source))
    name = name or found
    family = table.get("model_type")
    if not isinstance(family, str):
        raise ConfigError(
            f"config.json of {name or 'the model'} has no model_type",
            why="it names the class that the keys belong to",
            fix=f"add model_type, one of {', '.join(FAMILIES)}",
        )
    name = name or family
    nested = table.get("text_config")
    if isinstance(nested, Mapping):
        inner = nested.get("model_type", "unnamed")
        raise ConfigError(
            f"config.json of {name}: model_type {family} wraps a language model ({inner})",
            why="its other parts (vision, audio, projections) are not described",
            fix="give the language model's own config.json, or trace the model from its code",
        )
    if family not in FAMILIES:
        near = difflib.get_close_matches(family, FAMILIES, n=1, cutoff=0.75)
        raise ConfigError(
            f"config.json of {name}: model_type {family} is not known",
            why=f"known are {', '.join(FAMILIES)}",
            fix=f"did you mean {near[0]}? Otherwise trace the model from its code"
            if near
            else "trace the model from its code",
        )
    prefix, where = FAMILIES[family]
    module, function = where.split(".")
    describe: Callable[[Keys], Described] = getattr(import_module(f"{__name__}.{module}"), function)
    keys = Keys(table, name=name, family=family, prefix=prefix)
    model = describe(keys)
    keys.finish()
    return model


def read_table(path: Path) -> tuple[Mapping[str, Any], str]:
    """The table of a `config.json` or of the folder it lies in, and the model's name.

    Raises:
        ConfigError: there is no such file, or it is no JSON table.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read", why=error.strerror or str(error), fix="give a config.json or its folder"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON", why=str(error), fix="give a Hugging Face config.json") from error
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{file} is not a table", why="a config.json holds keys", fix="give a Hugging Face config.json"
        )
    return table, file.resolve().parent.name if file.name == "config.json" else file.stem
