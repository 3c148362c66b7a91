"""Every family against the Hugging Face class of the same `config.json`, built and run."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import nn

from meshwright.spec import Layout, ModelSpec
from meshwright.spec.families import FAMILIES as KNOWN
from meshwright.spec.families import read_config
from meshwright.spec.job import Dtype
from tests.spec.families.measured import Table, build, flops, kept_bytes, layers_of, tokens
from tests.spec.families.tiny import FAMILIES, WITH_KERNEL

LENGTH, SEQUENCES = 32, 2
#: Classes of WITH_KERNEL whose eager attention is held against attention=math.
SCORES: dict[str, Table] = {
    **{name: WITH_KERNEL[name] for name in ("llama", "qwen3", "phi3", "gemma3", "gpt_neox", "opt")},
    "gpt2": {**WITH_KERNEL["gpt2"], "attn_pdrop": 0.1},
}
#: Windows shorter than the sequence: the kernel is handed a mask of all pairs.
WINDOWS: dict[str, Table] = {
    name: {**WITH_KERNEL[name], "sliding_window": 9} for name in ("mistral", "gemma3", "phi3")
} | {"qwen2": {**WITH_KERNEL["qwen2"], "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}}
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
#: One of each model_type.
ONE_EACH = [*{table["model_type"]: name for name, table in reversed(FAMILIES.items())}.values()]


def implementation(name: str) -> str:
    return "sdpa" if name in WITH_KERNEL else "eager"


def described(table: Table, dtype: Dtype = "float32", *, math: bool = False) -> ModelSpec:
    attention = "math" if math else "flash"
    return read_config(table).at(Layout(sequence=LENGTH, compute_dtype=dtype, attention=attention))


def counted(model: ModelSpec, policy: str) -> int:
    return SEQUENCES * sum(b.saved_bytes[policy] for b in model.blocks) + sum(b.fixed_bytes for b in model.blocks)


def shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return sorted(tuple(parameter.shape) for parameter in module.parameters())


def test_every_dense_family_has_a_tiny_model() -> None:
    dense = {"bloom", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "mpt", "opt", "phi"}
    dense |= {"phi3", "qwen2", "qwen3"}
    assert dense <= {table["model_type"] for table in FAMILIES.values()}
    assert dense <= set(KNOWN)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_the_class(name: str) -> None:
    model, spec = build(FAMILIES[name], attention="eager", meta=True), described(FAMILIES[name])
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    for block, layer in zip(spec.layers, layers_of(model), strict=True):
        assert sorted(block.tensors) == shapes(layer)
    held = [shape for block in spec.blocks for shape in block.tensors]
    assert sorted(held) == shapes(model)


@pytest.mark.parametrize("ending", ["ForSequenceClassification", "Model"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "phi"])
def test_classes_without_a_vocabulary_on_top(name: str, ending: str) -> None:
    prefix = KNOWN[FAMILIES[name]["model_type"]][0]
    table = {**FAMILIES[name], "architectures": [prefix + ending], "pad_token_id": 0}
    if ending == "ForSequenceClassification":
        table["id2label"] = {"0": "good", "1": "bad", "2": "neither"}
    model, spec = build(table, meta=True), described(table)
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert spec.loss_bytes == 0
    width = 3 if ending == "ForSequenceClassification" else model.config.hidden_size
    assert spec.blocks[-1].output_bytes == LENGTH * width * 4


@pytest.mark.parametrize("name", FAMILIES)
def test_flops_equal_torchs_own_count(name: str) -> None:
    model = build(FAMILIES[name], attention=implementation(name)).eval()
    forward, backward = flops(model, tokens(FAMILIES[name], SEQUENCES, LENGTH))
    kernel, plain = described(FAMILIES[name]), described(FAMILIES[name], math=True)
    assert SEQUENCES * sum(block.forward_flops for block in kernel.blocks) == forward
    assert SEQUENCES * sum(block.forward_flops for block in plain.blocks) == forward
    assert SEQUENCES * sum(block.backward_flops for block in plain.blocks) == backward


@pytest.mark.parametrize(("name", "dtype"), list(product(FAMILIES, DTYPES)))
def test_saved_bytes_without_recompute(name: str, dtype: Dtype) -> None:
    table = FAMILIES[name]
    model = build(table, attention=implementation(name), dtype=dtype)
    real = kept_bytes(model, tokens(table, SEQUENCES, LENGTH), policy="none", layers=layers_of(model))
    assert counted(described(table, dtype), "none") == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("name", ONE_EACH)
def test_saved_bytes_under_recompute(name: str, policy: str) -> None:
    table = FAMILIES[name]
    model = build(table, attention=implementation(name))
    real = kept_bytes(model, tokens(table, SEQUENCES, LENGTH), policy=policy, layers=layers_of(model))
    assert counted(described(table), policy) == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize(("name", "dtype"), list(product(SCORES, DTYPES)))
def test_saved_bytes_where_scores_are_stored(name: str, dtype: Dtype) -> None:
    table = SCORES[name]
    model = build(table, attention="eager", dtype=dtype)
    real = kept_bytes(model, tokens(table, SEQUENCES, LENGTH), policy="none", layers=layers_of(model))
    assert counted(described(table, dtype, math=True), "none") == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("name", WINDOWS)
def test_saved_bytes_under_a_sliding_window(name: str) -> None:
    table = WINDOWS[name]
    model = build(table)
    real = kept_bytes(model, tokens(table, SEQUENCES, LENGTH), policy="none", layers=layers_of(model))
    assert counted(described(table), "none") == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("name", ["llama", "llama-wide-heads", "qwen2", "mistral"])
def test_saved_bytes_of_llamas_are_exact(name: str) -> None:
    """A stricter check where nothing is left out: the 5% above are room for row statistics only."""
    table = FAMILIES[name]
    model = build(table)
    real = kept_bytes(model, tokens(table, SEQUENCES, LENGTH), policy="none", layers=layers_of(model))
    assert counted(described(table), "none") == real


@pytest.mark.parametrize("window", [0, 1, 9, LENGTH, 100])
def test_causal_flops_are_those_of_masked_pairs(window: int) -> None:
    table = {**WITH_KERNEL["mistral"], "sliding_window": window or None}
    layer = described(table).layers[0]
    seen = torch.ones(LENGTH, LENGTH).tril().triu(1 - window if window else -LENGTH).sum().item()
    channels = table["hidden_size"]
    assert layer.causal_flops == 2 * 2 * channels * (LENGTH * LENGTH - int(seen))
    assert layer.forward_flops == described(WITH_KERNEL["mistral"]).layers[0].forward_flops


def test_parameters_read_are_the_weights() -> None:
    for table in FAMILIES.values():
        for block in described(table).layers:
            assert block.weight_bytes == 4 * sum(math.prod(shape) for shape in block.tensors)
            assert block.weight_bytes < block.moved_bytes
