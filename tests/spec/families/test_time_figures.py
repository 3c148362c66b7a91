"""What of a family takes time: products and attention, what all else moves, how many operations are started."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from meshwright.errors import UnsupportedCombination
from meshwright.spec import BlockSpec, DecoderShape, Layout, ModelSpec, describe
from meshwright.spec.families import read_config
from meshwright.spec.job import Stack
from meshwright.spec.model import Product
from tests.spec.families.tiny import FAMILIES
from tests.spec.families.tiny_experts import WITH_EXPERTS

TABLES = {**FAMILIES, **WITH_EXPERTS}
STACKS: tuple[Stack, ...] = ("eager", "compiled", "fused")
MOVED = ("element_bytes", "backward_element_bytes", "kernels", "backward_kernels")
S, H = 64, 48
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": H,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
GPT: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 101,
    "n_embd": H,
    "n_head": 8,
    "n_layer": 1,
    "n_positions": S,
    "activation_function": "gelu",
}


def described(table: dict[str, Any], **layout: Any) -> ModelSpec:
    return read_config(table).at(Layout(**{"sequence": S, "compute_dtype": "bfloat16", **layout}))


def layer(table: dict[str, Any], **layout: Any) -> BlockSpec:
    return described(table, **layout).layers[0]


@pytest.mark.parametrize("name", TABLES)
def test_products_and_attention_are_all_flops_under_every_layout(name: str) -> None:
    """And a stack that fuses more moves no more and starts no more operations."""
    for attention, tp, cp in product(("flash", "math"), (1, 2), (1, 2)):
        for sequence_parallel in (False, True):
            more: ModelSpec | None = None
            for stack in STACKS:
                options = {"sequence": 32, "tp": tp, "cp": cp, "sequence_parallel": sequence_parallel}
                try:
                    model = described(TABLES[name], stack=stack, attention=attention, **options)
                except UnsupportedCombination:
                    continue
                for index, block in enumerate(model.blocks):
                    work = [*block.products, *block.attention]
                    assert sum(one.flops for one in work) == block.forward_flops
                    assert sum(one.causal_flops for one in block.attention) <= block.causal_flops
                    least = 0 if block.kind == "head" else 1
                    assert min(getattr(block, figure) for figure in MOVED) >= least
                    if more is not None:
                        for figure in MOVED:
                            assert getattr(block, figure) <= getattr(more.blocks[index], figure), (block.name, figure)
                more = model


def test_products_of_a_layer() -> None:
    """Each rank's part of the outputs, or of the inner channels."""
    queries, keys = H, H // 8 * 2
    whole = [(H, queries), (H, keys), (H, keys), (queries, H), (H, 64), (H, 64), (64, H)]
    for stack in STACKS:
        assert [(p.inner, p.columns) for p in layer(LLAMA, stack=stack).products] == whole
    halves = [(H, queries // 2), (H, keys // 2), (H, keys // 2), (queries // 2, H), (H, 32), (H, 32), (32, H)]
    for options in ({"tp": 2}, {"tp": 2, "sequence_parallel": True}):
        assert [(p.inner, p.columns) for p in layer(LLAMA, **options).products] == halves
    assert all(p == Product(S, p.inner, p.columns) for p in layer(LLAMA).products)
    assert {p.rows for p in layer(LLAMA, cp=4).products} == {S // 4}


def test_attention_is_a_kernel_or_two_products_per_head() -> None:
    flops = 2 * S * S * 2 * H
    (kernel,) = layer(LLAMA).attention
    assert kernel == (flops, 5 * flops // 2, 2 * 2 * H * (S * (S - 1) // 2), H // 8)
    stored = layer(LLAMA, attention="math")
    assert stored.attention == ()
    scores, mixing = (p for p in stored.products if not p.weighted)
    assert scores == Product(8 * S, H // 8, S, 8, weighted=False)
    assert mixing == Product(8 * S, S, H // 8, 8, weighted=False)
    assert layer(LLAMA, attention="math", tp=2).products[3].groups == 4


@pytest.mark.parametrize(("name", "ep"), [("mixtral", 1), ("mixtral", 5), ("deepseek_v3", 3)])
def test_experts_are_grouped_products_over_routed_rows(name: str, ep: int) -> None:
    table = WITH_EXPERTS[name]
    block = described(table, sequence=32, ep=ep).layers[-1]
    count = table.get("num_local_experts", table.get("n_routed_experts"))
    width = table.get("moe_intermediate_size", table["intermediate_size"])
    rows, hidden = 32 * table["num_experts_per_tok"], table["hidden_size"]
    assert [p for p in block.products if p.experts] == [
        Product(rows, hidden, 2 * width, count // ep, experts=True),
        Product(rows, width, hidden, count // ep, experts=True),
    ]


def test_fused_passes_over_a_layer_by_hand() -> None:
    """Llama in bfloat16, in passes over the stream of S x H: two norms (2 each), two sums (3 each), of which one's
    result is not read again by the norm after it, rotation of queries and keys (2 each), and a gate (3 x its width)."""
    keys, gate = 2 / 8, 2 * S * 64
    fused = layer(LLAMA, stack="fused")
    stream = 2 * S * H
    small = 2 * (2 * H + 4 * S) + 4 * 2 * S * H // 8  # weights and statistics of norms; tables of rotation
    assert fused.element_bytes == (2 * 2 + 2 * 3 - 1 + 2 * (1 + keys)) * stream + 3 * gate + small
    # Norms read a gradient and their input and write; once more for each other gradient of their input (one) and of
    # what they made, which three and two products take; rotation reads and writes; a gate reads three and writes two.
    back = 2 * 3 + 2 + (2 + 1) + 2 * (1 + keys)
    tables = 2 * 2 * 2 * S * H // 8
    assert fused.backward_element_bytes == back * stream + 5 * gate + 2 * (2 * H + 4 * S) + tables


def test_neighbours_are_one_pass_where_they_fuse() -> None:
    """Dropout, sum and norm after attention: what is dropped is neither written nor read again, nor is the sum read."""
    with_dropout = layer(GPT, stack="fused")
    without = layer({**GPT, "resid_pdrop": 0.0}, stack="fused")
    assert with_dropout.kernels == without.kernels  # dropout belongs to the sum's pass
    masks = 2 * S * H
    assert with_dropout.element_bytes - without.element_bytes == masks


def test_a_fork_adds_gradients_by_an_operation_of_its_own_where_nothing_fuses() -> None:
    """A layer's stream forks twice, and its norms' outputs to three and two products."""
    eager, decoder = layer(LLAMA), describe(DecoderShape(), sequence=S, compute_dtype="bfloat16").layers[0]
    forks = 2 + (3 - 1) + (2 - 1)
    one_each = sum(2 for _ in eager.products) + len(eager.attention)
    assert eager.backward_kernels > decoder.backward_kernels > one_each + forks  # slices cost more than halves


@pytest.mark.parametrize("tp", [1, 4])
def test_the_loss_reads_this_ranks_part_of_the_logits(tp: int) -> None:
    """Over a part of the vocabulary the runtime takes its steps one by one: six passes forward, eight back, and three
    to put the gradient beside the padding."""
    logits = S * -(-101 // tp)
    forward, backward, padded = (2, 4, 0) if tp == 1 else (6, 8, 3)
    for stack, dtype, wanted in (
        ("eager", "float32", (forward * 4, backward * 4 + padded * 4)),
        ("eager", "bfloat16", (2 + 4 + forward * 4, backward * 4 + 4 + 2 + padded * 2)),
        ("compiled", "bfloat16", (2 * 2, 2 * 2)),
        ("fused", "bfloat16", (2 * 2, 2 * 2)),
    ):
        model = described(LLAMA, tp=tp, stack=stack, compute_dtype=dtype)
        assert (model.loss_element_bytes, model.backward_loss_element_bytes) == tuple(logits * n for n in wanted)
    bare = described({**LLAMA, "architectures": ["LlamaModel"]})
    assert (bare.loss_element_bytes, bare.backward_loss_element_bytes) == (0, 0)


def test_communication_moves_nothing_here() -> None:
    """Under sequence parallelism gathers and scatters are links' work: less is moved than without it, where the runtime
    sums the results of attention and MLP in a copy."""
    for stack in STACKS:
        plain, cut = (layer(LLAMA, tp=2, sequence_parallel=on, stack=stack) for on in (False, True))
        assert cut.element_bytes < plain.element_bytes
        assert plain.kernels - cut.kernels == (2 if stack == "eager" else 0)
