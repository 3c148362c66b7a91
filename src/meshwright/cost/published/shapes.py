"""The model of a row: by the catalogue's name where its sizes agree, else by the sizes that are published."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.cost.published.rows import PublishedRow, Unpriced
from meshwright.errors import MeshwrightError
from meshwright.spec.catalogue import find_model
from meshwright.spec.families import DecoderModel, Described, read_config

__all__ = ["Shape", "model_of", "named_shape"]

_DATA = Path(__file__).with_name("models.toml")
_GATED = re.compile(r"llama|mistral|mixtral|qwen|gemma|yi\b|deepseek|internlm|baichuan|olmo|smollm|nemo|phi-?3|granite")
_VOCABULARIES = (("llama[- _]?3", 128256), ("qwen", 151936), ("gemma", 256000), ("internlm", 103168))
_GATED_VOCABULARY, _PLAIN_VOCABULARY = 32000, 50257
_SIZE = re.compile(r"(?<![A-Za-z0-9.])([0-9]+(?:\.[0-9]+)?) ?([BMT])\b", re.IGNORECASE)
_SCALE = {"M": 1e-3, "B": 1.0, "T": 1e3}
#: Hidden channels over layers of models of which only the size is published; most lie between 64 and 200.
_ASPECT = 128
_HEAD = 128
#: Billions of parameters.
_LARGEST = 1e5
#: From here on hidden channels come in steps of eight heads, which tensor parallelism divides.
_LARGE, _EIGHT_HEADS = 3072, 1024
_SMALL_HEAD = 64
#: MLP channels of Llama: two thirds of four times the hidden ones, in steps of 256 (Touvron et al., arXiv 2302.13971).
_STEP = 256


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and what had to be assumed of it."""

    described: Described
    assumed: tuple[str, ...] = ()


def model_of(row: PublishedRow) -> Shape:
    """The model of a row.

    Raises:
        Unpriced: neither a known name nor sizes are published, or they cannot be right.
    """
    name = re.sub(r"\([^)]*\)", "", row.text("model")).strip()
    layers, hidden = row.count("layers", 0), row.count("hidden", 0)
    known = named_shape(name) if name else None
    if known is not None and _agrees(known, layers, hidden):
        return Shape(described=known)
    try:
        return _by_sizes(row, name, layers, hidden)
    except MeshwrightError as error:
        raise Unpriced(error.what) from error


def named_shape(name: str) -> Described | None:
    """The model that a name means, None where it is not known or can mean several."""
    words = _key(name)
    for known, config in _further().items():
        if known == words:
            return read_config(config, name=name)
    for spelling in (name, re.sub(r"(?i)^llama[- _]?([0-9.]*)[- _]([0-9.]+b).*$", r"Llama \1 \2", name)):
        try:
            return find_model(spelling)
        except MeshwrightError:
            continue
    return None


def _agrees(known: Described, layers: int, hidden: int) -> bool:
    if not isinstance(known, DecoderModel):
        return True
    return layers in (0, len(known.layers)) and hidden in (0, known.hidden)


def _key(name: str) -> tuple[str, ...]:
    words = re.findall(r"[a-z]+|[0-9][0-9.]*[a-z]?", name.lower())
    return tuple(sorted(word for word in words if word not in ("hf", "instruct", "base", "chat", "model")))


@lru_cache(maxsize=1)
def _further() -> dict[tuple[str, ...], dict[str, Any]]:
    table = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    return {
        _key(name): entry["config"] for entry in table["models"] for name in (entry["name"], *entry.get("also", ()))
    }


def _by_sizes(row: PublishedRow, name: str, layers: int, hidden: int) -> Shape:
    """A GPT, or a Llama where key/value heads, the MLP's channels or the name say so."""
    assumed: list[str] = []
    size = row.maybe("params_b") or _named_size(name)
    if not 0 <= size <= _LARGEST:
        raise Unpriced(f"{size:g} billion parameters cannot be right")
    ffn, groups = row.count("ffn", 0), row.count("kv_heads", 0)
    gated = bool(groups) or bool(_GATED.search(name.lower())) or bool(ffn and hidden and ffn % hidden)
    vocabulary = row.count("vocab", 0)
    if not vocabulary:
        usual = _GATED_VOCABULARY if gated else _PLAIN_VOCABULARY
        vocabulary = next((count for words, count in _VOCABULARIES if re.search(words, name.lower())), usual)
        assumed.append(f"a vocabulary of {vocabulary}")
    if not (layers and hidden):
        if not size:
            raise Unpriced(f"model {name!r} is not known, and neither layers and hidden nor parameters are published")
        layers, hidden = _layers_and_hidden(size * 1e9, layers, hidden, vocabulary)
        assumed.append(f"{layers} layers of {hidden} channels, by its {size:g} billion parameters")
    heads = row.count("heads", 0)
    if not heads:
        heads = _usual_heads(hidden, groups)
        assumed.append(f"{heads} heads")
    if gated:
        if not ffn:
            ffn = _usual_width(hidden, layers, heads, groups or heads, size, vocabulary)
            assumed.append(f"MLPs of {ffn} channels")
        table = {
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups or heads,
            "tie_word_embeddings": bool(size) and _tied(size, hidden, layers, heads, groups or heads, ffn, vocabulary),
        }
    else:
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        longest = max(1024, row.count("seq", 1024))
        sizes = {
            "n_positions": longest,
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": heads,
            "n_inner": ffn or 4 * hidden,
        }
        table = {"model_type": "gpt2", "vocab_size": vocabulary, **sizes, **dropout}
    return Shape(described=read_config(table, name=name or f"{layers} x {hidden}"), assumed=tuple(assumed))


def _named_size(name: str) -> float:
    """Billions of parameters that a name tells, 0.0 where it does not."""
    found = _SIZE.findall(re.sub(r"[_-]", " ", name))
    return float(found[-1][0]) * _SCALE[found[-1][1].upper()] if found else 0.0


def _layers_and_hidden(parameters: float, layers: int, hidden: int, vocabulary: int) -> tuple[int, int]:
    """What is missing of 12 l h^2 + V h = parameters."""
    if hidden:
        return max(1, round((parameters - vocabulary * hidden) / (12 * hidden**2))), hidden
    small, large = range(_HEAD, _LARGE, _HEAD), range(_LARGE, 1 << 17, _EIGHT_HEADS)
    for channels in (*small, *large):
        depth = layers or max(1, round(channels / _ASPECT))
        if 12 * depth * channels**2 + vocabulary * channels >= parameters:
            return depth, channels
    raise Unpriced(f"no usual shape has {parameters:g} parameters")


def _usual_heads(hidden: int, groups: int) -> int:
    size = _HEAD if hidden >= 2048 else _SMALL_HEAD
    heads = max(1, hidden // size)
    while heads > 1 and (hidden % heads or (groups and heads % groups)):
        heads -= 1
    return heads


def _usual_width(hidden: int, layers: int, heads: int, groups: int, size: float, vocabulary: int) -> int:
    """MLP channels: what the published size leaves for them, else those of Llama."""
    if size:
        attention = layers * hidden**2 * (2 + 2 * groups / heads)
        left = (size * 1e9 - attention - 2 * vocabulary * hidden) / (3 * layers * hidden)
        if hidden <= left <= 8 * hidden:
            return max(_STEP, round(left / _STEP) * _STEP)
    return -(-(8 * hidden // 3) // _STEP) * _STEP


def _tied(size: float, hidden: int, layers: int, heads: int, groups: int, ffn: int, vocabulary: int) -> bool:
    """Whether the published size has room for one table of the vocabulary only."""
    inside = layers * (hidden**2 * (2 + 2 * groups / heads) + 3 * hidden * ffn)
    return abs(inside + vocabulary * hidden - size * 1e9) < abs(inside + 2 * vocabulary * hidden - size * 1e9)
