"""DecoderShape: the sizes of the built-in decoder under Hugging Face Llama's names, and what it costs.

Its blocks are those of Llama (`families/llama.py`), which follow the operations that `models/decoder.py` executes, one
by one; tests hold both against each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.errors import ConfigError
from meshwright.spec.families.attention import Heads
from meshwright.spec.families.described import DecoderModel
from meshwright.spec.families.llama import FULL, LlamaShape, llama_model
from meshwright.spec.families.parts import Head
from meshwright.spec.job import Dtype
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec

__all__ = ["DecoderShape", "describe", "described"]

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """The `[model]` table of job and plan files: keys and meanings of Hugging Face Llama's `config.json`.

    The defaults are a small model of bytes. `head_dim` 0 means hidden_size / num_attention_heads; read `head_size`.

    Raises:
        ConfigError: a size is not positive, or sizes do not belong together.
    """

    vocab_size: int = 256
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 0
    max_position_embeddings: int = 512
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"model.{name}={getattr(self, name)} is not a size", fix=f"set model.{name} to 1 or more"
                )
        if self.head_dim < 0:
            raise ConfigError(f"model.head_dim={self.head_dim} is negative", fix="leave model.head_dim out")
        for name, most in (("rms_norm_eps", math.inf), ("rope_theta", math.inf), ("initializer_range", 1.0)):
            value = getattr(self, name)
            if not (0 < value <= most and math.isfinite(value)):
                wanted = "a finite number above 0" + ("" if most == math.inf else f" and up to {most:g}")
                raise ConfigError(f"model.{name}={value} is not {wanted}", fix=f"set model.{name} to {wanted}")
        self._check_heads()

    def _check_heads(self) -> None:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise ConfigError(
                f"model.num_key_value_heads={groups} does not divide num_attention_heads={heads}",
                why="every key/value head serves the same number of query heads",
                fix=f"set model.num_key_value_heads to one of {_divisors(heads)}",
            )
        if not self.head_dim and self.hidden_size % heads:
            raise ConfigError(
                f"model.num_attention_heads={heads} does not divide hidden_size={self.hidden_size}",
                why="every head takes the same number of channels",
                fix=f"set model.num_attention_heads to one of {_divisors(self.hidden_size)}, or give model.head_dim",
            )
        if self.head_size % 2:
            raise ConfigError(
                f"the model's heads have {self.head_size} channels, which is odd",
                why="rotary embedding turns pairs of channels",
                fix="change model.num_attention_heads or model.hidden_size, or set an even model.head_dim",
            )

    @property
    def head_size(self) -> int:
        """Channels per head, D."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, min(number, 256) + 1) if number % n == 0)


def describe(shape: DecoderShape, *, sequence: int, compute_dtype: Dtype, layout: Layout | None = None) -> ModelSpec:
    """What a decoder costs, for sequences of `sequence` tokens computed in `compute_dtype`.

    Attention is priced as a kernel that keeps no S x S scores (flash attention); its flops are those of all S x S
    pairs, as is usual for MFU. Selective recompute keeps the outputs of matrix products and of attention (with its row
    sums); full recompute keeps the input of the block.

    Args:
        layout: how a rank sees the model, where it is more than sequence and dtype (which it then holds itself).

    Raises:
        ConfigError: the sequence is longer than the model's positions.
        UnsupportedCombination: the layout's tp cannot divide the model.
    """
    longest = shape.max_position_embeddings
    if sequence > longest:
        raise ConfigError(
            f"sequences of {sequence} tokens are longer than model.max_position_embeddings={longest}",
            why="positions beyond it do not exist in the model",
            fix=f"set job.sequence to {longest} or less, or raise model.max_position_embeddings",
        )
    return described(shape).at(layout or Layout(sequence=sequence, compute_dtype=compute_dtype))


def described(shape: DecoderShape) -> DecoderModel:
    """The decoder before a layout is fixed."""
    heads = Heads(heads=shape.num_attention_heads, groups=shape.num_key_value_heads, size=shape.head_size)
    sizes = LlamaShape(
        vocabulary=shape.vocab_size,
        hidden=shape.hidden_size,
        intermediate=shape.intermediate_size,
        heads=heads,
        head=Head(kind="vocabulary", size=shape.vocab_size, tied=shape.tie_word_embeddings),
        halved=True,
    )
    layers = (FULL,) * shape.num_hidden_layers
    return llama_model("decoder", sizes, layers, longest=shape.max_position_embeddings, source="built-in decoder")
