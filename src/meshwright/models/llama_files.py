"""Weights as Hugging Face Llama keeps them: a folder with `config.json` and safetensors, in one file or sharded.

Only safetensors is read and written: loading executes no pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.models.decoder import Decoder, DecoderConfig

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
READABLE = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Keys of config.json that change the arithmetic, with the only values this decoder computes.
FIXED_KEYS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
# Fields that may differ between a folder and the model it is loaded into: they change no number of the forward pass.
FREE_FIELDS = {"max_position_embeddings", "initializer_range", "tie_word_embeddings", "head_dim"}


@dataclass(frozen=True)
class _Entry:
    """One tensor of a checkpoint, described before it is read."""

    shape: tuple[int, ...]
    readable: bool
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> _Entry:
        return cls(tuple(tensor.shape), tensor.dtype in READABLE.values(), lambda: tensor)


def read_llama_config(folder: str | os.PathLike[str]) -> DecoderConfig:
    """The sizes in `folder/config.json`, as transformers 4 (`rope_theta`) or 5 (`rope_parameters`) writes them.

    `head_dim` is None where it is the usual hidden_size / num_attention_heads, whether the file spells it out or not.
    Raises ValueError when the file is missing, is not JSON, lacks a size, or describes another arithmetic than this
    decoder's (another model family, biases, scaled rotary frequencies).
    """
    path = Path(folder) / CONFIG
    table = _read_json(path)
    for key, wanted in FIXED_KEYS.items():
        if table.get(key, wanted) != wanted:
            raise ValueError(
                f"{path} has {key} = {table[key]!r}. The decoder computes {key} = {wanted!r} only. Use a plain Llama "
                "checkpoint, or train the Hugging Face model itself."
            )
    rope = table.get("rope_parameters") or table.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{path} has rope_parameters = {rope!r}, which is no JSON object. Fetch the file again.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{path} has scaled rotary frequencies ({rope!r}). The decoder computes plain ones only. Use a checkpoint "
            "without rope scaling, or train the Hugging Face model itself."
        )
    values = {field.name: table[field.name] for field in fields(DecoderConfig) if field.name in table}
    # What Llama's config leaves out has Llama's defaults, not those of this decoder's small model.
    values.setdefault("rms_norm_eps", 1e-6)
    values.setdefault("max_position_embeddings", 2048)
    values["rope_theta"] = rope.get("rope_theta", values.get("rope_theta", 10000.0))
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in sizes if name not in values]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}. The model's sizes are read from it. Add them.")
    try:
        config = DecoderConfig(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    usual = config.head_size * config.num_attention_heads == config.hidden_size
    return replace(config, head_dim=None) if usual else config


def load_llama(model: Decoder, source: str | os.PathLike[str] | Mapping[str, Tensor]) -> None:
    """Copies weights into the model's parameters, in their dtype and on their device.

    `source` is a Hugging Face Llama folder (its `config.json` must describe this model) or a mapping of names to
    tensors. Names and shapes are checked before the first byte is copied, and a folder is read one tensor at a time.
    A tied model takes `lm_head.weight` only where it equals the embedding. Raises ValueError when a name is missing,
    unexpected or of another shape or dtype, or a file is missing or damaged.
    """
    with ExitStack() as stack:
        if isinstance(source, Mapping):
            where = "The state"
            entries = {name: _Entry.of(tensor) for name, tensor in source.items()}
        else:
            where = f"The checkpoint {Path(source)}"
            _check_same_model(model.config, read_llama_config(source), where)
            entries = _open_folder(Path(source), stack)
        targets = dict(model.named_parameters())  # names a tied weight once, as the embedding
        # transformers before 4.32 saved this buffer with every layer.
        entries = {name: entry for name, entry in entries.items() if not name.endswith("rotary_emb.inv_freq")}
        tied_head = entries.pop(HEAD, None) if HEAD not in targets else None
        _check_entries(targets, entries, where)
        if tied_head is not None and not torch.equal(tied_head.read(), entries[EMBEDDING].read()):
            raise ValueError(
                f"{where} has a {HEAD} that differs from {EMBEDDING}. The model ties the two, so one would be lost. "
                "Build it with tie_word_embeddings = False."
            )
        with torch.no_grad():
            for name, parameter in targets.items():
                parameter.copy_(entries[name].read())


def save_llama(model: Decoder, folder: str | os.PathLike[str]) -> None:
    """Writes `model.safetensors` and `config.json`, which `LlamaForCausalLM.from_pretrained(folder)` reads.

    Weights keep their dtype; a tied one is written once. Each file is written aside and renamed, `config.json` last.
    (Hugging Face itself refuses a config whose num_attention_heads does not divide hidden_size; `load_llama` reads
    it.) Raises ValueError when parameters have no values (meta), OSError when the folder cannot be written.
    """
    path = Path(folder)
    weights = dict(model.named_parameters())
    _check_real(weights)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.detach().contiguous() for name, weight in weights.items()}
    _replace(path / WEIGHTS, lambda aside: save_file(tensors, aside, metadata={"format": "pt"}))
    table = _llama_table(model.config, tensors[EMBEDDING].dtype)
    _replace(path / CONFIG, lambda aside: Path(aside).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8"))


def _llama_table(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json`, with the keys of transformers 5 and those that version 4 and other readers still look for."""
    name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["LlamaForCausalLM"],
        **FIXED_KEYS,
        **asdict(config),
        "head_dim": config.head_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_dropout": 0.0,
        # Llama's defaults (1 and 2) would be ordinary tokens of another vocabulary, and end a generation there.
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": name,
        "torch_dtype": name,
    }


def _replace(path: Path, write: Callable[[str], object]) -> None:
    aside = path.with_name(path.name + ".tmp")
    try:
        aside.touch()
        mode = aside.stat().st_mode
        write(str(aside))
        aside.chmod(mode)  # safetensors makes its files readable by their owner alone
        os.replace(aside, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error}). Check the folder's free space and rights.") from error
    finally:
        aside.unlink(missing_ok=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}). A Hugging Face Llama folder has it. Check the path."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). It is damaged. Fetch it again.") from error
    if not isinstance(table, dict):
        raise ValueError(f"{path} holds no JSON object. It is damaged. Fetch it again.")
    return table


def _check_same_model(model: DecoderConfig, found: DecoderConfig, where: str) -> None:
    ours = {**asdict(model), "head size": model.head_size}
    theirs = {**asdict(found), "head size": found.head_size}
    differing = [name for name in ours if name not in FREE_FIELDS and ours[name] != theirs[name]]
    if differing:
        listed = ", ".join(f"{name} ({theirs[name]} there, {ours[name]} in the model)" for name in differing)
        raise ValueError(
            f"{where} is of another model: {listed} differ. Its weights would give other numbers here. "
            "Build the model from read_llama_config(folder)."
        )


def _open_folder(folder: Path, stack: ExitStack) -> dict[str, _Entry]:
    """Every tensor of a folder's `model.safetensors`, or else of the shards that its index names; nothing is read."""
    if (folder / WEIGHTS).is_file():
        return _open_file(folder / WEIGHTS, stack)
    index = folder / INDEX
    if not index.is_file():
        raise ValueError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}. Only safetensors is read (pickled .bin files can execute "
            "code). Check the path, or save the model again with safe_serialization."
        )
    names = _read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise ValueError(f"{index} has no weight_map of names to files. It is damaged. Fetch it again.")
    entries: dict[str, _Entry] = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise ValueError(f"{index} points outside its folder ({file!r}). Shards lie beside it. Fetch it again.")
        entries.update(_open_file(folder / file, stack))
    absent = sorted(set(names) - set(entries))
    if absent:
        raise ValueError(f"{index} names {_some(absent)}, which no shard holds. A shard is damaged. Fetch it again.")
    return entries


def _open_file(path: Path, stack: ExitStack) -> dict[str, _Entry]:
    try:
        file = stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        names = list(file.keys())
        parts = [file.get_slice(name) for name in names]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}). It is missing or damaged. Fetch it again.") from error
    return {
        name: _Entry(tuple(part.get_shape()), part.get_dtype() in READABLE, partial(file.get_tensor, name))
        for name, part in zip(names, parts, strict=True)
    }


def _check_entries(targets: Mapping[str, Tensor], entries: Mapping[str, _Entry], where: str) -> None:
    _check_real(targets)
    missing = [name for name in targets if name not in entries]
    if missing == [HEAD]:
        raise ValueError(
            f"{where} has no {HEAD}. Its embedding is tied and the model's is not. "
            "Build the model with tie_word_embeddings = True."
        )
    if missing:
        raise ValueError(f"{where} lacks {_some(missing)}. Every parameter needs a value. Use a whole checkpoint.")
    unexpected = [name for name in entries if name not in targets]
    if unexpected:
        raise ValueError(
            f"{where} has {_some(unexpected)}, which the model has no place for. It is of another model, or adapted "
            "or quantised. Build the model from the checkpoint's config, or merge the adapters first."
        )
    shapes = [
        f"{name} ({list(entries[name].shape)} there, {list(target.shape)} in the model)"
        for name, target in targets.items()
        if entries[name].shape != tuple(target.shape)
    ]
    if shapes:
        raise ValueError(
            f"{where} has other shapes: {_some(shapes)}. It is of a model with other sizes. "
            "Build the model from the checkpoint's config."
        )
    unreadable = [name for name, entry in entries.items() if not entry.readable]
    if unreadable:
        raise ValueError(
            f"{where} stores {_some(unreadable)} in a dtype that is not {', '.join(map(str, READABLE.values()))}. "
            "Quantised weights mean nothing without their scales. Convert them first."
        )


def _check_real(parameters: Mapping[str, Tensor]) -> None:
    hollow = [name for name, parameter in parameters.items() if parameter.is_meta]
    if hollow:
        raise ValueError(
            f"The model has no values in {_some(hollow)} (meta device). There is nothing to copy to or from. "
            "Build it outside torch.device('meta'), or call to_empty(device=...) first."
        )


def _some(names: Iterable[str], most: int = 3) -> str:
    """The first few of many names."""
    listed = list(names)
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest
