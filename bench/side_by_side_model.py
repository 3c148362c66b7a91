"""What contenders share: a seeded decoder, its batches, fused AdamW and the mean loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["ADAMW", "SEQUENCE", "SIZES", "Batch", "Step", "adamw", "logits_of", "make_batch", "make_model", "mean_loss"]

SEQUENCE = 128
VOCABULARY = 8192
#: 27 million parameters.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": SEQUENCE,
    "tie_word_embeddings": False,
}
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
Batch = tuple[torch.Tensor, torch.Tensor]
#: A step: the loss of a batch, where this rank has one.
Step = Callable[[Batch], torch.Tensor | float | None]


def make_batch(number: int, rows: int) -> Batch:
    """The inputs and labels of a step, [rows, SEQUENCE] each."""
    tokens = torch.randint(VOCABULARY, (rows, SEQUENCE + 1), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_model(kind: str, **changed: int) -> Any:
    """`decoder`: Meshwright's built-in one; `llama`: Hugging Face's. The same shape.

    Args:
        changed: of `SIZES`.
    """
    torch.manual_seed(0)
    if kind == "decoder":
        from meshwright.models import Decoder, DecoderConfig

        return Decoder(DecoderConfig(**SIZES | changed))
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES | changed, use_cache=False)).train()


def logits_of(outputs: Any) -> Any:
    """Of a model that returns them alone, or among others."""
    return getattr(outputs, "logits", outputs)


def mean_loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all tokens."""
    return F.cross_entropy(logits_of(outputs).flatten(0, 1), labels.flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The same for everybody."""
    return torch.optim.AdamW(parameters, fused=True, **ADAMW)
