"""Families with experts and with latent attention, against the Hugging Face class of the same `config.json`."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from torch import nn

from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.spec import BlockSpec, Layout, ModelSpec
from meshwright.spec.families import read_config
from meshwright.spec.job import Dtype
from tests.spec.families.measured import build, flops, kept_bytes, layers_of, tokens
from tests.spec.families.tiny_experts import WITH_EXPERTS

LENGTH, SEQUENCES = 32, 2
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
MIXTRAL, LATENT = WITH_EXPERTS["mixtral"], WITH_EXPERTS["deepseek_v3"]


def described(name: str, **layout: Any) -> ModelSpec:
    return read_config(WITH_EXPERTS[name]).at(Layout(**{"sequence": LENGTH, "compute_dtype": "float32", **layout}))


def counted(model: ModelSpec, policy: str) -> int:
    return SEQUENCES * sum(b.saved_bytes[policy] for b in model.blocks) + sum(b.fixed_bytes for b in model.blocks)


def measured(name: str, *, attention: str = "sdpa", dtype: str = "float32", policy: str = "none") -> int:
    table = WITH_EXPERTS[name]
    model = build(table, attention=attention, dtype=dtype)
    return kept_bytes(model, tokens(table, SEQUENCES, LENGTH), policy=policy, layers=layers_of(model))


def shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return sorted(tuple(parameter.shape) for parameter in module.parameters())


def elements(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(math.prod(shape) for shape in shapes)


# --- against the class ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_parameters_are_those_of_the_class(name: str) -> None:
    model, spec = build(WITH_EXPERTS[name], meta=True), described(name)
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    for block, layer in zip(spec.layers, layers_of(model), strict=True):
        assert sorted(block.tensors) == shapes(layer)
        experts = [module for module in layer.modules() if type(module).__name__.endswith("Experts")]
        assert sorted(block.experts) == [shape for module in experts for shape in shapes(module)]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_buffers_are_those_of_the_class(name: str) -> None:
    """Each family holds the rotary frequencies once; the class keeps a second copy of them, as yarn needs."""
    model, spec = build(WITH_EXPERTS[name], meta=True), described(name)
    names = {key: buffer for key, buffer in model.named_buffers() if "original_inv_freq" not in key}
    assert sum(block.buffer_bytes for block in spec.blocks) == sum(buffer.nbytes for buffer in names.values())


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_flops_equal_torchs_own_count(name: str) -> None:
    """torch does not count grouped products, so the class runs its experts one by one here."""
    model = build(WITH_EXPERTS[name], attention="eager").eval()
    model.set_experts_implementation("eager")  # type: ignore[operator]  # a method of transformers' models
    forward, backward = flops(model, tokens(WITH_EXPERTS[name], SEQUENCES, LENGTH))
    spec = described(name, attention="math")
    assert SEQUENCES * sum(block.forward_flops for block in spec.blocks) == forward
    assert SEQUENCES * sum(block.backward_flops for block in spec.blocks) == backward
    assert sum(block.forward_flops for block in described(name).blocks) * SEQUENCES == forward


@pytest.mark.parametrize(("name", "dtype"), list(product(WITH_EXPERTS, DTYPES)))
def test_saved_bytes_without_recompute(name: str, dtype: Dtype) -> None:
    assert counted(described(name, compute_dtype=dtype), "none") == pytest.approx(measured(name, dtype=dtype), rel=0.05)


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe-some", "qwen3_moe-some", "deepseek_v2", "deepseek_v3"])
def test_saved_bytes_under_recompute(name: str, policy: str) -> None:
    assert counted(described(name), policy) == pytest.approx(measured(name, policy=policy), rel=0.05)


@pytest.mark.parametrize(("name", "dtype"), list(product(["mixtral", "deepseek_v2", "deepseek_v3"], DTYPES)))
def test_saved_bytes_where_scores_are_stored(name: str, dtype: Dtype) -> None:
    spec = described(name, compute_dtype=dtype, attention="math")
    assert counted(spec, "none") == pytest.approx(measured(name, attention="eager", dtype=dtype), rel=0.05)


def test_values_may_be_narrower_than_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WITH_EXPERTS, "narrow", {**LATENT, "v_head_dim": 6})
    assert counted(described("narrow", attention="math"), "none") == pytest.approx(
        measured("narrow", attention="eager"), rel=0.05
    )
    model = build(WITH_EXPERTS["narrow"], attention="eager").eval()
    model.set_experts_implementation("eager")  # type: ignore[operator]
    forward, _ = flops(model, tokens(WITH_EXPERTS["narrow"], 1, LENGTH))
    assert sum(block.forward_flops for block in described("narrow").blocks) == forward


# --- over ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_expert_parallelism_divides_the_experts_and_nothing_else(name: str) -> None:
    ep = 5 if "deepseek" not in name else 3
    whole, part = described(name).layers[-1], described(name, ep=ep).layers[-1]
    assert ep * elements(part.experts) == elements(whole.experts) > 0
    assert part.parameters - elements(part.experts) == whole.parameters - elements(whole.experts)
    assert part.saved_bytes == whole.saved_bytes
    assert part.forward_flops == whole.forward_flops


def test_rows_of_the_chosen_experts_travel_there_and_back() -> None:
    """Dispatch and combine move each row once per chosen expert: 2 x k x tokens x hidden x bytes, again in backward."""
    block = described("mixtral", ep=5, compute_dtype="bfloat16").layers[0]
    (sent,) = [one for one in block.collectives if one.kind == "all_to_all"]
    assert (sent.dimension, sent.forward, sent.backward) == ("ep", 2, 2)
    assert sent.message_bytes == 2 * LENGTH * MIXTRAL["hidden_size"] * 2
    assert not [one for one in described("mixtral").layers[0].collectives if one.kind == "all_to_all"]
    dense = described("deepseek_v3", ep=3).layers[0]
    assert not [one for one in dense.collectives if one.kind == "all_to_all"]


def received(block: BlockSpec, kind: str) -> int:
    return sum(one.forward for one in block.collectives if one.kind == kind and one.dimension == "tp")


def test_tensor_parallelism_divides_latent_attention_by_heads() -> None:
    """The products into the latents, their norms and the router stay whole; experts do too."""
    table = LATENT
    whole, part = (described("deepseek_v3", tp=tp, stack="compiled").layers[-1] for tp in (1, 2))
    heads, queries = table["num_attention_heads"], table["qk_nope_head_dim"] + table["qk_rope_head_dim"]
    spread = table["qk_nope_head_dim"] + table["v_head_dim"]
    hidden, shared = table["hidden_size"], table["moe_intermediate_size"]
    divided = (
        heads * queries * table["q_lora_rank"]
        + heads * spread * table["kv_lora_rank"]
        + heads * table["v_head_dim"] * hidden
        + 3 * hidden * shared
    )
    assert whole.parameters - part.parameters == divided // 2
    assert part.experts == whole.experts
    assert received(part, "all_reduce") == 2  # after attention, after the shared experts


def test_sequence_parallelism_divides_what_the_norms_and_experts_keep() -> None:
    alone, cut = (described("deepseek_v3", tp=2, sequence_parallel=on, stack="compiled") for on in (False, True))
    assert cut.layers[-1].saved_bytes["none"] < alone.layers[-1].saved_bytes["none"]
    assert cut.layers[-1].forward_flops < alone.layers[-1].forward_flops  # each rank routes its own rows only
    assert cut.layers[-1].saved_bytes["full"] * 2 == alone.layers[-1].saved_bytes["full"]


@pytest.mark.parametrize("stack", ["compiled", "fused"])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_other_stacks_keep_less_and_compute_the_same(name: str, stack: str) -> None:
    eager, other = described(name, compute_dtype="bfloat16"), described(name, compute_dtype="bfloat16", stack=stack)
    assert other.parameters == eager.parameters
    assert sum(b.forward_flops for b in other.blocks) == sum(b.forward_flops for b in eager.blocks)
    for mine, theirs in zip(other.layers, eager.layers, strict=True):
        assert 0 < mine.saved_bytes["none"] < theirs.saved_bytes["none"]
        assert mine.moved_bytes < theirs.moved_bytes


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, "layer 3"),
        ("qwen3_moe", {"mlp_only_layers": 2}, "mlp_only_layers=2"),
        ("deepseek_v3", {"n_group": 4}, "n_group=4"),
        ("deepseek_v3", {"topk_group": 4}, "topk_group=4"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v3", {"index_topk": 2048}, "index_topk"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"kv_lora_rank": None}, "kv_lora_rank"),
    ],
)
def test_what_is_not_understood_is_refused(base: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json of") as caught:
        read_config({**WITH_EXPERTS[base], **change})
    assert named in caught.value.what


def test_an_ep_that_does_not_divide_names_those_that_do() -> None:
    with pytest.raises(UnsupportedCombination, match="ep=2 does not divide 5 experts") as caught:
        described("mixtral", ep=2)
    assert caught.value.fix == "set ep to one of 1, 5"


def test_a_tp_that_does_not_divide_names_those_that_do() -> None:
    with pytest.raises(UnsupportedCombination, match="tp=3") as caught:
        described("deepseek_v3", tp=3, stack="compiled")
    assert caught.value.fix == "set tp to one of 1, 2"


def test_the_runtime_divides_experts_like_an_mlp() -> None:
    """Every rank has a part of all experts; their inputs and weights enter, their results are summed."""
    whole, part = described("mixtral").layers[-1], described("mixtral", tp=2).layers[-1]
    sizes = [sum(math.prod(shape) for shape in block.tensors if len(shape) == 3) for block in (whole, part)]
    assert sizes[0] == 2 * sizes[1] > 0
    assert part.experts == ()
    summed = [one for one in part.collectives if one.kind == "all_reduce"]
    assert sum(one.forward for one in summed) == 2
    assert sum(one.backward for one in summed) == 3  # attention's input, the experts' input, and the weights


@pytest.mark.parametrize(
    ("name", "layout", "why"),
    [
        ("mixtral", {"tp": 2, "sequence_parallel": True}, "routers"),
        ("deepseek_v2", {"tp": 2}, "narrow product"),
        ("deepseek_v3", {"tp": 2}, "narrow product"),
    ],
)
def test_what_the_runtime_cannot_divide_is_refused_for_its_stack(name: str, layout: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedCombination) as caught:
        described(name, **layout)
    assert why in caught.value.why
    assert described(name, **layout, stack="compiled").parameters > 0
