"""GPT-2 and its kin: decoders with LayerNorm and a plain MLP.

Each follows the class of Hugging Face transformers 5.24 of the same model_type, operation by operation.
"""

from __future__ import annotations

from meshwright.spec.families.attention import attention, fused_projection, projections
from meshwright.spec.families.config import Keys
from meshwright.spec.families.described import DecoderModel
from meshwright.spec.families.parts import mlp, outputs
from meshwright.spec.families.record import Value
from meshwright.spec.families.tape import Tape

__all__ = ["bloom", "gpt2", "gpt_neox", "mpt", "opt", "phi"]

_UNPUBLISHED = "its class publishes no plan that says which of its modules are divided"


def gpt2(keys: Keys) -> DecoderModel:
    """model_type gpt2: learned positions, fused projections, weights stored as inputs x outputs."""
    hidden = keys.size("n_embd", "hidden_size", default=768)
    count = keys.size("n_head", "num_attention_heads", default=12)
    layers = keys.size("n_layer", "num_hidden_layers", default=12)
    positions = keys.size("n_positions", "max_position_embeddings", default=1024)
    inner = keys.size("n_inner", default=4 * hidden, null=4 * hidden)
    activation = keys.text("activation_function", default="gelu_new")
    residual, entering = keys.share("resid_pdrop", default=0.1), keys.share("embd_pdrop", default=0.1)
    dropping = keys.share("attn_pdrop", default=0.1)
    keys.unused(
        "n_ctx",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
        "reorder_and_upcast_attn",
        "gradient_checkpointing",
    )
    keys.unused(*(f"summary_{part}" for part in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")))
    keys.refuse("add_cross_attention", allowed=False, why="cross attention needs an encoder")
    heads, vocabulary = keys.heads(hidden, count, count, 0), keys.size("vocab_size", default=50257)
    head = keys.head(default_vocabulary=50257, tied=True)

    def embedding(tape: Tape) -> Value:
        x = tape.add(tape.embed(vocabulary, hidden), tape.embed_positions(positions, hidden))
        return tape.dropout(x, entering)

    def layer(tape: Tape, x: Value, kind: str) -> Value:
        q, k, v = fused_projection(tape, tape.layer_norm(x), heads, bias=True, transposed=True)
        mixed = attention(tape, q, k, v, heads, dropout=dropping, wide=False)
        mixed = tape.linear(mixed, hidden, bias=True, parallel="row", transposed=True)
        x = tape.add(tape.dropout(mixed, residual), x)
        moved = mlp(tape, tape.layer_norm(x), inner, activation, transposed=True)
        return tape.add(x, tape.dropout(moved, residual))

    return DecoderModel(
        name=keys.name,
        hidden=hidden,
        heads=heads,
        layers=("layer",) * layers,
        embedding=embedding,
        layer=layer,
        head=lambda tape, x: outputs(tape, tape.layer_norm(x), head),
        predicts=head.predicts,
        divided=(("n_inner", inner),),
        longest=positions,
        joins=True,  # the class gives the last norm's output the shape of the whole sequence
        source=keys.source(),
    )


def _head_norm(tape: Tape, x: Value, size: int) -> Value:
    """A norm over the channels of each head."""
    return tape.layer_norm(x.view(x.elements // size, size), of_heads=True).view(x.rows, x.width)


def gpt_neox(keys: Keys) -> DecoderModel:
    """model_type gpt_neox: attention and MLP side by side, rotation of a part of each head."""
    hidden = keys.size("hidden_size", default=6144)
    count, layers = keys.size("num_attention_heads", default=64), keys.size("num_hidden_layers", default=44)
    inner = keys.size("intermediate_size", default=24576)
    heads, vocabulary = keys.heads(hidden, count, count, 0), keys.size("vocab_size", default=50432)
    rotary = keys.rotary(
        "max_position_embeddings", "rotary_emb_base", size=heads.size, default=0.25, named="rotary_pct"
    )
    activation, biased = keys.text("hidden_act", default="gelu"), keys.flag("attention_bias", default=True)
    parallel = keys.flag("use_parallel_residual", default=True)
    residual, dropping = keys.share("hidden_dropout"), keys.share("attention_dropout")
    head = keys.head(default_vocabulary=50432)

    def embedding(tape: Tape) -> Value:
        x = tape.dropout(tape.embed(vocabulary, hidden), residual)
        tape.rotary_tables(rotary)
        return x

    def layer(tape: Tape, x: Value, kind: str) -> Value:
        q, k, v = fused_projection(tape, tape.layer_norm(x), heads, bias=biased)
        here = heads.on(tape.layout)
        q, k = (tape.rotate(y, here.heads, rotary, joined=True) for y in (q, k))
        mixed = attention(tape, q, k, v, heads, dropout=dropping, headwise=True)
        mixed = tape.dropout(tape.linear(mixed, hidden, bias=biased, parallel="row"), residual)
        if not parallel:
            mixed = tape.add(mixed, x)
        moved = mlp(tape, tape.layer_norm(x if parallel else mixed), inner, activation)
        out = tape.add(tape.dropout(moved, residual), mixed)
        return tape.add(out, x) if parallel else out

    return DecoderModel(
        name=keys.name,
        hidden=hidden,
        heads=heads,
        layers=("layer",) * layers,
        embedding=embedding,
        layer=layer,
        head=lambda tape, x: outputs(tape, tape.layer_norm(x), head),
        predicts=head.predicts,
        divided=(("intermediate_size", inner),),
        source=keys.source(),
    )


def opt(keys: Keys) -> DecoderModel:
    """model_type opt: learned positions (two more than named), norms before or after, narrower embeddings."""
    hidden = keys.size("hidden_size", default=768)
    count, layers = keys.size("num_attention_heads", default=12), keys.size("num_hidden_layers", default=12)
    inner, positions = keys.size("ffn_dim", default=3072), keys.size("max_position_embeddings", default=2048)
    narrow = keys.size("word_embed_proj_dim", default=hidden, null=hidden)
    activation = keys.text("activation_function", default="relu")
    residual, dropping = keys.share("dropout", default=0.1), keys.share("attention_dropout")
    before, biased = keys.flag("do_layer_norm_before", default=True), keys.flag("enable_bias", default=True)
    affine = keys.flag("layer_norm_elementwise_affine", default=True)
    final = before and not keys.flag("_remove_final_layer_norm", default=False)
    keys.unused("activation_dropout", "layerdrop")
    heads, vocabulary = keys.heads(hidden, count, count, 0), keys.size("vocab_size", default=50272)
    head = keys.head(default_vocabulary=50272, tied=True)

    def embedding(tape: Tape) -> Value:
        x = tape.embed(vocabulary, narrow)
        places = tape.embed_positions(positions + 2, hidden, each_sequence=True)
        return tape.add(x if narrow == hidden else tape.linear(x, hidden), places)

    def layer(tape: Tape, x: Value, kind: str) -> Value:
        q, k, v = projections(tape, tape.layer_norm(x, affine=affine) if before else x, heads, bias=biased)
        mixed = attention(tape, tape.scale(q), k, v, heads, dropout=dropping)
        mixed = tape.dropout(tape.linear(mixed, hidden, bias=biased, parallel="row"), residual)
        x = tape.add(x, mixed)
        x = x if before else tape.layer_norm(x, affine=affine)
        moved = mlp(tape, tape.layer_norm(x, affine=affine) if before else x, inner, activation, bias=biased)
        x = tape.add(x, tape.dropout(moved, residual))
        return x if before else tape.layer_norm(x, affine=affine)

    def last(tape: Tape, x: Value) -> Value:
        x = tape.layer_norm(x, affine=affine) if final else x
        return outputs(tape, x if narrow == hidden else tape.linear(x, narrow), head)

    return DecoderModel(
        name=keys.name,
        hidden=hidden,
        heads=heads,
        layers=("layer",) * layers,
        embedding=embedding,
        layer=layer,
        head=last,
        predicts=head.predicts,
        divided=(("ffn_dim", inner),),
        longest=positions,
        uncut="its MLPs see the tokens of all sequences in one row",
        source=keys.source(),
    )


def bloom(keys: Keys) -> DecoderModel:
    """model_type bloom: ALiBi, a norm on the embeddings. The class has no kernel without scores."""
    hidden = keys.size("n_embed", "hidden_size", default=64)
    count = keys.size("n_head", "num_attention_heads", default=8)
    layers = keys.size("n_layer", "num_hidden_layers", default=2)
    residual, dropping = keys.share("hidden_dropout"), keys.share("attention_dropout")
    after = keys.flag("apply_residual_connection_post_layernorm", default=False)
    keys.unused(
        "slow_but_exact",
        "seq_length",
        "offset_alibi",
        "unk_token_id",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "attention_softmax_in_fp32",
    )
    heads, vocabulary = keys.heads(hidden, count, count, 0), keys.size("vocab_size", default=250880)
    head = keys.head(default_vocabulary=250880, tied=True)

    def layer(tape: Tape, x: Value, kind: str) -> Value:
        normed = tape.layer_norm(x)
        q, k, v = fused_projection(tape, normed, heads, bias=True, sliced=True)
        mixed = attention(tape, q, k, v, heads, kernel=False, dropout=dropping, scaled=False)
        mixed = tape.dropout(tape.linear(mixed, hidden, bias=True, parallel="row"), residual)
        x = tape.add(normed if after else x, mixed)
        normed = tape.layer_norm(x)
        moved = tape.dropout(mlp(tape, normed, 4 * hidden, "bloom_gelu"), residual)
        return tape.add(normed if after else x, moved)

    return DecoderModel(
        name=keys.name,
        hidden=hidden,
        heads=heads,
        layers=("layer",) * layers,
        embedding=lambda tape: tape.layer_norm(tape.embed(vocabulary, hidden)),
        layer=layer,
        head=lambda tape, x: outputs(tape, tape.layer_norm(x), head),
        predicts=head.predicts,
        whole_only=_UNPUBLISHED,
        source=keys.source(),
    )


def mpt(keys: Keys) -> DecoderModel:
    """model_type mpt: ALiBi, no biases. The class has no kernel without scores."""
    hidden = keys.size("d_model", "hidden_size", default=2048)
    count = keys.size("n_heads", "num_attention_heads", default=16)
    layers = keys.size("n_layers", "num_hidden_layers", default=24)
    positions = keys.size("max_seq_len", default=2048)
    inside = Keys(keys.table("attn_config"), name=f"{keys.name}, attn_config", family="mpt", prefix="Mpt")
    dropping, clipped = inside.share("attn_pdrop"), inside.number("clip_qkv", default=0.0)
    inside.unused("attn_impl", "softmax_scale", "alibi_bias_max", "model_type", "rope", "rope_theta", "qk_gn")
    wanted = "Hugging Face's class has no such attention"
    for name, allowed in (
        ("attn_type", "multihead_attention"),
        ("alibi", True),
        ("qk_ln", False),
        ("prefix_lm", False),
    ):
        inside.refuse(name, allowed=allowed, why=wanted)
    inside.refuse("attn_uses_sequence_id", allowed=False, why=wanted)
    inside.finish()
    for name, value in (("expansion_ratio", 4), ("no_bias", True)):
        keys.refuse(name, allowed=value, why=f"Hugging Face's class only knows {name}={value}")
    keys.unused(
        "resid_pdrop",
        "emb_pdrop",
        "learned_pos_emb",
        "init_device",
        "logit_scale",
        "embedding_fraction",
        "norm_type",
        "verbose",
        "init_config",
        "use_pad_tok_in_ffn",
        "tokenizer_name",
        "fc_type",
        "ffn_config",
        "attn_impl",
    )
    heads, vocabulary = keys.heads(hidden, count, count, 0), keys.size("vocab_size", default=50368)
    head = keys.head(default_vocabulary=50368, tied=True)

    def layer(tape: Tape, x: Value, kind: str) -> Value:
        q, k, v = fused_projection(tape, tape.layer_norm(x, bias=False), heads)
        if clipped:
            q, k, v = tape.split(tape.unary("clamp", q.view(q.rows, 3 * q.width), saves="input"), *(q.width,) * 3)
        mixed = attention(tape, q, k, v, heads, kernel=False, dropout=dropping)
        mixed = tape.dropout(tape.linear(mixed, hidden, parallel="row"), dropping)
        x = tape.add(mixed, x)
        moved = mlp(tape, tape.layer_norm(x, bias=False), 4 * hidden, "gelu", bias=False)
        return tape.add(tape.dropout(moved, dropping), x)

    return DecoderModel(
        name=keys.name,
        hidden=hidden,
        heads=heads,
        layers=("layer",) * layers,
        embedding=lambda tape: tape.embed(vocabulary, hidden),
        layer=layer,
        head=lambda tape, x: outputs(tape, tape.layer_norm(x, bias=False), head),
        predicts=head.predicts,
        longest=positions,
        whole_only=_UNPUBLISHED,
        source=keys.source(),
    )


def phi(keys: Keys) -> DecoderModel:
    """model_type phi: attention and MLP side by side on one norm, rotation of a part of each head."""
    hidden = keys.size("hidden_size", default=2048)
    count, layers = keys.size("num_attention_heads", default=32), keys.size("num_hidden_layers", default=24)
    groups = keys.size("num_key_value_heads", default=count, null=count)
    inner = keys.size("intermediate_size", default=8192)
    heads = keys.heads(hidden, count, groups, keys.size("head_dim", default=0, null=0, least=0))
    rotary = keys.rotary("max_position_embeddings", size=heads.size, default=0.5)
    activation, normed_heads = keys.text("hidden_act", default="gelu_new"), keys.flag("qk_layernorm", default=False)
    residual, entering = keys.share("resid_pdrop"), keys.share("embd_pdrop")
    dropping, vocabulary = keys.share("attention_dropout"), keys.size("vocab_size", default=51200)
    keys.unused("attention_probs_dropout_prob", "hidden_dropout_prob", "type_vocab_size")  # BERT's, read by nobody
    head = keys.head(default_vocabulary=51200, bias=True)

    def embedding(tape: Tape) -> Value:
        x = tape.dropout(tape.embed(vocabulary, hidden), entering)
        tape.rotary_tables(rotary)
        return x

    def layer(tape: Tape, x: Value, kind: str) -> Value:
        normed = tape.layer_norm(x)
        q, k, v = projections(tape, normed, heads, bias=True)
        here = heads.on(tape.layout)
        if normed_heads:
            q, k = (_head_norm(tape, y, here.size) for y in (q, k))
        q = tape.rotate(q, here.heads, rotary, joined=True)
        k = tape.rotate(k, here.groups, rotary, joined=True)
        mixed = attention(tape, q, k, v, heads, dropout=dropping, headwise=True)
        mixed = tape.dropout(tape.linear(mixed, hidden, bias=True, parallel="row"), residual)
        moved = tape.dropout(mlp(tape, normed, inner, activation), residual)
        return tape.add(tape.add(mixed, moved), x)

    return DecoderModel(
        name=keys.name,
        hidden=hidden,
        heads=heads,
        layers=("layer",) * layers,
        embedding=embedding,
        layer=layer,
        head=lambda tape, x: outputs(tape, tape.layer_norm(x), head),
        predicts=head.predicts,
        divided=(("intermediate_size", inner),),
        source=keys.source(),
    )
