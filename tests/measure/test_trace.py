"""What a trace says of modules of many kinds, against a real run of each and against closed forms."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from meshwright.measure import describe_module, trace
from meshwright.models import Decoder, DecoderConfig, token_loss
from meshwright.runtime import MeanLoss
from meshwright.runtime.tensors import find_tensors
from meshwright.spec import DecoderShape, describe
from meshwright.spec.job import Dtype
from meshwright.spec.layout import Layout
from tests.measure.modules import MODULES, TOKENS, VOCABULARY, call, ids, kept_in_a_run

ODD: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 12,
    "intermediate_size": 31,
    "num_hidden_layers": 5,
    "max_position_embeddings": 64,
}
SHAPES = [
    DecoderShape(**ODD, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True),
    DecoderShape(**ODD, num_attention_heads=4, num_key_value_heads=1, head_dim=8),
]
#: What a trace and a closed form must agree on, exactly.
COUNTED = (
    "parameters",
    "tied_parameters",
    "forward_flops",
    "backward_flops",
    "moved_bytes",
    "saved_bytes",
    "fixed_bytes",
    "output_bytes",
    "backward_extra_bytes",
    "causal_flops",
    "waiting_bytes",
)


@pytest.mark.parametrize(("index", "dtype"), [(0, "float32"), (1, "bfloat16"), (0, "float64")])
def test_the_decoder_is_what_its_closed_forms_say(index: int, dtype: Dtype) -> None:
    shape = SHAPES[index]
    config = DecoderConfig(**{**asdict(shape), "head_dim": shape.head_dim or None})
    got = trace(lambda: Decoder(config), ids(1), loss=token_loss, targets=ids(1), compute_dtype=dtype)
    want = describe(shape, sequence=TOKENS, compute_dtype=dtype)
    assert got.layout == want.layout
    assert got.loss_bytes == want.loss_bytes
    assert [block.kind for block in got.blocks] == [block.kind for block in want.blocks]
    for mine, closed in zip(got.blocks, want.blocks, strict=True):
        for name in COUNTED:
            assert getattr(mine, name) == getattr(closed, name), (closed.name, name)
        assert sorted(mine.tensors) == sorted(closed.tensors)
    layer, closed = got.layers[0], want.layers[0]
    assert closed.weight_bytes <= layer.weight_bytes  # what does not grow with the sequences: rotary tables too
    assert got.layers[0].alive_bytes == want.layers[0].alive_bytes
    assert got.blocks[0].buffer_bytes == 4 * shape.head_size // 2  # the rotary embedding's frequencies


@pytest.mark.parametrize("name", MODULES)
def test_saved_bytes_are_those_of_a_run(name: str) -> None:
    build, inputs = MODULES[name]
    torch.manual_seed(0)
    model = build()
    spec = trace(model, inputs(2), kernels="cpu")
    saved = {
        policy: sum(block.saved_bytes[policy] for block in spec.blocks) for policy in ("none", "selective", "full")
    }
    fixed = sum(block.fixed_bytes for block in spec.blocks)
    for policy, per_sequence in saved.items():
        assert per_sequence + fixed == kept_in_a_run(build(), inputs(1), policy), policy
    assert 3 * saved["none"] + fixed == kept_in_a_run(build(), inputs(3), "none")


@pytest.mark.parametrize("name", ["decoder", "mlp-tied", "half-frozen", "convolutions", "encoder"])
def test_parameters_and_flops_are_those_of_a_run(name: str) -> None:
    build, inputs = MODULES[name]
    model = build()
    example = inputs(2)
    tokens = trace(model, example).layout.sequence
    spec = trace(model, example, layout=Layout(sequence=tokens, attention="math"), kernels="cpu")
    counted = build()
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            outputs = call(counted, example)
        ends = [tensor for tensor in find_tensors(outputs) if tensor.grad_fn is not None]
        with FlopCounterMode(display=False) as backward:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    assert 2 * sum(block.forward_flops for block in spec.blocks) == forward.get_total_flops()
    assert 2 * sum(block.backward_flops for block in spec.blocks) == backward.get_total_flops()
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sum(block.trained_parameters for block in spec.blocks) == trained


def test_a_trace_leaves_the_module_as_it_was() -> None:
    build, inputs = MODULES["llama"]
    model = build().eval()
    before = [*model.parameters(), *model.buffers()]
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    state = torch.random.get_rng_state()
    example = inputs(1)
    trace(model, {"input_ids": example["input_ids"]}, compute_dtype="bfloat16")
    assert all(now is was for now, was in zip([*model.parameters(), *model.buffers()], before, strict=True))
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    assert not model.training
    assert model.config.use_cache
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_mask_of_ones_is_none_for_transformers() -> None:
    model = MODULES["llama"][0]()
    some = torch.ones_like(ids(2))
    some[0, 3:] = 0
    without, ones, masked = (
        trace(model, {"input_ids": ids(2)} | mask)
        for mask in ({}, {"attention_mask": torch.ones_like(ids(2))}, {"attention_mask": some})
    )
    assert ones == without
    assert masked.layers[0].saved_bytes["none"] > without.layers[0].saved_bytes["none"]


def test_a_recurrent_layer_keeps_what_its_steps_keep() -> None:
    """On a CPU one kernel runs all steps and says nothing of its workspace; the steps are counted."""
    spec = trace(nn.LSTM(5, 6, batch_first=True), torch.zeros(2, TOKENS, 5))
    assert spec.parameters == 4 * 6 * (5 + 6 + 2)
    assert spec.layers[0].forward_flops == TOKENS * 2 * 4 * 6 * (5 + 6)
    assert spec.layers[0].saved_bytes["none"] >= 4 * TOKENS * (4 + 2) * 6  # four gates, the cell's state, the output


def test_alike_blocks_are_run_once_and_others_are_not() -> None:
    calls: list[int] = []

    class Layer(nn.Module):
        def __init__(self, layer_idx: int, steps: int) -> None:
            super().__init__()
            self.layer_idx, self.steps = layer_idx, steps
            self.inner = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(self.layer_idx)
            for _ in range(self.steps):
                x = x + self.inner(x)
            return x

    model = nn.Sequential(*(Layer(index, 3 if index == 5 else 1) for index in range(8)))
    spec = trace(model, torch.zeros(2, 5, 6))
    assert sorted(set(calls)) == [0, 1, 5]  # the first one's input has no gradient, so it differs from its like
    assert [block.forward_flops for block in spec.layers] == [360] * 5 + [3 * 360] + [360] * 2


def test_frozen_blocks_before_the_first_trained_one_keep_nothing() -> None:
    build, inputs = MODULES["half-frozen"]
    spec = trace(build(), inputs(2))
    layers = spec.layers
    assert [layer.backward_flops > 0 for layer in layers] == [False, False, True, True]
    assert [layer.saved_bytes["none"] > 0 for layer in layers] == [False, False, True, True]
    assert len(layers[0].frozen) == 5
    assert layers[3].frozen == ((23,),)
    assert spec.blocks[0].frozen == ((VOCABULARY, 12),)


def test_a_tied_weight_belongs_to_its_first_user() -> None:
    spec = trace(*_named("named-tied"))
    assert spec.blocks[-1].kind == "head"
    assert (spec.blocks[-1].parameters, spec.blocks[-1].tied_parameters) == (0, VOCABULARY * 12)
    tied = trace(*_named("mlp-tied"))
    assert [layer.tied_parameters for layer in tied.layers] == [0, 0, 0, 0, 13 * 13]


def _named(name: str) -> tuple[nn.Module, Any]:
    build, inputs = MODULES[name]
    return build(), inputs(2)


def test_an_accelerator_keeps_masks_of_a_byte_and_no_scores() -> None:
    model, example = _named("encoder")
    there, here = trace(model, example), trace(model, example, kernels="cpu")
    # Per layer: two masks of the stream, one inside the MLP; on a CPU in float32. Scores are never stored there; the
    # CPU's kernel knows no dropout, so it stores those of 3 heads, a mask, their product, and copies of q and k.
    masks, scores = TOKENS * (12 + 29 + 12), 3 * TOKENS * TOKENS
    difference = here.layers[0].saved_bytes["none"] - there.layers[0].saved_bytes["none"]
    assert difference > 3 * masks + 3 * 4 * scores
    assert there.layers[0].forward_flops == here.layers[0].forward_flops


@pytest.mark.parametrize("weigh", [False, True])
def test_the_loss_keeps_what_it_keeps_in_a_run(weigh: bool) -> None:
    def mean(outputs: Any, batch: Any) -> torch.Tensor:
        logits = outputs["logits"].flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["targets"].flatten())

    def summed(outputs: Any, batch: Any) -> Any:
        return mean(outputs, batch), batch["targets"].numel()

    loss = MeanLoss(mean, weight=lambda batch: batch["targets"].numel()) if weigh else summed
    spec = trace(MODULES["named-tied"][0](), ids(2), loss=loss, targets={"targets": ids(2)})
    assert spec.loss_bytes == TOKENS * (VOCABULARY * 4 + 8)


def test_a_described_module_is_traced_once_per_layout() -> None:
    model = describe_module(MODULES["mlp"][0](), MODULES["mlp"][1](2))
    wide, narrow = (Layout(sequence=TOKENS, compute_dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert model.at(wide) is model.at(wide)
    assert model.name == model.at(wide).name == "MLP"
    assert model.at(wide).layers[0].saved_bytes["none"] == 2 * model.at(narrow).layers[0].saved_bytes["none"]
