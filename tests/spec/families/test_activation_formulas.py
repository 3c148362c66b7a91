"""Activation memory of a GPT layer against Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (arXiv 2205.05198): equations 1, 2 and 4 with table 2, for kernels that fuse (`stack="fused"`) in 16 bits.

Letters as there: s sequence, b sequences, h hidden, a heads, t tensor-parallel ranks, L layers, p pipeline stages, v
virtual stages. The paper leaves out what is kept per row: mean and deviation of two norms (float32), and the kernel's
logarithm of a sum per head; they are added here, so that the comparison is exact.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.spec import BlockSpec, Layout
from meshwright.spec.families import read_config
from meshwright.spec.layout import Attention

SIZES: dict[str, dict[str, Any]] = {
    "22B": {"b": 4, "h": 6144, "a": 64, "L": 48, "p": 1, "v": 1},
    "175B": {"b": 1, "h": 12288, "a": 96, "L": 96, "p": 8, "v": 3},
    "530B": {"b": 1, "h": 20480, "a": 128, "L": 105, "p": 35, "v": 3},
    "1T": {"b": 1, "h": 25600, "a": 160, "L": 128, "p": 64, "v": 1},
}
S, T = 2048, 8
#: Activations of the first stage in GiB: without recompute and sequence parallelism, and with both (recompute of the
#: scores alone, which is what a kernel without scores does by itself). The formulas of the paper give them, and
#: calculon (Isaev et al. 2023) ships them in its validation.
STAGE_GIB = {"22B": (59.25, 9.5625), "175B": (66.84, 12.35), "530B": (114.02, 23.08), "1T": (131.25, 26.56)}


def layer(name: str, *, tp: int = 1, sequence_parallel: bool = False, attention: Attention = "math") -> BlockSpec:
    size = SIZES[name]
    table = {
        "model_type": "gpt2",
        "vocab_size": 51200,
        "n_embd": size["h"],
        "n_head": size["a"],
        "n_layer": 1,
        "n_positions": S,
        "activation_function": "gelu",
    }
    layout = Layout(
        sequence=S,
        compute_dtype="bfloat16",
        tp=tp,
        sequence_parallel=sequence_parallel,
        stack="fused",
        attention=attention,
    )
    return read_config(table).at(layout).layers[0]


def statistics(rows: int, heads: float = 0) -> float:
    """Means and deviations of two norms, and one sum per row and head."""
    return 2 * 2 * 4 * rows + 4 * heads * S


@pytest.mark.parametrize("name", SIZES)
def test_one_rank(name: str) -> None:
    h, a = SIZES[name]["h"], SIZES[name]["a"]
    assert layer(name).saved_bytes["none"] == 34 * S * h + 5 * a * S * S + statistics(S)
    assert layer(name, attention="flash").saved_bytes["none"] == S * h * 34 + statistics(S, a)
    assert layer(name).saved_bytes["full"] == 2 * S * h


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("t", [2, 8])
def test_tensor_parallel(name: str, t: int) -> None:
    h, a = SIZES[name]["h"], SIZES[name]["a"]
    assert layer(name, tp=t).saved_bytes["none"] == 10 * S * h + (24 * S * h + 5 * a * S * S) / t + statistics(S)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("t", [2, 8])
def test_tensor_and_sequence_parallel(name: str, t: int) -> None:
    h, a = SIZES[name]["h"], SIZES[name]["a"]
    both = layer(name, tp=t, sequence_parallel=True)
    assert both.saved_bytes["none"] == (34 * S * h + 5 * a * S * S) / t + statistics(S // t)
    assert both.saved_bytes["full"] == 2 * S * h / t


@pytest.mark.parametrize("name", SIZES)
def test_first_stage_of_published_models(name: str) -> None:
    """Layers whose activations the first stage holds: L under 1F1B, L (1 + (p-1)/(pv)) where it is interleaved."""
    size = SIZES[name]
    p, v = size["p"], size["v"]
    in_flight = size["b"] * size["L"] * (1 + (p - 1) / (p * v) if v > 1 else 1)
    plain = layer(name, tp=T).saved_bytes["none"] - statistics(S)
    spared = layer(name, tp=T, sequence_parallel=True, attention="flash").saved_bytes["none"]
    spared -= statistics(S // T, size["a"] / T)
    wanted = STAGE_GIB[name]
    assert round(in_flight * plain / 2**30, 2) == round(wanted[0], 2)
    assert round(in_flight * spared / 2**30, 2) == round(wanted[1], 2)


def test_dropout_is_a_mask_of_one_byte() -> None:
    """Without dropout a layer keeps 2 sbh less for the masks, and 3 of the 5 as^2b of its scores less."""
    size = SIZES["22B"]
    table = {
        "model_type": "gpt2",
        "n_embd": size["h"],
        "n_head": size["a"],
        "n_layer": 1,
        "n_positions": S,
        "activation_function": "gelu",
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    layout = Layout(sequence=S, compute_dtype="bfloat16", stack="fused", attention="math")
    without = read_config(table).at(layout).layers[0].saved_bytes["none"]
    assert layer("22B").saved_bytes["none"] - without == 2 * S * size["h"] + 3 * size["a"] * S * S
