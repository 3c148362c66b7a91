"""DecoderShape: the sizes of a decoder under Hugging Face Llama's names, and what they cost in closed form.

The closed forms follow the operations that `models/decoder.py` executes, one by one; tests hold both against each
other.
Letters: S tokens of a sequence, H hidden_size, F intermediate_size, V vocab_size, N heads, K key/value heads, D head
size; c bytes of the compute dtype, w bytes of the dtype in which norms and losses are computed (float32 or wider).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwright.errors import ConfigError
from meshwright.spec.job import DTYPE_BYTES, Dtype
from meshwright.spec.layout import Layout
from meshwright.spec.model import BlockSpec, ModelSpec

__all__ = ["DecoderShape", "describe"]

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_ID_BYTES = 8  # token ids and labels are int64
_FLOAT32_BYTES = 4


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


def describe(shape: DecoderShape, *, sequence: int, compute_dtype: Dtype) -> ModelSpec:
    """What a decoder costs, in closed form, for sequences of `sequence` tokens computed in `compute_dtype`.

    Attention is priced as a kernel that keeps no S x S scores (flash attention); its flops are those of all S x S
    pairs, as is usual for MFU. Selective recompute keeps the outputs of matrix products and of attention (with its row
    sums); full recompute keeps the input of the block.

    Raises:
        ConfigError: the sequence is longer than the model's positions.
    """
    longest = shape.max_position_embeddings
    if sequence > longest:
        raise ConfigError(
            f"sequences of {sequence} tokens are longer than model.max_position_embeddings={longest}",
            why="positions beyond it do not exist in the model",
            fix=f"set job.sequence to {longest} or less, or raise model.max_position_embeddings",
        )
    costs = _Costs(shape, sequence, DTYPE_BYTES[compute_dtype])
    layer = costs.layer()
    return ModelSpec(
        name="decoder",
        layout=Layout(sequence=sequence, compute_dtype=compute_dtype),
        blocks=(
            costs.embedding(),
            *(replace(layer, name=f"layers.{index}") for index in range(shape.num_hidden_layers)),
            costs.head(),
        ),
        loss_bytes=sequence * (shape.vocab_size * costs.w + _ID_BYTES),
    )


class _Costs:
    """The closed forms for one sequence, operation by operation. Views move and keep nothing."""

    def __init__(self, shape: DecoderShape, sequence: int, c: int) -> None:
        self.shape = shape
        self.S = sequence
        self.H, self.F, self.V = shape.hidden_size, shape.intermediate_size, shape.vocab_size
        self.Q = shape.num_attention_heads * shape.head_size  # channels of all query heads
        self.KV = shape.num_key_value_heads * shape.head_size  # channels of all key heads, or of all value heads
        self.c, self.w = c, max(c, _FLOAT32_BYTES)
        self.cast = c < self.w  # norms and loss copy their input to float32 first

    def embedding(self) -> BlockSpec:
        """Lookup of S rows. Kept: the ids, and once per microbatch the rotary tables (cosines, sines: S x D each)."""
        S, H, D, c = self.S, self.H, self.shape.head_size, self.c
        tables = 2 * S * D * c
        return BlockSpec(
            name="embed_tokens",
            kind="embedding",
            parameters=self.V * H,
            tensors=((self.V, H),),
            forward_flops=0,
            moved_bytes=_ID_BYTES * S + 2 * S * H * c + self._rotary_tables(),
            saved_bytes=dict.fromkeys(("none", "selective", "full"), _ID_BYTES * S),
            fixed_bytes=tables,
            output_bytes=S * H * c,
            backward_extra_bytes=S * H * c,
        )

    def layer(self) -> BlockSpec:
        """Attention and SwiGLU, each after a norm and added to the residual stream."""
        S, H, F, Q, KV, c = self.S, self.H, self.F, self.Q, self.KV, self.c
        stream, row_sums = S * H * c, S * self.shape.num_attention_heads * self.w
        attention = S * c * (Q + KV + KV + Q) + row_sums  # q and k after rotation, v, output
        none = 2 * self._norm_saved() + attention + 4 * S * F * c  # gate, silu(gate), up, their product
        # Outputs of q, k, v, o, gate, up, down and of attention; the block's input is kept by the checkpoint.
        selective = stream + S * c * (Q + KV + KV + H + F + F + H) + S * c * Q + row_sums
        # Without recompute a narrow input is not kept: the norms keep their float32 copy of it.
        entrance = stream if self.cast else 0
        tensors = ((H,), (Q, H), (KV, H), (KV, H), (H, Q), (H,), (F, H), (F, H), (H, F))
        return BlockSpec(
            name="layer",
            kind="layer",
            parameters=sum(math.prod(tensor) for tensor in tensors),
            tensors=tensors,
            forward_flops=2 * S * (H * Q + 2 * H * KV + Q * H + 3 * H * F) + 4 * S * S * Q,
            moved_bytes=self._layer_moved(),
            saved_bytes={"none": none, "selective": selective, "full": stream},
            alive_bytes={
                "none": none,
                "selective": none + entrance + stream,  # the output of down is kept, but never asked for again
                "full": none + entrance,
            },
            output_bytes=stream,
            backward_extra_bytes=stream,
        )

    def head(self) -> BlockSpec:
        """Final norm and the product with the vocabulary. A tied matrix belongs to the embedding."""
        S, H, V, c = self.S, self.H, self.V, self.c
        tied = self.shape.tie_word_embeddings
        matrix = () if tied else ((V, H),)
        saved = self._norm_saved()
        return BlockSpec(
            name="lm_head",
            kind="head",
            parameters=H + (0 if tied else V * H),
            tied_parameters=V * H if tied else 0,
            tensors=((H,), *matrix),
            forward_flops=2 * S * H * V,
            moved_bytes=self._norm_moved() + self._linear_moved(H, V),
            saved_bytes=dict.fromkeys(("none", "selective", "full"), saved),
            output_bytes=S * V * c,
            backward_extra_bytes=S * V * c,
        )

    def _norm_saved(self) -> int:
        """The input in w, its reciprocal root, the normalised value in c, the norm's output."""
        return self.S * (self.H * self.w + self.w + 2 * self.H * self.c)

    def _norm_moved(self) -> int:
        S, H, c, w = self.S, self.H, self.c, self.w
        casts = 2 * S * H * (c + w) if self.cast else 0
        square, mean, root = 2 * S * H * w, S * (H + 1) * w, 4 * S * w  # root: + eps, then 1/sqrt
        normalise, scale = S * (2 * H + 1) * w, H * c + 2 * S * H * c
        return casts + square + mean + root + normalise + scale

    def _linear_moved(self, inputs: int, outputs: int) -> int:
        return (self.S * inputs + inputs * outputs + self.S * outputs) * self.c

    def _rotate_moved(self, channels: int) -> int:
        """x * cos, -half, cat, * sin, +: of S x `channels` elements, with S x D cosines and sines."""
        elements, table = self.S * channels, self.S * self.shape.head_size
        return self.c * ((2 * elements + table) + elements + 2 * elements + (2 * elements + table) + 3 * elements)

    def _layer_moved(self) -> int:
        S, H, F, Q, KV, c = self.S, self.H, self.F, self.Q, self.KV, self.c
        products = [(H, Q), (H, KV), (H, KV), (Q, H), (H, F), (H, F), (F, H)]
        attention = S * c * (2 * Q + 2 * KV) + S * self.shape.num_attention_heads * self.w
        residual, swiglu = 2 * 3 * S * H * c, (2 + 3) * S * F * c
        rotations = self._rotate_moved(Q) + self._rotate_moved(KV)
        linears = sum(self._linear_moved(inputs, outputs) for inputs, outputs in products)
        return 2 * self._norm_moved() + linears + rotations + attention + residual + swiglu

    def _rotary_tables(self) -> int:
        """Angles of S positions in float32, their cosines and sines, cast to the compute dtype."""
        S, D = self.S, self.shape.head_size
        angles = S + (S + D // 2 + S * D // 2) + 2 * S * D
        functions = 2 * 2 * S * D
        casts = 0 if self.c == _FLOAT32_BYTES else 2 * S * D * (_FLOAT32_BYTES + self.c)
        return (angles + functions) * _FLOAT32_BYTES + casts
