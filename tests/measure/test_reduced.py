"""A config made small keeps its kind: heads that divide, ratios, every switch."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.measure.verify.reduced import depth_for, reduce_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


def small(**changes: Any) -> dict[str, Any]:
    table = LLAMA | changes
    return reduce_config(table, table, depth=3, sequence=17).table


@pytest.mark.parametrize(("heads", "groups"), [(32, 8), (32, 32), (71, 1), (40, 8), (64, 8), (2, 1), (28, 4), (96, 8)])
def test_heads_divide_and_keep_their_ratio(heads: int, groups: int) -> None:
    made = small(num_attention_heads=heads, num_key_value_heads=groups, hidden_size=heads * 64)
    few, few_groups = made["num_attention_heads"], made["num_key_value_heads"]
    assert few % few_groups == 0
    assert made["hidden_size"] % few == 0
    assert (few == few_groups) == (heads == groups)
    assert (few_groups == 1) == (groups == 1)
    if groups > 1 and heads // groups <= 8:
        assert few // few_groups == heads // groups


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "wanted"),
    [
        (32, 8, 2, (8, 2)),
        (32, 8, 4, (16, 4)),  # key/value heads divided
        (16, 2, 4, (16, 2)),  # key/value heads copied
        (24, 8, 6, (12, 4)),  # key/value heads picked
        (96, 8, 3, (18, 2)),
        (12, 12, 4, (4, 4)),
        (12, 12, 2, (4, 4)),
        (8, 1, 8, (8, 1)),
    ],
)
def test_heads_divide_over_ranks_as_those_of_the_whole_model(
    heads: int, groups: int, tp: int, wanted: tuple[int, int]
) -> None:
    table = LLAMA | {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": heads * 64}
    made = reduce_config(table, table, depth=3, sequence=17, tp=tp).table
    assert (made["num_attention_heads"], made["num_key_value_heads"]) == wanted


def test_heads_that_ranks_do_not_divide_are_refused_where_nothing_else_is_said() -> None:
    with pytest.raises(UnsupportedCombination, match="tp=3 does not divide the 32 heads of a llama"):
        reduce_config(LLAMA, LLAMA, depth=3, sequence=17, tp=3)
    made = reduce_config(LLAMA, LLAMA, depth=3, sequence=17, tp=3, annotated=True).table
    assert made["num_attention_heads"] == 8


@pytest.mark.parametrize(("size", "compared"), [(128, 0), (256, 1), (64, -1)])
def test_heads_stay_wider_or_narrower_than_the_model(size: int, compared: int) -> None:
    made = small(head_dim=size)
    wide, channels = made["head_dim"] * made["num_attention_heads"], made["hidden_size"]
    assert (wide > channels) - (wide < channels) == compared


@pytest.mark.parametrize("part", [1.0, 0.5, 0.4, 0.25])
def test_what_is_rotated_is_even(part: float) -> None:
    made = small(rope_parameters={"rope_type": "default", "partial_rotary_factor": part})
    turned = int(made["hidden_size"] // made["num_attention_heads"] * part)
    assert turned >= 2
    assert turned % 2 == 0


def test_rotations_with_factors_keep_one_for_each_frequency() -> None:
    factors = [1.0 + index for index in range(64)]
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    made = reduce_config(LLAMA | {"rope_scaling": rope}, LLAMA | {"rope_parameters": rope}, depth=3, sequence=17).table
    assert "rope_scaling" not in made
    turned = made["hidden_size"] // made["num_attention_heads"] // 2
    assert len(made["rope_parameters"]["short_factor"]) == turned
    assert made["rope_parameters"]["long_factor"][-1] == factors[64 * (turned - 1) // turned]


def test_switches_stay_and_sizes_go() -> None:
    switches = {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "final_logit_softcapping": 30.0,
    }
    made = small(**switches, sliding_window=4096, attention_dropout=0.1, eos_token_id=[128001, 2], dtype="bfloat16")
    assert switches.items() <= made.items()
    assert made["sliding_window"] == 7
    assert made["attention_dropout"] == 0.0
    assert all(token < made["vocab_size"] for token in made["eos_token_id"])
    assert "dtype" not in made
    assert made["max_position_embeddings"] == 8192  # no parameters hang on it


def test_positions_that_are_learned_are_few() -> None:
    made = small(rope_parameters=None)
    assert made["max_position_embeddings"] == 64


def test_every_kind_of_block_is_kept() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    made = small(num_hidden_layers=24, layer_types=kinds * 4, mlp_only_layers=[0, 3, 20])
    assert made["num_hidden_layers"] == 6
    assert made["layer_types"] == kinds
    assert made["mlp_only_layers"] == [0, 3]


def test_experts_are_fewer() -> None:
    made = small(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    assert (made["num_experts"], made["num_experts_per_tok"]) == (5, 2)
    made = small(n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4)
    assert made["n_routed_experts"] % made["n_group"] == 0
    assert made["topk_group"] * made["n_routed_experts"] // made["n_group"] >= made["num_experts_per_tok"]


def test_a_strategy_has_the_blocks_it_needs() -> None:
    assert depth_for(1, 0) == 3
    assert depth_for(3, 0) == 7
    assert depth_for(1, 6) == 7


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_config_without_its_sizes_is_refused(key: str) -> None:
    table = {name: value for name, value in LLAMA.items() if name != key}
    with pytest.raises(ConfigError, match="names no"):
        reduce_config(table, table, depth=3, sequence=17)
