"""What a rank sees of a model under tensor, sequence and context parallelism."""

from __future__ import annotations

import math
from typing import Any

import pytest

from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.spec import BlockSpec, DecoderShape, Layout, describe
from meshwright.spec.families import FAMILIES as KNOWN
from meshwright.spec.families import read_config
from tests.spec.families.tiny import FAMILIES, WITH_KERNEL

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
S = 64


def layer(table: dict[str, Any] = LLAMA, **layout: Any) -> BlockSpec:
    return read_config(table).at(Layout(sequence=S, **layout)).layers[0]


def names(block: BlockSpec) -> set[tuple[str, str, int, int]]:
    return {(c.kind, c.dimension, c.forward, c.backward) for c in block.collectives}


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_heads_and_widths_are_divided(tp: int) -> None:
    """Two key/value heads: divided by 2, replicated beyond."""
    groups = max(1, 2 // tp)
    queries, keys, width = 48 // tp, groups * 6, 64 // tp
    wanted = [(48,), (queries, 48), (keys, 48), (keys, 48), (48, queries), (48,), (width, 48), (width, 48), (48, width)]
    assert list(layer(tp=tp).tensors) == wanted
    assert layer(tp=tp).parameters == sum(math.prod(shape) for shape in wanted)


def test_flops_are_divided_by_tp_and_cp() -> None:
    whole = layer()
    for tp, cp in ((2, 1), (1, 2), (2, 4), (1, 8)):
        part = layer(tp=tp, cp=cp)
        assert part.forward_flops * tp * cp == whole.forward_flops
        assert part.backward_flops * tp * cp == whole.backward_flops
        assert part.causal_flops * tp * cp == whole.causal_flops


def test_the_vocabulary_is_padded_and_its_logits_stay_divided() -> None:
    model = read_config(LLAMA).at(Layout(sequence=S, tp=4))
    first, last = model.blocks[0], model.blocks[-1]
    assert first.tensors == ((26, 48),)  # 101 padded to 104
    assert last.tensors == ((48,), (26, 48))
    assert last.output_bytes == S * 26 * 4
    # The runtime's loss keeps the logits themselves and two numbers of each row; other kernels their softmax.
    fused = read_config(LLAMA | {"intermediate_size": 64}).at(Layout(sequence=S, tp=4, stack="fused"))
    assert model.loss_bytes == S * (2 * 4 + 8)
    assert fused.loss_bytes == S * (26 * 4 + 8)
    assert ("all_reduce", "tp", 1, 0) in names(first)
    assert [(c.message_bytes, c.forward, c.backward) for c in last.collectives] == [
        (S * 48 * 4, 0, 1),
        (S * 4, 1, 0),
        (S * 2 * 4, 1, 0),
    ]
    assert {("all_reduce", "tp", 0, 1), ("all_reduce", "tp", 3, 0)} == names(fused.blocks[-1])
    tied = read_config({**LLAMA, "tie_word_embeddings": True}).at(Layout(sequence=S, tp=4)).blocks[-1]
    assert (tied.tied_parameters, tied.tensors) == (26 * 48, ((48,),))


def test_collectives_of_a_layer() -> None:
    """Shoeybi et al. (arXiv 1909.08053): two all-reduces forward, two backward. Korthikanti et al. (arXiv 2205.05198):
    under sequence parallelism all-gathers and reduce-scatters instead, and fused kernels gather again in backward."""
    assert names(layer()) == set()
    assert names(layer(tp=2)) == {("all_reduce", "tp", 2, 2)}
    both = {("all_gather", "tp", 2, 2), ("reduce_scatter", "tp", 2, 2)}
    assert names(layer(tp=2, sequence_parallel=True)) == both
    again = {("all_gather", "tp", 2, 4), ("reduce_scatter", "tp", 2, 2)}
    assert names(layer(tp=2, sequence_parallel=True, stack="fused")) == again
    for layout in ({"tp": 2}, {"tp": 2, "sequence_parallel": True}):
        assert {c.message_bytes for c in layer(**layout).collectives} == {S * 48 * 4}


def test_ring_attention_sends_keys_and_values() -> None:
    assert names(layer(cp=4)) == {("send", "cp", 3, 6)}
    (send,) = layer(cp=4).collectives
    assert send.message_bytes == 2 * (S // 4) * 2 * 6 * 4


def test_side_by_side_attention_and_mlp_share_what_they_gather() -> None:
    """Phi feeds one norm to both, so that the stream is entered once. The runtime enters it in each module."""
    table = WITH_KERNEL["phi"] | {"num_attention_heads": 4, "intermediate_size": 40}
    assert names(layer(table, tp=2, stack="fused")) == {("all_reduce", "tp", 2, 1)}
    assert names(layer(table, tp=2)) == {("all_reduce", "tp", 2, 2)}


def test_recompute_sends_again_what_it_comes_past() -> None:
    """The second forward ends behind the last tensor that is kept, before the last sum. Fused kernels run all of it."""
    (one,) = layer(tp=2).collectives
    assert (one.again("none"), one.again("selective"), one.again("full")) == (0, 1, 1)
    cut = {c.kind: (c.again("selective"), c.again("full")) for c in layer(tp=2, sequence_parallel=True).collectives}
    assert cut == {"all_gather": (2, 2), "reduce_scatter": (1, 1)}
    (one,) = layer(tp=2, stack="fused").collectives
    assert (one.again("selective"), one.again("full")) == (0, 2)


def test_sequences_are_cut_behind_the_embedding_and_joined_before_or_in_the_head() -> None:
    whole = S * 48 * 4
    for table, entering in (
        (LLAMA, ("all_gather", "reduce_scatter")),
        (FAMILIES["gpt2"], ("all_gather", "all_reduce")),
    ):
        model = read_config(table | {"n_head": 4} if table is not LLAMA else table).at(
            Layout(sequence=32, tp=2, sequence_parallel=True)
        )
        first, last = model.blocks[0], model.blocks[-1]
        assert [(c.kind, c.forward, c.backward) for c in first.collectives] == [
            ("all_reduce", 1, 0),
            ("all_gather", 0, 1),
        ]
        assert tuple(c.kind for c in last.collectives[:2]) == entering
        assert first.output_bytes * 2 == first.collectives[1].message_bytes
    fused = read_config(LLAMA).at(Layout(sequence=S, tp=2, sequence_parallel=True, stack="fused")).blocks[0]
    assert [(c.kind, c.message_bytes) for c in fused.collectives] == [("reduce_scatter", whole), ("all_gather", whole)]


def test_gradients_that_are_shares() -> None:
    """Of copied key/value heads, of each of them once; of norms and biases where every rank has its own tokens."""
    assert layer(tp=2).shares == ()
    assert layer(tp=4).shares == ((6, 48),) * 4  # two heads each of keys and of values
    assert layer(tp=2, sequence_parallel=True).shares == ((48,), (48,))
    picked = layer(LLAMA | {"num_attention_heads": 6, "head_dim": 8}, tp=3)
    assert picked.shares == ((16, 48),) * 2
    assert picked.tensors[1:5] == ((16, 48), (16, 48), (16, 48), (48, 16))
    qwen = layer(LLAMA | {"model_type": "qwen3", "head_dim": 6}, tp=2)
    assert qwen.shares == ((6,), (6,))
    assert layer(tp=4, stack="fused").shares == ()


@pytest.mark.parametrize("stack", ["eager", "compiled", "fused"])
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_more_ranks_never_keep_more(stack: str, policy: str) -> None:
    for table in FAMILIES.values():
        if table["model_type"] not in ("llama", "mistral", "qwen2", "qwen3", "phi3"):
            continue
        table = table | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "intermediate_size": 40}
        kept = [layer(table, tp=tp, stack=stack).saved_bytes[policy] for tp in (1, 2, 4)]
        spread = [layer(table, tp=tp, stack=stack, sequence_parallel=tp > 1).saved_bytes[policy] for tp in (1, 2, 4)]
        cut = [layer(table, cp=cp, stack=stack).saved_bytes[policy] for cp in (1, 2, 4)]
        for series in (kept, spread, cut):
            assert series == sorted(series, reverse=True)
        assert spread[1] <= kept[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_kernels_and_kernels_without_scores_keep_less(name: str) -> None:
    table = FAMILIES[name]
    plain, fused = layer(table), layer(table, stack="fused")
    assert fused.saved_bytes["none"] <= plain.saved_bytes["none"]
    assert fused.moved_bytes <= plain.moved_bytes
    assert (plain.forward_flops, plain.tensors) == (fused.forward_flops, fused.tensors)
    for stack, kernel in (("eager", plain), ("fused", fused)):
        scores = layer(table, stack=stack, attention="math")
        assert kernel.saved_bytes["none"] <= scores.saved_bytes["none"]
        assert kernel.moved_bytes <= scores.moved_bytes
        assert kernel.forward_flops == scores.forward_flops
    assert fused.saved_bytes["none"] < scores.saved_bytes["none"]


def test_alive_bytes_lie_between_what_is_kept_and_everything() -> None:
    for table in FAMILIES.values():
        block = layer(table)
        for policy in ("none", "selective", "full"):
            low = max(block.saved_bytes[policy], block.saved_bytes["none"])
            assert low <= block.alive_bytes[policy] <= block.saved_bytes[policy] + block.saved_bytes["none"]
        assert block.saved_bytes["full"] < block.saved_bytes["selective"]


@pytest.mark.parametrize("tp", [3, 16])
def test_an_impossible_tp_names_the_possible(tp: int) -> None:
    with pytest.raises(UnsupportedCombination, match=f"tp={tp}") as caught:
        layer(tp=tp, stack="fused")
    assert caught.value.fix == "set tp to one of 1, 2, 4, 8"


def test_an_mlp_that_cannot_be_divided() -> None:
    """The runtime's parts may differ; those of other kernels are equal."""
    uneven = {**LLAMA, "intermediate_size": 66}
    with pytest.raises(UnsupportedCombination, match="tp=4") as caught:
        layer(uneven, tp=4, stack="fused")
    assert "intermediate_size 66" in caught.value.why
    assert caught.value.fix == "set tp to one of 1, 2"
    assert layer(uneven, tp=4).tensors[-2:] == ((17, 48), (48, 17))


def test_fused_projections_divide_key_value_heads_too() -> None:
    table = FAMILIES["phi3"] | {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
    with pytest.raises(UnsupportedCombination, match="tp=3") as caught:
        layer(table, tp=3)
    assert caught.value.fix == "set tp to one of 1, 2"


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_families_without_a_plan_are_not_divided(name: str) -> None:
    with pytest.raises(UnsupportedCombination, match="tp=2"):
        layer(FAMILIES[name], tp=2)
    with pytest.raises(UnsupportedCombination, match="sequence parallelism"):
        layer(FAMILIES["opt"] | {"num_attention_heads": 4}, tp=2, sequence_parallel=True)


def test_expert_parallelism_needs_experts() -> None:
    with pytest.raises(UnsupportedCombination, match="no experts"):
        layer(ep=2)


@pytest.mark.parametrize("name", ["gpt2", "opt", "mpt"])
def test_sequences_beyond_learned_positions(name: str) -> None:
    model = read_config(FAMILIES[name])
    with pytest.raises(ConfigError, match="100 tokens"):
        model.at(Layout(sequence=100))


def test_the_built_in_decoder_takes_a_layout() -> None:
    shape = DecoderShape()
    whole = describe(shape, sequence=S, compute_dtype="bfloat16")
    part = describe(shape, sequence=S, compute_dtype="bfloat16", layout=Layout(sequence=S, tp=2))
    assert part.layers[0].forward_flops * 2 == whole.layers[0].forward_flops
    assert part.layout.tp == 2


def test_every_family_is_described_under_every_layout() -> None:
    """Nothing in a family forgets a stack, an attention or a degree: all figures stay counts."""
    for table in FAMILIES.values():
        model = read_config(table)
        for stack in ("eager", "compiled", "fused"):
            for attention in ("flash", "math"):
                spec = model.at(Layout(sequence=32, cp=2, stack=stack, attention=attention))
                assert spec.parameters > 0
                assert min(block.moved_bytes for block in spec.blocks) > 0
    assert len(KNOWN) >= 14
