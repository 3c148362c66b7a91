"""Small models of every family as `config.json` tables, with sizes that divide nothing."""

from __future__ import annotations

from typing import Any

Table = dict[str, Any]

_LLAMA: Table = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_GEMMA: Table = {**_LLAMA, "num_attention_heads": 4, "head_dim": 8}
_GPT2: Table = {"model_type": "gpt2", "vocab_size": 101, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64}
_OPT: Table = {
    "model_type": "opt",
    "vocab_size": 101,
    "hidden_size": 24,
    "ffn_dim": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_NEOX: Table = {
    "model_type": "gpt_neox",
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
_BLOOM: Table = {"model_type": "bloom", "vocab_size": 101, "hidden_size": 24, "n_layer": 3, "n_head": 4}
_MPT: Table = {"model_type": "mpt", "vocab_size": 101, "d_model": 24, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}

#: By name: the table of a class that calls a kernel which stores no scores.
WITH_KERNEL: dict[str, Table] = {
    "llama": {"model_type": "llama", **_LLAMA},
    "llama-biased-tied": {
        "model_type": "llama",
        **_LLAMA,
        "num_key_value_heads": None,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
    },
    "llama-wide-heads": {"model_type": "llama", **_LLAMA, "head_dim": 10, "num_key_value_heads": 3},
    "mistral": {"model_type": "mistral", **_LLAMA, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **_LLAMA},
    "qwen3": {"model_type": "qwen3", **_LLAMA, "head_dim": 10, "attention_bias": True},
    "phi3": {"model_type": "phi3", **_LLAMA, "resid_pdrop": 0.1},
    "gemma": {"model_type": "gemma", **_GEMMA},
    "gemma3": {"model_type": "gemma3_text", **_GEMMA, "sliding_window": 64, "sliding_window_pattern": 2},
    "gpt2": {**_GPT2, "attn_pdrop": 0.0},
    "gpt2-inner": {**_GPT2, "attn_pdrop": 0.0, "n_inner": 50, "activation_function": "gelu", "embd_pdrop": 0.0},
    "gpt_neox": _NEOX,
    "gpt_neox-serial": {**_NEOX, "use_parallel_residual": False, "rotary_pct": 1.0, "hidden_dropout": 0.2},
    "opt": _OPT,
    "opt-after": {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 10, "activation_function": "gelu"},
    "opt-plain": {**_OPT, "enable_bias": False, "layer_norm_elementwise_affine": False, "dropout": 0.0},
    "phi": {"model_type": "phi", **_LLAMA, "head_dim": 8, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "phi-normed": {"model_type": "phi", **_LLAMA, "num_attention_heads": 2, "qk_layernorm": True, "hidden_act": "relu"},
}
#: By name: the table of a class that stores the scores.
WITHOUT_KERNEL: dict[str, Table] = {
    "gemma2": {"model_type": "gemma2", **_GEMMA, "sliding_window": 5},
    "gemma2-uncapped": {
        "model_type": "gemma2",
        **_GEMMA,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
    },
    "bloom": {**_BLOOM, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "bloom-after": {**_BLOOM, "apply_residual_connection_post_layernorm": True},
    "mpt": _MPT,
    "mpt-clipped": {**_MPT, "attn_config": {"clip_qkv": 6.0, "attn_impl": "torch"}},
}
FAMILIES: dict[str, Table] = {**WITH_KERNEL, **WITHOUT_KERNEL}
