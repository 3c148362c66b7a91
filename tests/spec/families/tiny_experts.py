"""Small models with experts as `config.json` tables, with sizes that divide little.

Grouped products want rows of whole 16 bytes, hence the multiples of 8.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WITH_EXPERTS"]

Table = dict[str, Any]

_MIXTURE: Table = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_QWEN: Table = {**_MIXTURE, "num_experts": 5, "moe_intermediate_size": 16}
#: Query, key and value heads of equal size: otherwise PyTorch has no kernel on the CPU and stores the scores.
_DEEPSEEK: Table = {
    **_MIXTURE,
    "num_key_value_heads": 6,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}

#: By name: the table of a class with experts.
WITH_EXPERTS: dict[str, Table] = {
    "mixtral": {"model_type": "mixtral", **_MIXTURE, "num_local_experts": 5},
    "mixtral-wide-heads": {"model_type": "mixtral", **_MIXTURE, "head_dim": 10, "tie_word_embeddings": True},
    "qwen2_moe": {"model_type": "qwen2_moe", **_QWEN, "shared_expert_intermediate_size": 22},
    "qwen2_moe-some": {
        "model_type": "qwen2_moe",
        **_QWEN,
        "shared_expert_intermediate_size": 22,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
        "qkv_bias": False,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **_QWEN, "norm_topk_prob": True},
    "qwen3_moe-some": {"model_type": "qwen3_moe", **_QWEN, "mlp_only_layers": [1], "attention_bias": True},
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **_DEEPSEEK,
        "q_lora_rank": 17,
        "n_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v2-lite": {"model_type": "deepseek_v2", **_DEEPSEEK, "q_lora_rank": None, "attention_bias": True},
    "deepseek_v3": {"model_type": "deepseek_v3", **_DEEPSEEK, "q_lora_rank": 17, "n_group": 3, "topk_group": 2},
    "deepseek_v3-halves": {
        "model_type": "deepseek_v3",
        **_DEEPSEEK,
        "q_lora_rank": None,
        "rope_interleave": False,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
    },
}
