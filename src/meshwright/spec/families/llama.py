"""Llama and its kin: pre-norm decoders with RMSNorm, rotary positions, grouped-query attention and a gated MLP.

Each follows the class of Hugging Face transformers 5.24 of the same model_type, operation by operation.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from meshwright.spec.families.attention import Heads, attention, fused_projection, projections
from meshwright.spec.families.config import Keys
from meshwright.spec.families.described import DecoderModel
from meshwright.spec.families.parts import Head, gated_mlp, outputs
from meshwright.spec.families.record import Value
from meshwright.spec.families.tape import Tape

__all__ = [
    "FULL",
    "SLIDING",
    "LlamaShape",
    "gemma",
    "gemma2",
    "gemma3_text",
    "llama",
    "llama_model",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "self_attention",
]

FULL, SLIDING = "full_attention", "sliding_attention"


class LlamaShape(Struct, frozen=True, kw_only=True):
    """Sizes and switches in which Llama's kin differ.

    `fused`: one product for queries, keys and values and one for gate and up, and rotated channels of a head are joined
    to the rest (Phi-3). `head_norms`: queries and keys are normed per head (Qwen3, Gemma 3). `offset_norms`: Gemma's
    RMSNorm; `post_norms`: the outputs of attention and MLP are normed too (Gemma 2 and 3). `scaled`: embeddings are
    multiplied by a number. `rotary`: channels of a head that are rotated, 0 for all; `tables`: how many pairs of rotary
    tables there are. `halved` as in `Tape.rotate`,
    `kernel` and `softcap` as in `attention`.
    """

    vocabulary: int
    hidden: int
    intermediate: int
    heads: Heads
    head: Head
    activation: str = "silu"
    window: int = 0
    rotary: int = 0
    tables: int = 1
    bias_qkv: bool = False
    bias_out: bool = False
    bias_mlp: bool = False
    fused: bool = False
    head_norms: bool = False
    offset_norms: bool = False
    post_norms: bool = False
    scaled: bool = False
    halved: bool = False
    softcap: bool = False
    kernel: bool = True
    dropout: float = 0.0
    dropout_embedding: float = 0.0
    dropout_residual: float = 0.0


def llama_model(
    name: str, shape: LlamaShape, layers: tuple[str, ...], *, longest: int = 0, source: str = ""
) -> DecoderModel:
    """A decoder of this shape; `layers` says of each layer whether it sees all keys or a sliding window of them."""
    return DecoderModel(
        name=name,
        hidden=shape.hidden,
        heads=shape.heads,
        layers=layers,
        embedding=lambda tape: _embedding(tape, shape),
        layer=lambda tape, x, kind: _layer(tape, x, shape, shape.window if kind == SLIDING else 0),
        head=lambda tape, x: outputs(tape, tape.rms_norm(x, offset=shape.offset_norms), shape.head),
        predicts=shape.head.predicts,
        divided=(("intermediate_size", shape.intermediate),),
        longest=longest,
        source=source,
    )


def _embedding(tape: Tape, shape: LlamaShape) -> Value:
    x = tape.embed(shape.vocabulary, shape.hidden)
    if shape.scaled:
        tape.buffer_bytes += 4
        x = tape.scale(x)
    for _ in range(shape.tables):
        tape.rotary_tables(shape.rotary or shape.heads.size)
    return tape.dropout(x, shape.dropout_embedding)


def _layer(tape: Tape, x: Value, shape: LlamaShape, window: int) -> Value:
    mixed = self_attention(tape, tape.rms_norm(x, offset=shape.offset_norms), shape, window)
    x = tape.add(x, _leaving(tape, mixed, shape))
    normed = tape.rms_norm(x, offset=shape.offset_norms)
    moved = gated_mlp(tape, normed, shape.intermediate, shape.activation, bias=shape.bias_mlp, fused=shape.fused)
    return tape.add(x, _leaving(tape, moved, shape))


def _leaving(tape: Tape, x: Value, shape: LlamaShape) -> Value:
    x = tape.rms_norm(x, offset=shape.offset_norms) if shape.post_norms else x
    return tape.dropout(x, shape.dropout_residual)


def self_attention(tape: Tape, x: Value, shape: LlamaShape, window: int) -> Value:
    """Attention of the normed stream, back in the stream; `window` keys are seen, 0 for all."""
    project = fused_projection if shape.fused else projections
    q, k, v = project(tape, x, shape.heads, bias=shape.bias_qkv)
    here = shape.heads.on(tape.layout)
    if shape.head_norms:
        q, k = (_head_norm(tape, y, here.size, offset=shape.offset_norms) for y in (q, k))
    rotary = shape.rotary or here.size
    q = tape.rotate(q, here.heads, rotary, joined=shape.fused, halved=shape.halved)
    k = tape.rotate(k, here.groups, rotary, joined=shape.fused, halved=shape.halved)
    mixed = attention(
        tape,
        q,
        k,
        v,
        shape.heads,
        window=window,
        kernel=shape.kernel,
        softcap=shape.softcap,
        dropout=shape.dropout,
        headwise=shape.fused,
    )
    return tape.linear(mixed, shape.hidden, bias=shape.bias_out, parallel="row")


def _head_norm(tape: Tape, x: Value, size: int, *, offset: bool) -> Value:
    """A norm over the channels of each head."""
    return tape.rms_norm(x.view(x.elements // size, size), offset=offset, of_heads=True).view(x.rows, x.width)


# --- from config.json -------------------------------------------------------------------------------------------------


def _heads(keys: Keys, hidden: int, *, heads: int, groups: int | None, size: int | None = None) -> Heads:
    """Heads by Llama's key names; defaults where a key is missing, `groups` and `size` None for those derived."""
    count = keys.size("num_attention_heads", default=heads)
    shared = keys.size("num_key_value_heads", default=groups or count, null=count)
    return keys.heads(hidden, count, shared, keys.size("head_dim", default=size or 0, null=0, least=0))


def _windows(keys: Keys, count: int, pattern: int) -> tuple[str, ...]:
    """`layer_types`, or every `pattern`-th layer full and the others sliding (0: all full)."""
    default = [SLIDING if pattern and (index + 1) % pattern else FULL for index in range(count)]
    return keys.choices("layer_types", default, (FULL, SLIDING), count)


def llama(keys: Keys) -> DecoderModel:
    """model_type llama."""
    hidden = keys.size("hidden_size", default=4096)
    biased = keys.flag("attention_bias", default=False)
    shape = LlamaShape(
        vocabulary=keys.size("vocab_size", default=32000),
        hidden=hidden,
        intermediate=keys.size("intermediate_size", default=11008),
        heads=_heads(keys, hidden, heads=32, groups=None),
        head=keys.head(default_vocabulary=32000),
        activation=keys.text("hidden_act", default="silu"),
        bias_qkv=biased,
        bias_out=biased,
        bias_mlp=keys.flag("mlp_bias", default=False),
        dropout=keys.share("attention_dropout"),
    )
    layers = keys.size("num_hidden_layers", default=32)
    keys.rotary("max_position_embeddings")
    return llama_model(keys.name, shape, (FULL,) * layers, source=keys.source())


def mistral(keys: Keys) -> DecoderModel:
    """model_type mistral: a sliding window in every layer, unless it is null."""
    hidden = keys.size("hidden_size", default=4096)
    window = keys.size("sliding_window", default=4096, null=0, least=0)
    shape = LlamaShape(
        vocabulary=keys.size("vocab_size", default=32000),
        hidden=hidden,
        intermediate=keys.size("intermediate_size", default=14336),
        heads=_heads(keys, hidden, heads=32, groups=8),
        head=keys.head(default_vocabulary=32000),
        activation=keys.text("hidden_act", default="silu"),
        window=window,
        dropout=keys.share("attention_dropout"),
    )
    layers = keys.size("num_hidden_layers", default=32)
    keys.rotary("max_position_embeddings")
    return llama_model(keys.name, shape, (SLIDING if window else FULL,) * layers, source=keys.source())


def _qwen(keys: Keys, *, biased: bool, biased_out: bool, head_size: int, normed: bool) -> DecoderModel:
    hidden = keys.size("hidden_size", default=4096)
    layers = keys.size("num_hidden_layers", default=32)
    sliding = keys.flag("use_sliding_window", default=False)
    window = keys.size("sliding_window", default=4096, null=0, least=0) if sliding else keys.unused("sliding_window")
    first = keys.size("max_window_layers", default=28, null=0, least=0)
    default = [SLIDING if window and index >= first else FULL for index in range(layers)]
    shape = LlamaShape(
        vocabulary=keys.size("vocab_size", default=151936),
        hidden=hidden,
        intermediate=keys.size("intermediate_size", default=22016),
        heads=_heads(keys, hidden, heads=32, groups=32, size=head_size),
        head=keys.head(default_vocabulary=151936),
        activation=keys.text("hidden_act", default="silu"),
        window=window,
        bias_qkv=biased,
        bias_out=biased_out,
        head_norms=normed,
        dropout=keys.share("attention_dropout"),
    )
    kinds = keys.choices("layer_types", default, (FULL, SLIDING), layers)
    keys.rotary("max_position_embeddings")
    return llama_model(keys.name, shape, kinds, source=keys.source())


def qwen2(keys: Keys) -> DecoderModel:
    """model_type qwen2: queries, keys and values have biases."""
    return _qwen(keys, biased=True, biased_out=False, head_size=0, normed=False)


def qwen3(keys: Keys) -> DecoderModel:
    """model_type qwen3: queries and keys are normed per head."""
    biased = keys.flag("attention_bias", default=False)
    return _qwen(keys, biased=biased, biased_out=biased, head_size=128, normed=True)


def phi3(keys: Keys) -> DecoderModel:
    """model_type phi3: fused projections, rotation of a part of each head, dropout on the residual stream."""
    hidden = keys.size("hidden_size", default=3072)
    window = keys.size("sliding_window", default=0, null=0, least=0)
    heads = replace(_heads(keys, hidden, heads=32, groups=None), fused=True)
    keys.unused("embd_pdrop")  # the class reads it, but drops nothing there
    shape = LlamaShape(
        vocabulary=keys.size("vocab_size", default=32064),
        hidden=hidden,
        intermediate=keys.size("intermediate_size", default=8192),
        heads=heads,
        head=keys.head(default_vocabulary=32064),
        activation=keys.text("hidden_act", default="silu"),
        window=window,
        rotary=keys.rotary("max_position_embeddings", "original_max_position_embeddings", size=heads.size),
        fused=True,
        dropout=keys.share("attention_dropout"),
        dropout_residual=keys.share("resid_pdrop"),
    )
    layers = keys.size("num_hidden_layers", default=32)
    return llama_model(keys.name, shape, (SLIDING if window else FULL,) * layers, source=keys.source())


def gemma(keys: Keys) -> DecoderModel:
    """model_type gemma: heads wider than hidden_size / heads, scaled embeddings."""
    hidden = keys.size("hidden_size", default=3072)
    biased = keys.flag("attention_bias", default=False)
    keys.causal()
    keys.unused("hidden_activation")  # an older name, which the class does not read
    shape = LlamaShape(
        vocabulary=keys.size("vocab_size", default=256000),
        hidden=hidden,
        intermediate=keys.size("intermediate_size", default=24576),
        heads=_heads(keys, hidden, heads=16, groups=16, size=256),
        head=keys.head(default_vocabulary=256000, tied=True),
        activation=keys.text("hidden_act", default="gelu_pytorch_tanh"),
        bias_qkv=biased,
        bias_out=biased,
        offset_norms=True,
        scaled=True,
        dropout=keys.share("attention_dropout"),
    )
    layers = keys.size("num_hidden_layers", default=28)
    keys.rotary("max_position_embeddings")
    return llama_model(keys.name, shape, (FULL,) * layers, source=keys.source())


def _gemma_next(keys: Keys, *, vocabulary: int, capped: tuple[float, float], third: bool) -> DecoderModel:
    hidden = keys.size("hidden_size", default=2304)
    biased = keys.flag("attention_bias", default=False)
    keys.causal()
    keys.unused("query_pre_attn_scalar")
    layers = keys.size("num_hidden_layers", default=26)
    pattern = keys.size("sliding_window_pattern", "_sliding_window_pattern", default=6) if third else 2
    kinds = _windows(keys, layers, pattern)
    scores = keys.number("attn_logit_softcapping", default=capped[0])
    logits = keys.number("final_logit_softcapping", default=capped[1])
    shape = LlamaShape(
        vocabulary=keys.size("vocab_size", default=vocabulary),
        hidden=hidden,
        intermediate=keys.size("intermediate_size", default=9216),
        heads=_heads(keys, hidden, heads=8, groups=4, size=256),
        head=keys.head(default_vocabulary=vocabulary, tied=True, softcap=bool(logits)),
        activation=keys.text("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        window=keys.size("sliding_window", default=4096, null=0, least=0),
        tables=len(set(kinds)) if third else 1,
        bias_qkv=biased,
        bias_out=biased,
        head_norms=third,
        offset_norms=True,
        post_norms=True,
        scaled=True,
        softcap=bool(scores) and not third,
        kernel=third,
        dropout=keys.share("attention_dropout"),
    )
    keys.rotary("max_position_embeddings", "rope_local_base_freq")
    return llama_model(keys.name, shape, kinds, source=keys.source())


def gemma2(keys: Keys) -> DecoderModel:
    """model_type gemma2: every second layer sees a window; scores are capped, so that no kernel takes them."""
    return _gemma_next(keys, vocabulary=256000, capped=(50.0, 30.0), third=False)


def gemma3_text(keys: Keys) -> DecoderModel:
    """model_type gemma3_text: five of six layers see a window; queries and keys are normed per head."""
    return _gemma_next(keys, vocabulary=262208, capped=(0.0, 0.0), third=True)
