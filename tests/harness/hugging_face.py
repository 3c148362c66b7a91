"""Hugging Face models, tiny and random, with batches of their own kind: what the equivalence checks run unmodified."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

__all__ = ["FAMILIES", "ROWS", "TIED", "VOCABULARY", "make_model", "random_model", "rows_of"]

ROWS, LENGTH, VOCABULARY = 6, 17, 101
IGNORED = -100
#: Tokens of each sequence that are no padding.
LENGTHS = (17, 3, 11, 5, 16, 8)

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 12,
    "intermediate_size": 23,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 12,
    "intermediate_size": 23,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}
#: Name, class, class of its config, and its keys. Sizes divide neither 2 nor 3 ranks evenly.
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, _DECODER),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, _DECODER | {"sliding_window": 7, "head_dim": 2}),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, _DECODER),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, _DECODER | {"head_dim": 4}),
    "gemma2": (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config,
        _DECODER | {"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 7},
    ),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config, _DECODER),
    "gpt2": (
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 12, "n_layer": 5, "n_head": 3, "n_inner": 23}
        | {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False},
    ),
    "gpt_neox": (
        hf.GPTNeoXForCausalLM,
        hf.GPTNeoXConfig,
        {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
        | {"num_attention_heads": 3, "rotary_pct": 0.5},
    ),
    "opt": (
        hf.OPTForCausalLM,
        hf.OPTConfig,
        {"vocab_size": VOCABULARY, "hidden_size": 12, "ffn_dim": 23, "num_hidden_layers": 5, "num_attention_heads": 3}
        | {"max_position_embeddings": 64, "word_embed_proj_dim": 12, "pad_token_id": 0, "bos_token_id": 1}
        | {"eos_token_id": 2, "use_cache": False},
    ),
    "t5": (
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        {"vocab_size": VOCABULARY, "d_model": 12, "d_kv": 4, "d_ff": 23, "num_layers": 3, "num_heads": 3}
        | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "use_cache": False},
    ),
    "bert": (hf.BertForMaskedLM, hf.BertConfig, _ENCODER | {"vocab_size": VOCABULARY, "max_position_embeddings": 64}),
    "vit": (
        hf.ViTForImageClassification,
        hf.ViTConfig,
        _ENCODER | {"image_size": 16, "patch_size": 8, "num_labels": 7},
    ),
    "whisper": (
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig,
        {"vocab_size": VOCABULARY, "d_model": 12, "encoder_layers": 3, "decoder_layers": 3}
        | {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 23, "decoder_ffn_dim": 23}
        | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32, "use_cache": False}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
        | {"begin_suppress_tokens": None, "suppress_tokens": None},
    ),
}
#: Those whose head may share the embedding's weight, or not.
TIED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "gpt_neox", "opt", "t5", "bert")


def make_model(name: str, *, tied: bool, dtype: torch.dtype) -> nn.Module:
    """A model with random values, the same in every dtype up to rounding, and without dropout."""
    kind, config, keys = FAMILIES[name]
    return random_model(kind, config(**keys, **({"tie_word_embeddings": tied} if name in TIED else {})), dtype)


def random_model(kind: Any, made: Any, dtype: torch.dtype) -> nn.Module:
    """As `make_model`, of a class and a config of it."""
    for key, value in vars(made).items():
        if "drop" in key and isinstance(value, float):
            setattr(made, key, 0.0)
    if hasattr(made, "initializer_range"):
        made.initializer_range = 0.1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model: nn.Module = kind(made)
    return model.to(dtype)


def rows_of(name: str, *, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A global batch: padded sequences with labels that do not count, or pictures, or sounds with words."""
    generator = torch.Generator().manual_seed(seed)

    def tokens() -> Tensor:
        return torch.randint(4, VOCABULARY, (ROWS, LENGTH), generator=generator)

    kept = torch.arange(LENGTH)[None] < torch.tensor(LENGTHS)[:, None]
    ids, labels = tokens().where(kept, 0), tokens().where(kept, IGNORED)
    if name == "vit":
        pictures = torch.randn(ROWS, 3, 16, 16, generator=generator, dtype=torch.float64).to(dtype)
        return {"pixel_values": pictures, "labels": torch.randint(0, 7, (ROWS,), generator=generator)}
    if name == "whisper":
        sounds = torch.randn(ROWS, 8, 40, generator=generator, dtype=torch.float64).to(dtype)
        return {"input_features": sounds, "labels": labels}
    if name not in ("t5", "bert"):
        labels = ids.where(kept, IGNORED)
        labels[:, :2] = IGNORED  # an instruction is not learned
    return {"input_ids": ids, "attention_mask": kept.long(), "labels": labels}
