"""Tiny decoders for the tests in this folder, and the same models from Hugging Face."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.models import Decoder, DecoderConfig

# eps and theta far from the defaults, so that ignoring one shows.
COMMON: dict[str, Any] = {"rms_norm_eps": 1e-2, "rope_theta": 500.0, "max_position_embeddings": 64}
SIZES: dict[str, dict[str, Any]] = {
    "every head its own key": {
        "vocab_size": 37,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "divides nothing": {
        "vocab_size": 101,
        "hidden_size": 12,
        "intermediate_size": 23,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "hidden 10, one key head": {
        "vocab_size": 101,
        "hidden_size": 10,
        "intermediate_size": 7,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    },
    "heads wider than hidden": {
        "vocab_size": 101,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 6,
    },
}


def small(sizes: str = "divides nothing", **changes: Any) -> DecoderConfig:
    return DecoderConfig(**{**COMMON, **SIZES[sizes], **changes})


def scrambled(config: DecoderConfig, seed: int = 0) -> Decoder:
    """A decoder in which every parameter, norms included, is random and far from zero, so that each one matters."""
    model = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def hugging_face(model: Decoder) -> Any:
    """Hugging Face's Llama of the same sizes with the same weights."""
    table = asdict(model.config)
    table["rope_parameters"] = {"rope_type": "default", "rope_theta": table.pop("rope_theta")}
    other: Any = LlamaForCausalLM(LlamaConfig(**table))
    other.to(next(model.parameters()).dtype)
    assert list(other.state_dict()) == list(model.state_dict())
    other.load_state_dict(model.state_dict())
    assert (other.lm_head.weight is other.model.embed_tokens.weight) == model.config.tie_word_embeddings
    return other


def ids_for(config: DecoderConfig, sequences: int = 3, tokens: int = 19, seed: int = 1) -> Tensor:
    return torch.randint(0, config.vocab_size, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


def off(found: Tensor, wanted: Tensor) -> float:
    """The distance of two tensors relative to the second."""
    return float((found - wanted).norm().detach() / wanted.norm().detach())
