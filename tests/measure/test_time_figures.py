"""What takes time, two ways: a tape, and the trace of the class that it describes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.measure import trace
from meshwright.models import Decoder, DecoderConfig, token_loss
from meshwright.spec import BlockSpec, DecoderShape, ModelSpec, describe
from meshwright.spec.families import read_config
from meshwright.spec.job import Dtype
from meshwright.spec.layout import Attention, Layout
from meshwright.spec.model import Product
from tests.measure.modules import MODULES
from tests.spec.families.measured import build
from tests.spec.families.tiny import WITH_KERNEL, WITHOUT_KERNEL
from tests.spec.families.tiny_experts import WITH_EXPERTS

TOKENS = 16
#: Wide enough that routers, whose masks and counts of rows a tape leaves out, weigh as little as in real models.
_WIDE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 256}
_LATENT: dict[str, Any] = {
    **_WIDE,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "kv_lora_rank": 64,
    "moe_intermediate_size": 64,
}
TABLES = {
    **{name: WITH_KERNEL[name] for name in ("llama", "gpt2", "phi3", "gpt_neox")},
    "bloom": WITHOUT_KERNEL["bloom"],
    "mixtral": {**WITH_EXPERTS["mixtral"], **_WIDE},
    "deepseek_v3": {**WITH_EXPERTS["deepseek_v3"], **_LATENT},
}
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
CASES: list[tuple[str, Dtype, Attention]] = [(name, DTYPES[i % 2], "flash") for i, name in enumerate(TABLES)]
CASES += [("llama", "bfloat16", "math"), ("gpt2", "float32", "math")]


@pytest.mark.parametrize(("name", "dtype", "attention"), CASES)
def test_a_familys_layers_and_the_trace_of_its_class_agree(name: str, dtype: Dtype, attention: Attention) -> None:
    layout = Layout(sequence=TOKENS, compute_dtype=dtype, attention=attention)
    stored = attention == "math" or name in WITHOUT_KERNEL
    model = build(TABLES[name], attention="eager" if stored else "sdpa")
    traced = trace(model, {"input_ids": torch.ones(2, TOKENS, dtype=torch.int64)}, layout=layout)
    taped = read_config(TABLES[name]).at(layout)
    for mine, other in zip(traced.blocks, taped.blocks, strict=True):
        assert Counter(mine.products) == Counter(other.products), other.name
        assert mine.attention == other.attention
        if other.kind == "layer":
            assert mine.element_bytes == pytest.approx(other.element_bytes, rel=0.05)
            assert mine.backward_element_bytes == pytest.approx(other.backward_element_bytes, rel=0.15)
    if name in ("llama", "gpt2", "mixtral"):
        for mine, other in zip(traced.layers, taped.layers, strict=True):
            assert mine.backward_element_bytes == pytest.approx(other.backward_element_bytes, rel=0.03)
    assert _moved(traced) == pytest.approx(_moved(taped), rel=0.15)  # a tied matrix's gradient, wherever it is added


def _moved(model: ModelSpec) -> int:
    return sum(block.backward_element_bytes for block in model.blocks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_decoder_is_traced_to_the_byte(dtype: Dtype) -> None:
    shape = DecoderShape(
        vocab_size=101, hidden_size=12, intermediate_size=31, num_hidden_layers=2, max_position_embeddings=64
    )
    config = DecoderConfig(**{**asdict(shape), "head_dim": None})
    ids = torch.ones(1, TOKENS, dtype=torch.int64)
    traced = trace(lambda: Decoder(config), ids, loss=token_loss, targets=ids, compute_dtype=dtype)
    taped = describe(shape, sequence=TOKENS, compute_dtype=dtype)
    for mine, other in zip(traced.blocks, taped.blocks, strict=True):
        for figure in ("products", "attention", "element_bytes", "backward_element_bytes", "kernels"):
            assert getattr(mine, figure) == getattr(other, figure), (other.name, figure)
        assert mine.backward_kernels == other.backward_kernels
    # Labels, and a mask of those that do not count.
    assert traced.loss_element_bytes == pytest.approx(taped.loss_element_bytes, rel=0.03)
    assert traced.backward_loss_element_bytes == pytest.approx(taped.backward_loss_element_bytes, rel=0.03)


@pytest.mark.parametrize("name", ["mlp-tied", "half-frozen", "convolutions", "encoder"])
def test_products_of_any_module_are_all_its_flops(name: str) -> None:
    make, inputs = MODULES[name]
    spec = trace(make(), inputs(2))
    for block in spec.blocks:
        assert sum(one.flops for one in (*block.products, *block.attention)) == block.forward_flops
        assert block.kernels >= len(block.products) + len(block.attention)
    assert sum(block.element_bytes + block.backward_element_bytes for block in spec.blocks) > 0


class Odd(nn.Module):
    """A weight on the left, a product of two activations, and convolutions: strided, grouped, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.ones(5, 8))
        self.strided = nn.Conv1d(5, 6, 3, stride=2, padding=1)
        self.grouped = nn.Conv1d(6, 4, 3, padding=1, groups=2)
        self.back = nn.ConvTranspose1d(4, 8, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (self.left @ x.transpose(0, 1).flatten(1)).unflatten(1, (x.shape[0], -1)).transpose(0, 1)
        out = self.back(self.grouped(self.strided(mixed)))
        return out @ out.transpose(1, 2)


def test_products_by_hand() -> None:
    block = _only(trace(Odd(), torch.ones(1, 8, 10), compute_dtype="float32"))
    assert block.products == (
        Product(10, 8, 5),
        Product(5, 5 * 3, 6),
        Product(2 * 5, 3 * 3, 2, 2),
        Product(5, 4, 8 * 2),
        Product(8, 10, 8, 1, weighted=False),
    )
    assert block.backward_kernels > 2 * len(block.products)


class OneByOne(nn.Module):
    """A product for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.linear(row) for row in x])


def test_products_that_grow_in_number_are_shared_out() -> None:
    block = _only(trace(OneByOne(), torch.ones(1, 10, 8), compute_dtype="float32"))
    assert block.products == (Product(5, 8, 3), Product(5, 8, 3))
    assert sum(one.flops for one in block.products) == block.forward_flops == 2 * 10 * 8 * 3


def _only(spec: ModelSpec) -> BlockSpec:
    (block,) = spec.blocks
    return block
