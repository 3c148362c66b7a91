"""The closed forms of `spec/decoder.py` against the operations that the real decoder executes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from meshwright.errors import ConfigError
from meshwright.models import Decoder, DecoderConfig, token_loss
from meshwright.runtime.recompute import _keep
from meshwright.spec import DecoderShape, ModelSpec, describe
from meshwright.spec.job import Dtype

ODD: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 12,
    "intermediate_size": 31,
    "num_hidden_layers": 5,
    "max_position_embeddings": 64,
}
SHAPES = [
    DecoderShape(**ODD, num_attention_heads=6, num_key_value_heads=2),
    DecoderShape(**ODD, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True),
    DecoderShape(**ODD, num_attention_heads=3, num_key_value_heads=3),
    DecoderShape(**ODD, num_attention_heads=4, num_key_value_heads=1, head_dim=8),
    DecoderShape(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4),
]
DTYPES: list[Dtype] = ["float32", "bfloat16", "float64"]
CASES = list(product(range(len(SHAPES)), DTYPES))


def build(shape: DecoderShape, dtype: str) -> Decoder:
    settings = asdict(shape)
    settings["head_dim"] = shape.head_dim or None
    torch.manual_seed(0)
    return Decoder(DecoderConfig(**settings)).to(getattr(torch, dtype))


def tokens(shape: DecoderShape, sequences: int, length: int) -> torch.Tensor:
    return torch.randint(0, shape.vocab_size, (sequences, length), generator=torch.Generator().manual_seed(1))


class Kept:
    """Unique storages that autograd keeps for backward, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._found: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._found[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._found.values())

    @contextmanager
    def watch(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor):
            yield


def counted_sequences(model: ModelSpec, policy: str, sequences: int) -> int:
    blocks = model.blocks
    return sequences * sum(b.saved_bytes[policy] for b in blocks) + sum(b.fixed_bytes for b in blocks)


@pytest.mark.parametrize(("index", "dtype"), CASES)
@pytest.mark.parametrize("sequences", [1, 3])
def test_saved_bytes_without_recompute_are_exact(index: int, dtype: Dtype, sequences: int) -> None:
    shape, length = SHAPES[index], 7
    model = build(shape, dtype)
    ids = tokens(shape, sequences, length)
    kept = Kept(model)
    with kept.watch():
        logits = model(ids)
    spec = describe(shape, sequence=length, compute_dtype=dtype)
    assert kept.bytes == counted_sequences(spec, "none", sequences)
    # The loss keeps log-probabilities, labels and one scalar.
    labels, of_loss = tokens(shape, sequences, length), Kept(model)
    with of_loss.watch():
        token_loss(logits, labels)
    scalar = 8 if dtype == "float64" else 4
    assert of_loss.bytes == sequences * spec.loss_bytes + scalar
    assert logits.nbytes == sequences * spec.blocks[-1].output_bytes


@pytest.mark.parametrize(("index", "dtype"), CASES)
def test_saved_bytes_of_full_recompute_are_the_inputs_of_blocks(index: int, dtype: Dtype) -> None:
    shape, sequences, length = SHAPES[index], 3, 7
    model = build(shape, dtype)
    kept = Kept(model)
    for layer in model.model.layers:
        layer.forward = _recomputed(layer.forward, kept)
    with kept.watch():
        model(tokens(shape, sequences, length))
    spec = describe(shape, sequence=length, compute_dtype=dtype)
    assert kept.bytes == counted_sequences(spec, "full", sequences)


@pytest.mark.parametrize(("index", "dtype"), CASES)
def test_saved_bytes_of_selective_recompute_are_products_and_attention(index: int, dtype: Dtype) -> None:
    shape, sequences, length = SHAPES[index], 3, 7
    model = build(shape, dtype)
    kept, caches = Kept(model), []

    def contexts() -> Any:
        made = create_selective_checkpoint_contexts(_keep)
        caches.append(made[0].storage)
        return made

    for layer in model.model.layers:
        layer.forward = _recomputed(layer.forward, kept, context_fn=contexts)
    with kept.watch():
        model(tokens(shape, sequences, length))
    assert len(caches) == shape.num_hidden_layers
    for cache in caches:
        for tensor in _cached_by_selective(cache):
            kept.add(tensor)
    spec = describe(shape, sequence=length, compute_dtype=dtype)
    assert kept.bytes == counted_sequences(spec, "selective", sequences)


def _cached_by_selective(cache: Any) -> Iterator[torch.Tensor]:
    """What the checkpoint's cache holds: operation -> call number -> wrapped tensors, or a mark that says recompute."""
    for calls in cache.values():
        for entry in calls.values():
            for leaf in tree_leaves(entry):
                if isinstance(getattr(leaf, "val", None), torch.Tensor):
                    yield leaf.val


def _recomputed(forward: Callable[..., Any], kept: Kept, **options: Any) -> Callable[..., Any]:
    """As the runtime recomputes a block; the inputs, which `checkpoint` keeps, are counted."""

    def run(*args: torch.Tensor | None) -> Any:
        for tensor in args:
            if tensor is not None:
                kept.add(tensor)
        return checkpoint(forward, *args, use_reentrant=False, **options)

    return run


@pytest.mark.parametrize(("index", "dtype"), CASES)
def test_alive_bytes_hold_what_is_kept_and_what_is_computed_again(index: int, dtype: Dtype) -> None:
    layer = describe(SHAPES[index], sequence=7, compute_dtype=dtype).layers[0]
    for policy in ("none", "selective", "full"):
        assert layer.alive_bytes[policy] >= max(layer.saved_bytes[policy], layer.saved_bytes["none"])
        assert layer.alive_bytes[policy] <= layer.saved_bytes[policy] + layer.saved_bytes["none"]
    assert layer.saved_bytes["full"] < layer.saved_bytes["selective"] < layer.saved_bytes["none"]


@pytest.mark.parametrize("index", range(len(SHAPES)))
@pytest.mark.parametrize("sequences", [1, 3])
def test_forward_flops_equal_torchs_own_count(index: int, sequences: int) -> None:
    shape, length = SHAPES[index], 7
    spec = describe(shape, sequence=length, compute_dtype="float32")
    # torch counts no flops of the CPU's fused attention; the unfused kernel does the same products.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        build(shape, "float32")(tokens(shape, sequences, length))
    assert counter.get_total_flops() == sequences * sum(block.forward_flops for block in spec.blocks)


class Moved(TorchDispatchMode):
    """Bytes of all tensors that operations read and write; views move nothing, a lookup reads only its rows."""

    VIEWS = ("view", "_unsafe_view", "t", "transpose", "split", "detach", "unsqueeze", "alias", "slice")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in self.VIEWS:
            read = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            if name == "embedding":
                read = [read[1], result]
            written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in [*read, *written])
        return result


@pytest.mark.parametrize(("index", "dtype"), CASES)
def test_moved_bytes_are_those_of_every_operation(index: int, dtype: Dtype) -> None:
    shape, length = SHAPES[index], 7
    model, ids = build(shape, dtype), tokens(shape, 1, length)
    with torch.no_grad(), Moved() as moved:
        model(ids)
    spec = describe(shape, sequence=length, compute_dtype=dtype)
    assert moved.bytes == sum(block.moved_bytes for block in spec.blocks)


@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_parameters_are_those_of_the_model(index: int) -> None:
    shape = SHAPES[index]
    model, spec = build(shape, "float32"), describe(shape, sequence=7, compute_dtype="float32")
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    for block, layer in zip(spec.layers, model.model.layers, strict=True):
        assert sorted(block.tensors) == sorted(tuple(parameter.shape) for parameter in layer.parameters())
    tied = spec.blocks[-1].tied_parameters
    assert tied == (model.lm_head.weight.numel() if shape.tie_word_embeddings else 0)


def test_defaults_are_those_of_the_model() -> None:
    shape, config = DecoderShape(), DecoderConfig()
    assert {f.name for f in fields(shape)} == {f.name for f in fields(config)}
    for name, value in asdict(config).items():
        assert getattr(shape, name) == (0 if name == "head_dim" else value), name
    assert shape.head_size == config.head_size
    spec = describe(shape, sequence=256, compute_dtype="float32")
    assert len(spec.layers) >= 4
    assert spec.parameters > 1_000_000


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 0},
        {"num_hidden_layers": -1},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 5, "num_key_value_heads": 1},
        {"num_attention_heads": 64, "num_key_value_heads": 2},
        {"head_dim": 7},
        {"head_dim": -2},
        {"rms_norm_eps": 0.0},
        {"rope_theta": float("inf")},
        {"initializer_range": 1.5},
    ],
)
def test_what_the_model_refuses_is_refused_here(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DecoderShape(**change)
    with pytest.raises(ValueError, match=r"\."):
        DecoderConfig(**change)


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="600 tokens"):
        describe(DecoderShape(), sequence=600, compute_dtype="float32")


def test_describing_a_model_needs_no_torch() -> None:
    code = (
        "import sys; from meshwright.spec import DecoderShape, describe;"
        "describe(DecoderShape(), sequence=8, compute_dtype='float32'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
