"""Hugging Face models: the class of a config, a small one of it, and batches of its own kind. Nothing is downloaded."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.measure.verify.reduced import Reduced, reduce_config

__all__ = [
    "any_class",
    "batch_for",
    "find_class",
    "kind_of",
    "labels_of",
    "lengths",
    "require_transformers",
    "small_config",
    "whole_config",
]

IGNORED = -100
#: Shares of a sequence that are no padding; seven, so that they fall on ranks and microbatches unevenly.
_SHARES = (1.0, 0.2, 0.65, 0.3, 0.95, 0.45, 0.8)
#: The auto mappings in which a class is looked for, where `architectures` names none with a loss.
_MAPPINGS = {
    True: ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
    False: (
        *("MODEL_FOR_MASKED_LM_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    ),
}
#: Tables inside a config that are no models.
_NO_PARTS = ("attn_config", "ffn_config")
_KINDS = "causal and masked language models, encoder-decoders of text and speech, classifiers of texts and pictures"


def require_transformers(name: str) -> None:
    """Import Transformers, offline.

    Raises:
        ConfigError: it is not installed.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers  # noqa: F401  # whether it is there
    except ImportError as error:
        raise ConfigError(
            f"{name} needs Transformers",
            why=str(error),
            fix="pip install 'meshwright[hf]', or give a function that builds the model: file.py:function",
        ) from error


def small_config(
    table: Mapping[str, Any], *, name: str, depth: int, sequence: int, tp: int = 1, annotated: bool = False
) -> tuple[Any, Reduced]:
    """A small config of the table's kind, and what was changed; arguments as `reduce_config` takes them.

    Raises:
        ConfigError: its model_type is unknown to Transformers, or it has values that its class refuses.
        UnsupportedCombination: `tp` does not divide its heads.
    """
    family, kind = table["model_type"], _config_class(table, name)
    if parts := [part for part in kind.sub_configs if part not in _NO_PARTS]:
        raise ConfigError(
            f"config.json of {name}: model_type {family} has several parts ({', '.join(parts)})",
            why="inputs are made for models of one kind of input",
            fix="give the config.json of the language model alone, or a function that builds a small one with its "
            "inputs: file.py:function",
        )
    whole = whole_config(table, name=name)
    reduced = reduce_config(table, whole.to_dict(), depth=depth, sequence=sequence, tp=tp, annotated=annotated)
    return _made(kind, reduced.table, name), reduced


def whole_config(table: Mapping[str, Any], *, name: str) -> Any:
    """The config of a table, as it is; of a quantised model, that of the model before.

    Raises:
        ConfigError: its model_type is unknown to Transformers, or it has values that its class refuses.
    """
    kept = {key: value for key, value in table.items() if key != "quantization_config"}
    return _made(_config_class(table, name), kept, name)


def _config_class(table: Mapping[str, Any], name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = table["model_type"]
    if family not in CONFIG_MAPPING:
        raise ConfigError(
            f"config.json of {name}: model_type {family} is not known to Transformers",
            why="its code is not part of it, and code that comes with a model is never run",
            fix="give a function that builds the model, or a small one: file.py:function",
        )
    return CONFIG_MAPPING[family]


def _made(kind: Any, table: Mapping[str, Any], name: str) -> Any:
    keys = {key: copy.deepcopy(value) for key, value in table.items() if key != "model_type"}  # tables in it are filled
    try:
        return kind.from_dict(keys)
    except Exception as error:
        raise ConfigError(
            f"config.json of {name} is refused by {kind.__name__}",
            why=f"{type(error).__name__}: {error}",
            fix="correct it, or give a function that builds a small model: file.py:function",
        ) from error


def find_class(config: Any, architectures: Any, name: str) -> Any:
    """The class that `architectures` names, or, where it has no loss, the one with a head for such a config.

    Raises:
        ConfigError: there is none whose loss is taken.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    named = [getattr(transformers, str(entry), None) for entry in architectures or ()]
    found = [kind for kind in named if kind is not None and _takes_labels(kind)]
    for mapping in _MAPPINGS[bool(config.is_encoder_decoder)]:
        table = getattr(modeling_auto, mapping)
        if not found and type(config) in table:
            found.append(table[type(config)])
    if not found or not kind_of(found[0], config):
        shown = ", ".join(map(str, architectures or ())) or config.model_type
        raise ConfigError(
            f"{name}: {shown} is not a class that inputs are made for",
            why=f"those are {_KINDS}",
            fix="give a function that returns (model, inputs, loss, targets): file.py:function",
        )
    return found[0]


def any_class(config: Any, architectures: Any, name: str) -> Any:
    """The class that `architectures` names, or the one with a head for such a config, or the one without.

    Raises:
        ConfigError: Transformers has none for it.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    for entry in architectures or ():
        named = getattr(transformers, str(entry), None)
        if inspect.isclass(named) and issubclass(named, nn.Module):
            return named
    for mapping in (*_MAPPINGS[bool(getattr(config, "is_encoder_decoder", False))], "MODEL_MAPPING"):
        table = getattr(modeling_auto, mapping)
        if type(config) in table:
            return table[type(config)]
    raise ConfigError(
        f"{name}: Transformers has no model for a {type(config).__name__}",
        why="it is the config of a part of a model"
        if not architectures
        else f"{architectures} is not among its classes",
        fix="name its class in architectures, or give a function that builds it: file.py:function",
    )


def _takes_labels(kind: Any) -> bool:
    if not (inspect.isclass(kind) and issubclass(kind, nn.Module)):
        return False
    return "labels" in inspect.signature(kind.forward).parameters


def kind_of(model: Any, config: Any) -> str:
    """What sort of batches a class takes: empty where none is known."""
    name = model.__name__ if inspect.isclass(model) else type(model).__name__
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        return "pictures" if "ImageClassification" in name else ""
    if main == "input_features":
        return "sounds" if config.is_encoder_decoder else ""
    if main != "input_ids":
        return ""
    if "SequenceClassification" in name:
        return "texts"
    if "TokenClassification" in name:
        return "tokens"
    if config.is_encoder_decoder:
        return "pairs" if "ForConditionalGeneration" in name else ""
    if "MaskedLM" in name:
        return "masked"
    return "causal" if name.endswith(("ForCausalLM", "LMHeadModel")) else ""


def labels_of(kind: str) -> str:
    """What the loss of such a model is the mean over, in words."""
    if kind == "causal":
        return "labels that are not -100, without the first of each sequence"
    return "one label per sequence" if kind in ("pictures", "texts") else "labels that are not -100"


def lengths(rows: int, sequence: int) -> Tensor:
    """Tokens of each sequence that are no padding: other numbers on every rank and in every microbatch."""
    return torch.tensor([max(4, round(_SHARES[row % 7] * sequence)) for row in range(rows)])


def batch_for(kind: str, config: Any, *, rows: int, sequence: int, seed: int) -> dict[str, Tensor]:
    """A global batch in float64: padded sequences with labels that do not count, or pictures, or sounds with words."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(most: int, *shape: int, least: int = 0) -> Tensor:
        return torch.randint(min(least, most - 1), most, shape, generator=generator)

    classes = max(2, int(getattr(config, "num_labels", 2)))
    if kind == "pictures":
        size = (rows, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": _noise(generator, *size), "labels": drawn(classes, rows)}
    words = config.vocab_size
    kept = torch.arange(sequence)[None] < lengths(rows, sequence)[:, None]
    padding = config.pad_token_id if config.pad_token_id is not None else 0
    labels = drawn(words, rows, sequence, least=4).where(kept, IGNORED)
    if kind == "sounds":
        frames = 2 * config.max_source_positions
        return {"input_features": _noise(generator, rows, config.num_mel_bins, frames), "labels": labels}
    ids = drawn(words, rows, sequence, least=4).where(kept, padding)
    if kind == "causal":
        labels = ids.where(kept, IGNORED)
        labels[:, :2] = IGNORED  # an instruction is not learned
    elif kind == "masked":
        labels[:, ::3] = IGNORED
    elif kind == "tokens":
        labels = drawn(classes, rows, sequence).where(kept, IGNORED)
    elif kind == "texts":
        labels = drawn(classes, rows)
    return {"input_ids": ids, "attention_mask": kept.long(), "labels": labels}


def _noise(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
