"""DeepSeek-V2 and V3: latent attention, experts with shared ones beside them, leading layers with a plain MLP.

Each follows the class of Hugging Face transformers 5.24 of the same model_type, operation by operation; the experts run
as grouped products over rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.spec.families.attention import Heads, attention
from meshwright.spec.families.config import Keys
from meshwright.spec.families.described import DecoderModel
from meshwright.spec.families.experts import divided_by_sum, experts, top
from meshwright.spec.families.parts import gated_mlp, outputs
from meshwright.spec.families.record import Value
from meshwright.spec.families.tape import Tape
from meshwright.spec.model import Product

__all__ = ["deepseek_v2", "deepseek_v3"]

_DENSE, _SPARSE = "dense", "sparse"
_WIDE_BYTES = 4  # the router computes in float32 whatever the compute dtype
_ID_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class _Latent:
    """Latent attention (DeepSeek-AI 2024, arXiv 2405.04434): ranks of the latents, channels of each head.

    `query` 0: queries come from the stream itself. `plain` channels of queries and keys are not rotated, `rotary` are.
    """

    hidden: int
    heads: int
    query: int
    shared: int
    plain: int
    rotary: int
    value: int
    biased: bool
    dropout: float

    @property
    def scores(self) -> Heads:
        """Heads as queries and keys have them."""
        return Heads(heads=self.heads, groups=self.heads, size=self.plain + self.rotary)


@dataclass(frozen=True, kw_only=True)
class _Mixture:
    """`chosen` of `count` experts of `width` channels, from the best `best` of `groups` groups of them (0: from all).

    `sigmoid`: scores are sigmoids with a correcting bias (V3) instead of a softmax (V2).
    """

    count: int
    chosen: int
    width: int
    shared: int
    activation: str
    groups: int
    best: int
    sigmoid: bool
    normalised: bool


def deepseek_v2(keys: Keys) -> DecoderModel:
    """model_type deepseek_v2."""
    method = keys.text("topk_method", default="greedy")
    if method != "greedy":
        keys.refuse("topk_method", allowed="group_limited_greedy", why="known are greedy and group_limited_greedy")
    grouped = method != "greedy"
    groups, best = keys.size("n_group", default=1, null=1), keys.size("topk_group", default=1, null=1)
    keys.unused("norm_topk_prob", "rope_interleave")  # the class reads neither
    keys.refuse("mlp_bias", allowed=False, why="biases of the MLPs are not described")
    mixture = _Mixture(
        count=keys.size("n_routed_experts", "num_experts", default=64),
        chosen=keys.size("num_experts_per_tok", default=6),
        width=keys.size("moe_intermediate_size", default=1407),
        shared=keys.size("n_shared_experts", default=2),
        activation=keys.text("hidden_act", default="silu"),
        groups=groups if grouped else 0,
        best=best if grouped else 0,
        sigmoid=False,
        normalised=False,
    )
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    return _model(keys, mixture, sizes, vocabulary=102400, leading=0, rotate=_complex_rotation, table_bytes=0)


def deepseek_v3(keys: Keys) -> DecoderModel:
    """model_type deepseek_v3. The layers that predict further tokens (MTP) are no part of the class."""
    interleaved = keys.flag("rope_interleave", default=True)
    keys.refuse("topk_method", allowed="noaux_tc", why="the class knows noaux_tc only")
    keys.refuse("scoring_func", allowed="sigmoid", why="the class knows sigmoid only")
    keys.unused("num_nextn_predict_layers", "num_mtp_layers")
    mixture = _Mixture(
        count=keys.size("n_routed_experts", "num_local_experts", default=256),
        chosen=keys.size("num_experts_per_tok", default=8),
        width=keys.size("moe_intermediate_size", default=2048),
        shared=keys.size("n_shared_experts", default=1),
        activation=keys.text("hidden_act", default="silu"),
        groups=keys.size("n_group", default=8),
        best=keys.size("topk_group", default=4),
        sigmoid=True,
        normalised=keys.flag("norm_topk_prob", default=True),
    )
    sizes = {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128}
    return _model(
        keys,
        mixture,
        sizes,
        vocabulary=129280,
        leading=3,
        rotate=_interleaved_rotation if interleaved else _half_rotation,
        table_bytes=mixture.count * _WIDE_BYTES,
    )


_Rotation = Callable[[Tape, Value, int, int], Value]


def _model(
    keys: Keys,
    mixture: _Mixture,
    sizes: dict[str, int],
    *,
    vocabulary: int,
    leading: int,
    rotate: _Rotation,
    table_bytes: int,
) -> DecoderModel:
    """The decoder; `table_bytes` are those of the router's correcting bias."""
    hidden, inner, layers, heads = (keys.size(name, default=default) for name, default in sizes.items())
    latent = _Latent(
        hidden=hidden,
        heads=heads,
        query=keys.size("q_lora_rank", default=1536, null=0),
        shared=keys.size("kv_lora_rank", default=512),
        plain=keys.size("qk_nope_head_dim", default=128),
        rotary=keys.size("qk_rope_head_dim", default=64, least=2),
        value=keys.size("v_head_dim", default=128),
        biased=keys.flag("attention_bias", default=False),
        dropout=keys.share("attention_dropout"),
    )
    keys.refuse("num_key_value_heads", allowed=heads, why="every head has keys and values of its own")
    dense = min(layers, keys.size("first_k_dense_replace", default=leading, least=0, null=0))
    keys.refuse("moe_layer_freq", allowed=1, why="after the leading layers every layer has experts")
    keys.rotary("max_position_embeddings", "head_dim", "qk_head_dim")
    keys.unused("routed_scaling_factor", "aux_loss_alpha", "seq_aux", "ep_size", "scoring_func", "router_aux_loss_coef")
    keys.refuse("output_router_logits", allowed=False, why="the loss that balances the experts is not described")
    keys.at_most("num_experts_per_tok", mixture.chosen, "n_routed_experts", mixture.count)
    if mixture.groups:
        keys.whole_parts("n_group", mixture.groups, "n_routed_experts", mixture.count)
        keys.at_most("topk_group", mixture.best, "n_group", mixture.groups)
    words, head = keys.size("vocab_size", default=vocabulary), keys.head(default_vocabulary=vocabulary)
    activation = mixture.activation

    def embedding(tape: Tape) -> Value:
        x = tape.embed(words, hidden)
        if rotate is _complex_rotation:
            _complex_tables(tape, latent.rotary)
        else:
            tape.rotary_tables(latent.rotary)
        return x

    def layer(tape: Tape, x: Value, kind: str) -> Value:
        x = tape.add(x, _attention(tape, tape.rms_norm(x), latent, rotate))
        normed = tape.rms_norm(x)
        if kind == _DENSE:
            return tape.add(x, gated_mlp(tape, normed, inner, activation))
        tape.buffer_bytes += table_bytes
        return tape.add(x, _mixed(tape, normed, mixture))

    divided = [("n_shared_experts x moe_intermediate_size", mixture.shared * mixture.width)] if dense < layers else []
    return DecoderModel(
        name=keys.name,
        hidden=hidden,
        heads=latent.scores,
        layers=(_DENSE,) * dense + (_SPARSE,) * (layers - dense),
        embedding=embedding,
        layer=layer,
        head=lambda tape, x: outputs(tape, tape.rms_norm(x), head),
        predicts=head.predicts,
        divided=(*([("intermediate_size", inner)] if dense else []), *divided),
        experts=mixture.count if dense < layers else 0,
        whole_only="the keys and values of all its heads come from one narrow product, which is not divided",
        source=keys.source(),
    )


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(tape: Tape, x: Value, latent: _Latent, rotate: _Rotation) -> Value:
    """Attention whose keys and values come from one narrow product, whole on every tensor-parallel rank."""
    here = latent.scores.on(tape.layout).heads
    wide, spread = here * latent.scores.size, here * (latent.plain + latent.value)
    source = tape.rms_norm(tape.linear(x, latent.query, bias=latent.biased)) if latent.query else x
    q = tape.linear(source, wide, parallel="column", local=wide)
    joint = tape.linear(x, latent.shared + latent.rotary, bias=latent.biased)
    narrow, turned = tape.split(joint, latent.shared, latent.rotary)
    narrow = tape.rms_norm(narrow)
    turned = tape.enter(turned)
    q_rotated = rotate(tape, q.view(q.rows, here * latent.rotary), here, latent.rotary)
    k_rotated = rotate(tape, turned, 1, latent.rotary)
    q = tape.cat([q.view(q.rows, here * latent.plain), q_rotated], tape.new(q.rows, wide))
    both = tape.linear(narrow, spread, parallel="column", local=spread)
    plain, v = tape.split(both, here * latent.plain, here * latent.value)
    k = tape.cat([plain, k_rotated], tape.new(q.rows, wide))
    stored = tape.eager and tape.layout.attention == "math"
    v = tape.contiguous(v) if stored else v
    mixed = attention(tape, q, k, v, latent.scores, dropout=latent.dropout)
    if (
        tape.eager and not stored
    ):  # queries lie head by head, so does the kernel's output, the product wants token by token
        mixed = tape.contiguous(mixed)
    return tape.linear(mixed, latent.hidden, bias=latent.biased, parallel="row")


def _half_rotation(tape: Tape, x: Value, heads: int, channels: int) -> Value:
    return tape.rotate(x, heads, channels)


def _interleaved_rotation(tape: Tape, x: Value, heads: int, channels: int) -> Value:
    """Even and odd channels turned as pairs, then joined: four products with the halves of the tables, two sums."""
    if not tape.eager:
        return tape.rotate(x, heads, channels)
    even, odd = tape.slices(x, x.width // 2, x.width // 2)
    tables = [tape.foreign(tape.layout.tokens, channels // 2) for _ in range(2)]
    turned = [
        tape.add(tape.multiply(one, tables[0]), tape.multiply(other, tables[1]))
        for one, other in ((even, odd), (odd, even))
    ]
    return tape.cat(turned, tape.new(x.rows, x.width, x.itemsize))


def _complex_rotation(tape: Tape, x: Value, heads: int, channels: int) -> Value:
    """Pairs of channels as complex numbers in float32, times those of the table."""
    if not tape.eager:
        return tape.rotate(x, heads, channels)
    table = tape.foreign(tape.layout.tokens, channels, _WIDE_BYTES)
    return tape.cast(tape.multiply(tape.cast(x, _WIDE_BYTES), table), x.itemsize)


def _complex_tables(tape: Tape, channels: int) -> None:
    """Complex numbers of the positions in float32, kept once per microbatch for all layers."""
    tape.buffer_bytes += channels // 2 * _WIDE_BYTES
    half = [tape.foreign(tape.layout.tokens, channels // 2, _WIDE_BYTES) for _ in range(2)]
    whole = tape.fixed(tape.layout.tokens, channels, _WIDE_BYTES)
    tape.apply("multiply", [half[0]], [half[1]])
    tape.apply("polar", half, [whole])
    tape.apply("scale", [whole], [whole])


# --- experts ----------------------------------------------------------------------------------------------------------


def _mixed(tape: Tape, x: Value, mixture: _Mixture) -> Value:
    """The chosen experts' sum, and the shared experts, which are one MLP of their joint width."""
    routed = experts(
        tape,
        x,
        _router(tape, x, mixture),
        count=mixture.count,
        chosen=mixture.chosen,
        width=mixture.width,
        activation=mixture.activation,
    )
    return tape.add(routed, gated_mlp(tape, x, mixture.shared * mixture.width, mixture.activation))


def _router(tape: Tape, x: Value, mixture: _Mixture) -> Value:
    """Weights of the chosen experts in float32. With groups, experts outside the best groups are masked first."""
    logits = _wide_product(tape, x, mixture.count)
    scores = tape.unary("sigmoid" if mixture.sigmoid else "softmax", logits, saves="output")
    ranked = tape.scale(scores, "add") if mixture.sigmoid else scores
    if mixture.groups and (tape.eager or mixture.groups > mixture.best):
        best = 2 if mixture.sigmoid else 1  # a group counts by its best two (V3) or its best one (V2)
        of_group, _ = top(tape, ranked.view(x.rows * mixture.groups, mixture.count // mixture.groups), best)
        of_group = (
            tape.apply("sum", [of_group], [tape.new(x.rows, mixture.groups, _WIDE_BYTES)]) if best > 1 else of_group
        )
        top(tape, of_group.view(x.rows, mixture.groups), mixture.best)
        mask = tape.new(x.rows, mixture.count, 1, grad=False)
        ranked = tape.apply("mask", [ranked, mask], [tape.new(x.rows, mixture.count, _WIDE_BYTES)], saves=[mask])
    share, _ = top(tape, ranked, mixture.chosen)
    if mixture.sigmoid and mixture.normalised:
        share = divided_by_sum(tape, share)
    return tape.scale(share)


def _wide_product(tape: Tape, x: Value, outputs: int) -> Value:
    """x times the router's matrix in float32. Kept: both in float32, where they were not."""
    weight = tape.parameter(outputs, x.width)
    work = Product(x.rows, x.width, outputs)
    out = tape.new(x.rows, outputs, _WIDE_BYTES)
    saves = [x]
    if tape.eager and x.itemsize != _WIDE_BYTES:
        copy = tape.new(outputs, x.width, _WIDE_BYTES)  # as for one sequence: a microbatch makes it once
        tape.apply("cast", [weight], [copy])
        saves = [tape.cast(x, _WIDE_BYTES), copy]
    tape.apply("linear", [saves[0], weight], [out], saves=saves, product=True, work=work)
    return out
