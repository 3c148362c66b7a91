"""Mixtral and Qwen's mixtures: Llama's layers with experts in place of some or all of the MLPs.

Each follows the class of Hugging Face transformers 5.24 of the same model_type, operation by operation; the experts run
as grouped products over rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.spec.families.config import Keys
from meshwright.spec.families.described import DecoderModel
from meshwright.spec.families.experts import experts, softmax_router
from meshwright.spec.families.llama import FULL, SLIDING, LlamaShape, llama_model, self_attention
from meshwright.spec.families.parts import gated_mlp
from meshwright.spec.families.record import Value
from meshwright.spec.families.tape import Tape

__all__ = ["mixtral", "qwen2_moe", "qwen3_moe"]

_DENSE = "dense "
_UNCUT = "its routers choose experts for the tokens of a whole sequence"


@dataclass(frozen=True, kw_only=True)
class _Mixture:
    """`chosen` of `count` experts of `width` channels; `shared` channels of an expert that every row goes through."""

    count: int
    chosen: int
    width: int
    activation: str
    normalised: bool
    narrow: bool
    shared: int = 0


def mixtral(keys: Keys) -> DecoderModel:
    """model_type mixtral: experts in every layer."""
    hidden = keys.size("hidden_size", default=4096)
    window = keys.size("sliding_window", default=0, null=0, least=0)
    activation = keys.text("hidden_act", default="silu")
    count = keys.size("num_attention_heads", default=32)
    groups = keys.size("num_key_value_heads", default=8, null=count)
    width = keys.size("intermediate_size", default=14336)
    shape = LlamaShape(
        vocabulary=keys.size("vocab_size", default=32000),
        hidden=hidden,
        intermediate=width,
        heads=keys.heads(hidden, count, groups, keys.size("head_dim", default=0, null=0, least=0)),
        head=keys.head(default_vocabulary=32000),
        window=window,
        dropout=keys.share("attention_dropout"),
    )
    mixture = _Mixture(
        count=keys.size("num_local_experts", "num_experts", default=8),
        chosen=keys.size("num_experts_per_tok", default=2),
        width=width,
        activation=activation,
        normalised=True,
        narrow=False,
    )
    keys.refuse("router_jitter_noise", allowed=0.0, why="noise on the router's input is not described")
    _unused(keys)
    layers = keys.size("num_hidden_layers", default=32)
    return _model(keys, shape, mixture, (SLIDING if window else FULL,) * layers)


def qwen3_moe(keys: Keys) -> DecoderModel:
    """model_type qwen3_moe: experts in all layers but some, queries and keys normed per head."""
    hidden, count = keys.size("hidden_size", default=2048), keys.size("num_attention_heads", default=32)
    biased = keys.flag("attention_bias", default=False)
    window = _window(keys)
    layers = keys.size("num_hidden_layers", default=24)
    groups = keys.size("num_key_value_heads", default=4)
    shape = LlamaShape(
        vocabulary=keys.size("vocab_size", default=151936),
        hidden=hidden,
        intermediate=keys.size("intermediate_size", default=6144),
        heads=keys.heads(hidden, count, groups, keys.size("head_dim", default=0, null=0, least=0)),
        head=keys.head(default_vocabulary=151936),
        activation=keys.text("hidden_act", default="silu"),
        window=window,
        bias_qkv=biased,
        bias_out=biased,
        head_norms=True,
        dropout=keys.share("attention_dropout"),
    )
    keys.unused("max_window_layers")
    mixture = _qwen_mixture(keys, shape, count=128, chosen=8, width=768)
    return _model(keys, shape, mixture, _sparse(keys, (SLIDING if window else FULL,) * layers))


def qwen2_moe(keys: Keys) -> DecoderModel:
    """model_type qwen2_moe: beside the chosen experts one that every row goes through, behind a gate of its own."""
    hidden, count = keys.size("hidden_size", default=2048), keys.size("num_attention_heads", default=16)
    window = _window(keys)
    layers = keys.size("num_hidden_layers", default=24)
    first = keys.size("max_window_layers", default=28, null=0, least=0)
    groups = keys.size("num_key_value_heads", default=16, null=count)
    default = [SLIDING if window and index % 2 == 0 and index < first else FULL for index in range(layers)]
    shape = LlamaShape(
        vocabulary=keys.size("vocab_size", default=151936),
        hidden=hidden,
        intermediate=keys.size("intermediate_size", default=5632),
        heads=keys.heads(hidden, count, groups, keys.size("head_dim", default=0, null=0, least=0)),
        head=keys.head(default_vocabulary=151936),
        activation=keys.text("hidden_act", default="silu"),
        window=window,
        bias_qkv=keys.flag("qkv_bias", default=True),
        dropout=keys.share("attention_dropout"),
    )
    mixture = _qwen_mixture(keys, shape, count=60, chosen=4, width=1408)
    shared = keys.size("shared_expert_intermediate_size", default=5632)
    kinds = keys.choices("layer_types", default, (FULL, SLIDING), layers)
    return _model(keys, shape, replace(mixture, shared=shared), _sparse(keys, kinds))


def _window(keys: Keys) -> int:
    if keys.flag("use_sliding_window", default=False):
        return keys.size("sliding_window", default=4096, null=0, least=0)
    return keys.unused("sliding_window")


def _unused(keys: Keys) -> None:
    keys.rotary("max_position_embeddings")
    keys.unused("router_aux_loss_coef")
    keys.refuse("output_router_logits", allowed=False, why="the loss that balances the experts is not described")


def _qwen_mixture(keys: Keys, shape: LlamaShape, *, count: int, chosen: int, width: int) -> _Mixture:
    _unused(keys)
    return _Mixture(
        count=keys.size("num_experts", "num_local_experts", default=count),
        chosen=keys.size("num_experts_per_tok", default=chosen),
        width=keys.size("moe_intermediate_size", default=width),
        activation=shape.activation,
        normalised=keys.flag("norm_topk_prob", default=False),
        narrow=True,
    )


def _sparse(keys: Keys, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of layers, those marked that have an MLP instead of experts."""
    step = keys.size("decoder_sparse_step", default=1)
    dense = keys.places("mlp_only_layers", len(kinds))
    return tuple(
        kind if index not in dense and (index + 1) % step == 0 else _DENSE + kind for index, kind in enumerate(kinds)
    )


def _model(keys: Keys, shape: LlamaShape, mixture: _Mixture, kinds: tuple[str, ...]) -> DecoderModel:
    keys.at_most("num_experts_per_tok", mixture.chosen, "the number of experts", mixture.count)
    plain = llama_model(keys.name, shape, kinds, source=keys.source())
    widths = [("intermediate_size", shape.intermediate)] if any(kind.startswith(_DENSE) for kind in kinds) else []
    widths += [("shared_expert_intermediate_size", mixture.shared)] if mixture.shared else []
    return replace(plain, layer=_layer(shape, mixture), divided=tuple(widths), experts=mixture.count, uncut=_UNCUT)


def _layer(shape: LlamaShape, mixture: _Mixture) -> Callable[[Tape, Value, str], Value]:
    def layer(tape: Tape, x: Value, kind: str) -> Value:
        window = shape.window if kind.endswith(SLIDING) else 0
        x = tape.add(x, self_attention(tape, tape.rms_norm(x), shape, window))
        normed = tape.rms_norm(x)
        if kind.startswith(_DENSE):
            return tape.add(x, gated_mlp(tape, normed, shape.intermediate, shape.activation))
        return tape.add(x, _mixed(tape, normed, mixture))

    return layer


def _mixed(tape: Tape, x: Value, mixture: _Mixture) -> Value:
    shared = None
    if mixture.shared:  # the plan that its class publishes leaves this expert whole
        shared = gated_mlp(tape, x, mixture.shared, mixture.activation, whole=tape.eager)
    share = softmax_router(
        tape,
        x,
        count=mixture.count,
        chosen=mixture.chosen,
        normalised=mixture.normalised,
        narrow=mixture.narrow,
    )
    routed = experts(
        tape,
        x,
        share,
        count=mixture.count,
        chosen=mixture.chosen,
        width=mixture.width,
        activation=mixture.activation,
    )
    if shared is None:
        return routed
    gate = tape.unary("sigmoid", tape.linear(x, 1), saves="output")
    return tape.add(routed, tape.multiply(shared, gate))
