"""Modules of many kinds, each with the inputs it is called with, and what a real run of them keeps and computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from meshwright.models import Decoder, DecoderConfig
from meshwright.runtime.recompute import _keep
from meshwright.runtime.tensors import find_tensors, map_values
from meshwright.runtime.units import find_blocks
from tests.harness.models import MLP

WIDTH, VOCABULARY, TOKENS = 12, 101, 7
_SIZES: Any = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 31, "num_hidden_layers": 3}


class Layer(nn.Module):
    """A residual layer that notes its own place and is called with keyword arguments only."""

    def __init__(self, layer_idx: int, hidden: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, *, hidden: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"hidden": hidden + scale * self.down(F.gelu(self.up(self.norm(hidden)))), "scale": scale}


class Named(nn.Module):
    """Returns a mapping; its layers are called by keyword, answer with mappings, and share a table of positions."""

    def __init__(self, *, tied: bool = True, odd: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(index, 31 if odd and index == 2 else 23) for index in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x, table = self.embed(ids), torch.arange(ids.shape[1], dtype=torch.float32)[:, None].sin() * scale
        for layer in self.layers:
            x = layer(hidden=x, scale=table)["hidden"]
        return {"logits": self.head(x), "hidden": x}


@dataclass
class Result:
    logits: Tensor
    extra: dict[str, Any]


class Wrapped(nn.Module):
    """Returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()

    def forward(self, inputs: Tensor) -> Result:
        return Result(self.inner(inputs), {"rows": inputs.shape[0]})


def half_frozen() -> nn.Module:
    """The embedding and the first two layers get no gradient."""
    model = Named(tied=False)
    for part in (model.embed, *model.layers[:2]):
        part.requires_grad_(False)
    model.layers[3].up.bias.requires_grad_(False)
    return model


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 3, 29, dropout=0.1, activation=F.gelu, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def convolutions() -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(1, b), nn.ReLU()) for a, b in ((3, 5), (5, 5))]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(5 * 8 * 9, 11))


def decoder() -> nn.Module:
    return Decoder(DecoderConfig(**_SIZES, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(**_SIZES, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64)
    )
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 3, "n_head": 3, "n_inner": 23, "n_positions": 64}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None))
    return model


def ids(sequences: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (sequences, TOKENS), generator=torch.Generator().manual_seed(1))


def features(sequences: int) -> Tensor:
    return torch.randn(sequences, TOKENS, MLP.INPUTS)


#: By name: a function that builds the module, and one that makes its inputs for a number of sequences.
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "decoder": (decoder, ids),
    "llama": (llama, lambda n: {"input_ids": ids(n), "use_cache": False}),
    "gpt2": (gpt2, lambda n: {"input_ids": ids(n), "use_cache": False}),
    "mlp": (MLP, features),
    "mlp-tied": (lambda: MLP(tied=True), lambda n: (features(n),)),
    "named-tied": (Named, lambda n: {"ids": ids(n), "scale": 0.5}),
    "named-odd": (lambda: Named(tied=False, odd=True), ids),
    "half-frozen": (half_frozen, ids),
    "dataclass": (Wrapped, features),
    "encoder": (encoder, lambda n: torch.randn(n, TOKENS, WIDTH)),
    "convolutions": (convolutions, lambda n: torch.randn(n, 3, 8, 9)),
    "one-linear": (lambda: nn.Linear(5, 3), lambda n: torch.randn(n, 5)),
}


class Kept:
    """Unique storages that autograd keeps for backward, parameters and buffers left out."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self._found: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._found[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._found.values())

    @contextmanager
    def watch(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor):
            yield


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def kept_in_a_run(model: nn.Module, inputs: Any, policy: str) -> int:
    """Bytes that a real forward keeps, its blocks recomputing as the runtime has them do it."""
    kept, caches = Kept(model), []

    def contexts() -> Any:
        made = create_selective_checkpoint_contexts(_keep)
        caches.append(made[0].storage)
        return made

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        options: dict[str, Any] = {"context_fn": contexts} if policy == "selective" else {}

        def run(*args: Any, **kwargs: Any) -> Any:
            made = checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)
            if any(tensor.requires_grad for tensor in find_tensors(made)):
                for tensor in find_tensors((args, kwargs)):
                    kept.add(tensor)
            elif policy == "selective":
                caches.pop()  # nothing refers to it after a forward without gradient
            return made

        return run

    if policy != "none":
        for _, block in find_blocks(model):
            block.forward = recomputed(block.forward)
    with kept.watch():
        call(model, map_values(lambda tensor: tensor, inputs))
    for cache in caches:
        for calls in cache.values():
            for leaf in tree_leaves(list(calls.values())):
                if isinstance(getattr(leaf, "val", None), Tensor):
                    kept.add(leaf.val)
    return kept.bytes
