"""Hugging Face families that tensor parallelism divides, by published plans or known ones: tiny and random."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.harness.hugging_face import VOCABULARY, random_model

__all__ = ["DIVIDED", "WHOLE_SEQUENCES", "FAST", "divided_model"]

#: Inner and vocabulary sizes divide unevenly over 2 ranks, heads evenly.
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 12,
    "intermediate_size": 23,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_WITHOUT_GROUPS = {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
_WIDE = _DECODER | {"head_dim": 4}
_EXPERTS = {"experts_implementation": "eager"}  # grouped products have no float64
#: Name, class, class of its config, and its keys.
DIVIDED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, _DECODER | {"attention_bias": True, "mlp_bias": True}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, _DECODER | {"sliding_window": 7, "head_dim": 2}),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, _DECODER),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, _WIDE),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, _WIDE | {"query_pre_attn_scalar": 4, "sliding_window": 7}),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, _WIDE | {"query_pre_attn_scalar": 4, "sliding_window": 7}),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config, _DECODER),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, _WITHOUT_GROUPS | {"rotary_pct": 1.0}),
    "starcoder2": (hf.Starcoder2ForCausalLM, hf.Starcoder2Config, _DECODER),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config, _DECODER),
    "granite": (hf.GraniteForCausalLM, hf.GraniteConfig, _DECODER),
    # Its norms of heads have a mean too: over two channels little would be left but rounding.
    "cohere": (hf.CohereForCausalLM, hf.CohereConfig, _DECODER | {"hidden_size": 24, "use_qk_norm": True}),
    "phi": (hf.PhiForCausalLM, hf.PhiConfig, _DECODER | {"hidden_size": 24, "partial_rotary_factor": 0.5}),
    "gpt2": (
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 12, "n_layer": 3, "n_head": 6, "n_inner": 23}
        | {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False},
    ),
    "opt": (
        hf.OPTForCausalLM,
        hf.OPTConfig,
        {"vocab_size": VOCABULARY, "hidden_size": 12, "ffn_dim": 23, "num_hidden_layers": 3, "num_attention_heads": 6}
        | {"max_position_embeddings": 64, "word_embed_proj_dim": 12, "pad_token_id": 0, "bos_token_id": 1}
        | {"eos_token_id": 2, "use_cache": False},
    ),
    "glm": (hf.GlmForCausalLM, hf.GlmConfig, _WIDE),
    "smollm3": (hf.SmolLM3ForCausalLM, hf.SmolLM3Config, _DECODER),
    "cohere2": (hf.Cohere2ForCausalLM, hf.Cohere2Config, _DECODER | {"sliding_window": 7}),
    "helium": (hf.HeliumForCausalLM, hf.HeliumConfig, _WIDE),
    "nemotron": (hf.NemotronForCausalLM, hf.NemotronConfig, _WIDE),
    "olmo": (hf.OlmoForCausalLM, hf.OlmoConfig, _DECODER),
    "seed_oss": (hf.SeedOssForCausalLM, hf.SeedOssConfig, _WIDE),
    "exaone4": (hf.Exaone4ForCausalLM, hf.Exaone4Config, _WIDE),
    "ernie4_5": (hf.Ernie4_5ForCausalLM, hf.Ernie4_5Config, _WIDE),
    # One key/value head, of which each rank has a copy.
    "one_group": (hf.LlamaForCausalLM, hf.LlamaConfig, _DECODER | {"num_key_value_heads": 1}),
    "mixtral": (
        hf.MixtralForCausalLM,
        hf.MixtralConfig,
        _DECODER | _EXPERTS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        _WIDE | _EXPERTS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 9},
    ),
}
#: Run by `make test`, one of each kind: biases, norms of heads, fused queries, rotary for a part of a head, transposed
#: weights, learned positions, one key for all queries, experts. `make test-all` trains the others, which
#: `runtime/test_tensor_plan.py` divides.
FAST = (
    *("llama", "gemma3", "phi3", "gpt_neox", "cohere", "phi"),
    *("gpt2", "opt", "one_group", "mixtral", "qwen3_moe"),
)
#: Those that sequence parallelism refuses: routers see the whole sequence, and OPT runs its MLPs on rows of tokens.
WHOLE_SEQUENCES = ("mixtral", "qwen3_moe", "opt")


def divided_model(name: str, *, tied: bool, dtype: torch.dtype) -> nn.Module:
    """A model with random values, its head tied to its embedding or not, without dropout."""
    kind, config, keys = DIVIDED[name]
    return random_model(kind, config(**keys, tie_word_embeddings=tied), dtype)
