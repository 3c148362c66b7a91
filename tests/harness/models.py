"""Models and batches of the equivalence checks: sizes that divide nothing, unequal numbers of valid tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models import Decoder, DecoderConfig

__all__ = ["MODELS", "VALID_TOKENS", "VOCABULARY", "builder", "loss_of", "make_batch"]

#: Valid tokens of the microbatches of a global batch, in turn.
VALID_TOKENS = (11, 101, 7, 64)
VOCABULARY = 101
IGNORED = -100
#: Initial weights: far enough from zero that every gradient is felt, not so far that rounding grows with every layer.
SPREAD = 0.1

MODELS = (
    *("decoder", "decoder-10", "decoder-16", "llama", "gpt2", "gpt2-12", "gpt2-dropout"),
    *("mlp", "mlp-unused", "mlp-branches"),
)


def builder(name: str, *, tied: bool, layers: int = 5) -> Callable[[], nn.Module]:
    """A function that builds the model, its blocks being `layers` (or `h` in GPT-2)."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "decoder": lambda: Decoder(_decoder_config(12, layers, heads=6, key_value_heads=2, tied=tied)),
        "decoder-10": lambda: Decoder(_decoder_config(10, layers, heads=5, key_value_heads=1, tied=tied)),
        "decoder-16": lambda: Decoder(_decoder_config(16, layers, heads=8, key_value_heads=2, tied=tied)),
        "llama": lambda: _llama(tied, layers),
        "gpt2": lambda: _gpt2(tied, layers, dropout=0.0),
        "gpt2-12": lambda: _gpt2(tied, layers, dropout=0.0, heads=12),
        "gpt2-dropout": lambda: _gpt2(tied, layers, dropout=0.2),
        "mlp": lambda: MLP(layers, tied=tied),
        "mlp-unused": lambda: MLPWithUnused(),
        "mlp-branches": lambda: MLPWithBranches(),
    }
    return makers[name]


def make_batch(
    name: str, *, microbatches: int, microbatch: int, sequence: int, valid: str, seed: int, dtype: torch.dtype
) -> Any:
    """A global batch: `microbatches * microbatch` sequences of `sequence` tokens.

    With `valid="unequal"`, microbatch k has VALID_TOKENS[k % 4] labels that count, at random places; else all count.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (microbatches * microbatch, sequence)
    ids = torch.randint(0, VOCABULARY, shape, generator=generator)
    labels = torch.randint(0, VOCABULARY, shape, generator=generator)
    if valid == "unequal":
        for index, part in enumerate(labels.view(microbatches, -1)):
            dropped = torch.randperm(part.numel(), generator=generator)[VALID_TOKENS[index % 4] :]
            part[dropped] = IGNORED
    if name == "llama" or name.startswith("gpt2"):
        return {"input_ids": ids, "labels": labels}
    if name.startswith("mlp"):
        inputs = torch.randn(*shape, MLP.INPUTS, generator=generator, dtype=torch.float64)
        if name == "mlp-branches":
            # The first feature of a sequence says which branch it takes: the first half of the batch takes one.
            inputs[:, :, 0] = (torch.arange(shape[0]) >= shape[0] // 2).double()[:, None]
        return inputs.to(dtype), labels
    return ids, labels


def loss_of(name: str) -> Callable[[Any, Any], tuple[Tensor, Tensor]]:
    """The summed cross entropy over the labels that count, and their number."""
    return _hugging_face_loss if name == "llama" or name.startswith("gpt2") else _loss


def _loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def _hugging_face_loss(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return _loss(outputs.logits, batch["labels"])


def _decoder_config(hidden: int, layers: int, *, heads: int, key_value_heads: int, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=23,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=64,
        initializer_range=SPREAD,
        tie_word_embeddings=tied,
    )


def _llama(tied: bool, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            intermediate_size=23,
            num_hidden_layers=layers,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=SPREAD,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )
    return model


def _gpt2(tied: bool, layers: int, dropout: float, heads: int = 3) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=12,
            n_layer=layers,
            n_head=heads,
            n_inner=23,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            initializer_range=SPREAD,
            tie_word_embeddings=tied,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    return model


class MLP(nn.Module):
    """Residual layers between two projections, no attention. [B, S, 9] -> logits [B, S, 101].

    Tied: the last layer shares the first layer's weight, so that two blocks are one unit.
    """

    INPUTS = 9

    def __init__(self, layers: int = 5, *, tied: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(self.INPUTS, 13)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(layers))
        self.leave = nn.Linear(13, VOCABULARY, bias=False)
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.enter(inputs)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits: Tensor = self.leave(x)
        return logits


class MLPWithUnused(MLP):
    """One layer, and one projection outside the layers, take no part in the forward on any rank."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(13, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.enter(inputs)
        for index, layer in enumerate(self.layers):
            if index != 2:
                x = x + torch.tanh(layer(x))
        logits: Tensor = self.leave(x)
        return logits


class MLPWithBranches(MLP):
    """The data decides which of two projections is used: a microbatch of one kind never touches the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(13, 13)
        self.high = nn.Linear(13, 13)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.enter(inputs)
        high = inputs[:, 0, 0] > 0.5
        if bool(high.all()):
            x = x + torch.tanh(self.high(x))
        elif not bool(high.any()):
            x = x + torch.tanh(self.low(x))
        else:
            x = x + torch.tanh(torch.where(high[:, None, None], self.high(x), self.low(x)))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits: Tensor = self.leave(x)
        return logits
