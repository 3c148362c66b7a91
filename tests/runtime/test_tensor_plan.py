"""The sharding plan and the cuts that follow from it: Hugging Face's published plans, annotations, heads, odd sizes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import ConfigError, MeshwrightError, UnsupportedCombination
from meshwright.runtime.cuts import Cut
from meshwright.runtime.tp.divide import Sharding, divide
from meshwright.runtime.tp.heads import Heads, find_heads, tell_heads
from meshwright.runtime.tp.plan import Assigned, plan_sharding
from meshwright.runtime.units import find_blocks, owners

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 92,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    **TOKENS,
}
#: Sizes of experts, where a config has them.
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 20),
}
#: One of each kind of plan; `make test-all` takes all that there are.
USUAL = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "gemma", "gemma2", "phi", "phi3"),
    *("gpt_neox", "cohere", "olmo2", "glm", "glm4", "granite", "starcoder2", "ernie4_5", "helium", "exaone4"),
)


def of_config(kind: str, **sizes: Any) -> nn.Module:
    """A model of a config's kind on the meta device, with those of the sizes that its config has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    made: Any = CONFIG_MAPPING[kind]
    usual = made()
    wanted = {key: value for key, value in {**SIZES, **sizes}.items() if hasattr(usual, key)}
    wanted |= {key: value for key, value in EXPERTS.items() if isinstance(getattr(usual, key, None), int)}
    config = made(**wanted)
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else MODEL_MAPPING
    found = mapping[type(config)]
    with torch.device("meta"):
        model: nn.Module = (found[0] if isinstance(found, tuple) else found)(config)
    return model


def divided(model: nn.Module, ranks: int, blocks: list[str] | None = None, **annotations: str) -> Sharding:
    named = {key.replace("__", "."): style for key, style in annotations.items()}
    return divide(model, plan_sharding(model, named), ranks, blocks=blocks or [])


def wrong_with(cut: Cut, ranks: int) -> str:
    """What does not hold of a cut: every element on one rank, or on equally many that know they are copies."""
    if not cut.shape:
        return "" if cut.replicated else "a scalar is cut"
    held = Counter(element for own in cut.segments for start, size in own for element in range(start, start + size))
    if sorted(held) != list(range(cut.shape[cut.dim])):
        return "not all elements are held"
    copies = set(held.values())
    if len(copies) > 1:
        return f"elements are held by {sorted(copies)} ranks"
    if copies != {1} and not (cut.partial or cut.replicated):
        return f"copies on {copies} ranks are not known for it"
    for rank in range(ranks):
        total, shape = sum(size for _, size in cut.segments[rank]), cut.local_shape(rank)
        if cut.length[rank] < total or shape[cut.dim] != cut.length[rank]:
            return f"rank {rank} holds {shape} for {total} elements"
        if len(shape) != len(cut.shape) or any(
            mine != whole for dim, (mine, whole) in enumerate(zip(shape, cut.shape, strict=True)) if dim != cut.dim
        ):
            return f"rank {rank} holds {shape} of {cut.shape}"
    return ""


def require_complete(model: nn.Module, sharding: Sharding, ranks: int) -> None:
    assert sharding.cuts.keys() == owners(model).keys()
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    for name, cut in sharding.cuts.items():
        assert cut.shape == shapes[name], name
        assert not wrong_with(cut, ranks), (name, cut)
    styles = {name: entry.style for name, entry in sharding.styles.items()}
    assert {"colwise", "gather-output", "experts"} & set(styles.values())
    for name, style in styles.items():  # a matrix that is said to be divided is so, except copied keys and values
        cut = sharding.cuts.get(f"{name}.weight")
        if cut is not None and style in ("rowwise", "vocab"):
            assert not cut.replicated, name


# --- every family -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", USUAL)
def test_published_plans_hold_every_element(kind: str, ranks: int) -> None:
    model = of_config(kind, **({"num_attention_heads": 6, "hidden_size": 72} if ranks == 3 else {}))
    if kind == "phi3" and ranks > 2:
        with pytest.raises(UnsupportedCombination, match="in one fused weight"):
            divided(model, ranks)
    else:
        require_complete(model, divided(model, ranks), ranks)


@pytest.mark.slow
def test_every_family_that_publishes_a_plan_is_divided_completely_or_refused() -> None:
    """Nothing else: no crash, no element on no rank or on too many. Configs that cannot be made small are left out."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: dict[str, list[str]] = {"divided": [], "refused": [], "not built": []}
    for kind in list(CONFIG_MAPPING.keys()):
        try:
            if not getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None):
                continue
            model = of_config(kind)
        except Exception:  # whatever their code raises for sizes that do not go together
            found["not built"].append(kind)
            continue
        for ranks in (2, 4):
            try:
                require_complete(model, divided(model, ranks), ranks)
                found["divided"].append(f"{kind} over {ranks}")
            except UnsupportedCombination:
                found["refused"].append(f"{kind} over {ranks}")
    assert len(found["divided"]) >= 190, found
    assert len(found["refused"]) <= 70, found["refused"]


# --- who says so ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, inner: int = 23) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up, self.down = nn.Linear(10, inner), nn.Linear(inner, 10)


class Attending(nn.Module):
    """Six query heads of two channels and some of keys and values, each with a norm or not."""

    def __init__(self, groups: int = 2, heads: int = 6) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.num_key_value_groups = heads, groups, 2, heads // groups
        self.q, self.o = nn.Linear(12, 2 * heads), nn.Linear(2 * heads, 12)
        self.k, self.v = nn.Linear(12, 2 * groups), nn.Linear(12, 2 * groups)


class Fused(nn.Module):
    """Queries, keys and values in one matrix."""

    def __init__(self, name: str, groups: int = 6, outputs: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 6, groups, 2
        setattr(self, name, nn.Linear(12, 12 + 4 * groups if outputs is None else outputs))
        self.o = nn.Linear(12, 12)


ATTENTION = {"*__q": "colwise", "*__k": "colwise", "*__v": "colwise", "*__o": "rowwise"}


def blocks_of(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules)


def test_the_built_in_plans_say_their_source() -> None:
    styles = plan_sharding(of_config("llama"), {})
    assert styles["model.layers.0.self_attn.q_proj"] == Assigned("colwise", "published")
    assert styles["model.layers.1.mlp.down_proj"] == Assigned("rowwise", "published")
    assert styles["lm_head"] == Assigned("vocab", "completed")
    assert styles["model.norm"] == Assigned("sequence", "completed")
    assert styles["model.layers.0.input_layernorm"] == Assigned("replicate", "default")
    assert plan_sharding(of_config("gpt2"), {})["transformer.h.1.attn.c_attn"] == Assigned("colwise", "known")
    assert plan_sharding(of_config("opt"), {})["model.decoder.layers.0.fc2"] == Assigned("rowwise", "known")
    fused = plan_sharding(of_config("phi3"), {})
    assert fused["model.layers.0.self_attn.qkv_proj"] == Assigned("colwise", "corrected")
    assert fused["model.layers.0.mlp.down_proj"] == Assigned("rowwise", "corrected")


def test_annotations_override_a_published_plan_and_leave_the_rest() -> None:
    model = of_config("llama")
    changed = {"model.layers.0.mlp.*": "replicate", "lm_head": "replicate", "model.norm": "replicate"}
    styles = plan_sharding(model, changed)
    plain = plan_sharding(model, {})
    for name, entry in styles.items():
        mine = name in ("lm_head", "model.norm") or name.startswith("model.layers.0.mlp.")
        assert entry == (Assigned("replicate", "annotation") if mine else plain[name]), name
    cuts = divide(model, styles, 2).cuts
    assert cuts["model.layers.0.mlp.up_proj.weight"].replicated
    assert cuts["lm_head.weight"].replicated
    assert not cuts["model.layers.1.mlp.up_proj.weight"].replicated


def test_the_last_annotation_of_a_module_counts() -> None:
    model = blocks_of(Block(), Block())
    styles = plan_sharding(model, {"*.up": "colwise", "*.down": "rowwise", "0.up": "gather-output"})
    assert (styles["0.up"].style, styles["1.up"].style) == ("gather-output", "colwise")


def test_a_star_is_one_part_of_a_name() -> None:
    model = nn.ModuleDict({"layers": blocks_of(Block(), Block()), "up": nn.Linear(3, 3)})
    named = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    styles = plan_sharding(model, named)
    assert [name for name, entry in styles.items() if entry.style == "colwise"] == ["layers.0.up", "layers.1.up"]
    with pytest.raises(ConfigError, match=r"no module is named \*\.up"):
        plan_sharding(model, {**named, "*.up": "colwise"})


def test_published_names_of_styles_can_be_said_too() -> None:
    styles = plan_sharding(blocks_of(Block(), Block()), {"*.up": "colwise_gather_output", "*.down": "replicate"})
    assert styles["0.up"] == Assigned("gather-output", "annotation")


@pytest.mark.parametrize("style", ["", "columns", "experts", "split-input", "packed_colwise", "Colwise"])
def test_what_is_no_style_of_a_user_s_is_refused(style: str) -> None:
    with pytest.raises(ConfigError, match="no such style") as caught:
        plan_sharding(blocks_of(Block(), Block()), {"*.up": style})
    assert "use one of colwise, rowwise, vocab" in str(caught.value)


def test_near_names_are_told_as_patterns() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_sharding(of_config("llama"), {"model.layers.*.mlp.upproj": "colwise"})
    assert "model.layers.*.mlp.up_proj" in str(caught.value)


def test_without_any_plan_the_model_s_own_matrices_are_told() -> None:
    with pytest.raises(UnsupportedCombination) as caught:
        plan_sharding(blocks_of(Block(), Block()), {})
    assert '{"*.up": "colwise", "*.down": "rowwise"}' in str(caught.value)
    with pytest.raises(UnsupportedCombination, match="publishes no plan"):
        plan_sharding(nn.Linear(3, 3), {})


def test_an_unknown_published_style_is_refused_by_name() -> None:
    model: Any = blocks_of(Block(), Block())
    model._tp_plan = {"*.up": "diagonal", "*.down": "rowwise"}
    with pytest.raises(UnsupportedCombination, match="the style diagonal of"):
        plan_sharding(model, {})


# --- odd sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "widths"), [(2, [12, 11]), (3, [8, 8, 7]), (5, [5, 5, 5, 4, 4])])
def test_an_mlp_of_23_is_divided_unevenly(ranks: int, widths: list[int]) -> None:
    model = blocks_of(Block(), Block())
    sharding = divided(model, ranks, **{"*__up": "colwise", "*__down": "rowwise"})
    require_complete(model, sharding, ranks)
    assert sharding.widths["0.up"] == sharding.widths["0.down"] == widths
    assert [sharding.cuts["0.up.bias"].local_shape(rank) for rank in range(ranks)] == [(width,) for width in widths]
    assert [sharding.cuts["0.down.weight"].local_shape(rank) for rank in range(ranks)] == [(10, w) for w in widths]
    assert sharding.cuts["0.down.bias"].replicated


@pytest.mark.parametrize(("ranks", "widths"), [(2, [51, 50]), (3, [34, 34, 33]), (4, [26, 25, 25, 25])])
def test_a_vocabulary_of_101_is_padded_to_equal_lengths(ranks: int, widths: list[int]) -> None:
    sizes = {"num_attention_heads": 12, "hidden_size": 144}
    model = of_config("llama", tie_word_embeddings=False, **sizes)
    sharding = divided(model, ranks)
    for name in ("model.embed_tokens", "lm_head"):
        cut = sharding.cuts[f"{name}.weight"]
        assert sharding.widths[name] == widths
        assert set(cut.length) == {widths[0]}
        assert [sum(size for _, size in own) for own in cut.segments] == widths


def test_more_ranks_than_outputs_are_refused() -> None:
    model = blocks_of(Block(3), Block(3))
    with pytest.raises(UnsupportedCombination, match=r"tp=5 over the 3 channels of 0\.up"):
        divided(model, 5, **{"*__up": "colwise", "*__down": "rowwise"})


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "groups", "ranks", "segments", "partial"),
    [
        (6, 2, 2, [(0, 2), (2, 2)], False),
        (6, 2, 3, [(0, 4)] * 3, True),
        (6, 2, 6, [(0, 2)] * 3 + [(2, 2)] * 3, True),
        (8, 2, 4, [(0, 2), (0, 2), (2, 2), (2, 2)], True),
        (6, 1, 2, [(0, 2)] * 2, True),
        (6, 3, 2, [(0, 6)] * 2, True),
        (6, 6, 3, [(0, 4), (4, 4), (8, 4)], False),
    ],
)
def test_key_value_heads_are_divided_copied_or_picked(
    heads: int, groups: int, ranks: int, segments: list[tuple[int, int]], partial: bool
) -> None:
    model = blocks_of(Attending(groups, heads), Attending(groups, heads))
    sharding = divided(model, ranks, **ATTENTION)
    require_complete(model, sharding, ranks)
    for name in ("k", "v"):
        for what in ("weight", "bias"):
            cut = sharding.cuts[f"0.{name}.{what}"]
            assert [own[0] for own in cut.segments] == segments
            assert cut.partial == partial
    per_rank = heads // ranks * 2
    assert sharding.widths["0.q"] == sharding.widths["0.o"] == [per_rank] * ranks


@pytest.mark.parametrize(
    ("heads", "groups", "ranks"), [(6, 2, 2), (6, 2, 3), (6, 2, 6), (8, 2, 4), (6, 3, 2), (12, 4, 6)]
)
def test_each_query_finds_the_key_it_has_in_one_process(heads: int, groups: int, ranks: int) -> None:
    of = Heads(heads, groups, 2, ranks)
    for rank in range(ranks):
        held = [start // 2 for start, _ in [of.group_segments(2)[rank]]]
        first = held[0]
        for local in range(of.local):
            query = rank * of.local + local
            wanted = query // (heads // groups)
            if of.selects:
                assert of.selected(rank)[local] == wanted
            else:
                assert first + local // (of.local // of.local_groups) == wanted


@pytest.mark.parametrize("ranks", [4, 5, 7, 12])
def test_heads_that_ranks_do_not_divide_are_refused_with_the_degrees_that_do(ranks: int) -> None:
    with pytest.raises(UnsupportedCombination) as caught:
        divided(blocks_of(Attending(), Attending()), ranks, **ATTENTION)
    assert f"tp={ranks} does not divide the 6 query heads of 0" in str(caught.value)
    assert "set tp to one of 1, 2, 3, 6;" in str(caught.value)


def test_heads_are_found_by_what_modules_show() -> None:
    attention: Any = nn.Module()
    assert find_heads(attention, {"q": 12, "k": 12, "v": 12}, 2) is None
    attention.head_dim = 2
    assert find_heads(attention, {"q": 12, "k": 4, "v": 4}, 2) == Heads(6, 2, 2, 2)
    attention.config = transformers.LlamaConfig(hidden_size=12, num_attention_heads=6, num_key_value_heads=3)
    assert find_heads(attention, {"qkv": 24}, 3) == Heads(6, 3, 2, 3)
    attention.num_heads = 6
    del attention.head_dim
    attention.hidden_size = 12
    assert find_heads(attention, {"qkv": 24}, 3) == Heads(6, 3, 2, 3)


def test_a_module_is_told_its_rank_s_heads_and_nothing_else() -> None:
    attention: Any = Attending()
    attention.config = transformers.LlamaConfig(hidden_size=12, num_attention_heads=6, num_key_value_heads=2)
    whole = attention.config
    tell_heads(attention, Heads(6, 2, 2, 2), config=True)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (3, 1, 2)
    assert attention.num_key_value_groups == 3
    assert (attention.config.num_attention_heads, attention.config.num_key_value_heads) == (3, 1)
    assert (whole.num_attention_heads, whole.num_key_value_heads) == (6, 2)


class Flat(nn.Module):
    """Attention and an MLP in one module, with the norm before them."""

    def __init__(self, inner: int, width: int = 12) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 6, 2, 2
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = nn.Linear(12, 12), nn.Linear(12, 4), nn.Linear(12, 4), nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, inner), nn.Linear(inner, 12)


@pytest.mark.parametrize(("inner", "widths"), [(23, [12, 11]), (48, [24, 24])])
def test_a_block_without_a_module_for_attention_is_divided_like_one_with(inner: int, widths: list[int]) -> None:
    model = blocks_of(Flat(inner), Flat(inner))
    sharding = divided(model, 2, **ATTENTION, **{"*__up": "colwise", "*__down": "rowwise"})
    require_complete(model, sharding, 2)
    assert sharding.widths["0.up"] == sharding.widths["0.down"] == widths
    assert sharding.widths["1.q"] == sharding.widths["1.o"] == [6, 6]
    assert not sharding.cuts["0.norm.weight"].partial, "it is as wide as what enters, and every rank computes it alike"
    of_heads = blocks_of(Flat(inner, width=2), Flat(inner, width=2))
    assert divided(of_heads, 2, **ATTENTION, **{"*__up": "colwise", "*__down": "rowwise"}).cuts["0.norm.weight"].partial


# --- fused weights ----------------------------------------------------------------------------------------------------


def test_fused_queries_keys_and_values_are_divided_part_by_part() -> None:
    model = blocks_of(Fused("qkv_proj", 2), Fused("qkv_proj", 2))
    sharding = divided(model, 2, **{"*__qkv_proj": "colwise", "*__o": "rowwise"})
    require_complete(model, sharding, 2)
    assert sharding.cuts["0.qkv_proj.weight"].segments == (((0, 6), (12, 2), (16, 2)), ((6, 6), (14, 2), (18, 2)))
    assert sharding.cuts["0.qkv_proj.bias"].segments == sharding.cuts["0.qkv_proj.weight"].segments
    with pytest.raises(UnsupportedCombination, match="key/value heads in one fused weight") as caught:
        divided(model, 3, **{"*__qkv_proj": "colwise", "*__o": "rowwise"})
    assert "set tp to one of 1, 2;" in str(caught.value)


def test_heads_after_heads_stay_together() -> None:
    model = blocks_of(Fused("query_key_value"), Fused("query_key_value"))
    sharding = divided(model, 3, **{"*__query_key_value": "colwise", "*__o": "rowwise"})
    assert sharding.cuts["0.query_key_value.weight"].segments == (((0, 12),), ((12, 12),), ((24, 12),))


@pytest.mark.parametrize(("name", "outputs"), [("project", 36), ("project", 40), ("qkv", 40)])
def test_fused_weights_of_an_unknown_layout_are_refused(name: str, outputs: int) -> None:
    model = blocks_of(Fused(name, 6, outputs), Fused(name, 6, outputs))
    with pytest.raises(UnsupportedCombination, match=rf"0\.{name}"):
        divided(model, 2, **{f"*__{name}": "colwise", "*__o": "rowwise"})


def test_a_fused_weight_without_heads_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.o = nn.Linear(12, 36), nn.Linear(12, 12)

    with pytest.raises(UnsupportedCombination, match="the module shows no heads"):
        divided(blocks_of(Bare(), Bare()), 2, **{"*__qkv": "colwise", "*__o": "rowwise"})


def test_entries_for_key_value_heads_and_weights_in_shards_of_their_own_are_refused() -> None:
    class Decaying(Attending):
        def __init__(self) -> None:
            super().__init__(groups=3)
            self.decay = nn.Parameter(torch.ones(3))

    with pytest.raises(UnsupportedCombination, match="an entry for each of 3 key/value heads"):
        divided(blocks_of(Decaying(), Decaying()), 3, **ATTENTION)
    with pytest.raises(UnsupportedCombination, match="shard by shard"):
        divided(of_config("codegen"), 2)


def test_gate_and_up_in_one_weight_are_divided_side_by_side() -> None:
    model = of_config("phi3", intermediate_size=23)
    cuts = divided(model, 2).cuts
    assert cuts["model.layers.0.mlp.gate_up_proj.weight"].segments == (((0, 12), (23, 12)), ((12, 11), (35, 11)))
    assert cuts["model.layers.0.mlp.down_proj.weight"].segments == (((0, 12),), ((12, 11),))


def test_gpt2_stores_inputs_by_outputs() -> None:
    model = of_config("gpt2", hidden_size=24, num_attention_heads=6)
    sharding = divided(model, 3)
    require_complete(model, sharding, 3)
    attention, mlp = (
        sharding.cuts["transformer.h.0.attn.c_attn.weight"],
        sharding.cuts["transformer.h.0.mlp.c_proj.weight"],
    )
    assert (attention.dim, attention.segments[1]) == (1, ((8, 8), (32, 8), (56, 8)))
    assert (mlp.dim, mlp.segments[1]) == (0, ((32, 32),))
    assert sharding.cuts["transformer.h.0.attn.c_attn.bias"].dim == 0


def test_experts_are_each_divided_like_an_mlp() -> None:
    model = of_config("qwen3_moe", num_attention_heads=6, hidden_size=72)
    cuts = divided(model, 3).cuts
    up, down = (cuts[f"model.layers.0.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    assert (up.dim, up.segments[2]) == (1, ((14, 6), (34, 6)))
    assert (down.dim, down.segments[2]) == (2, ((14, 6),))


# --- tied weights, shares, refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_tied_weights_are_cut_once_and_alike(ranks: int) -> None:
    model = of_config("llama", tie_word_embeddings=True)
    sharding = divided(model, ranks)
    assert "lm_head.weight" not in sharding.cuts
    assert sharding.cuts["model.embed_tokens.weight"].dim == 0
    assert sharding.widths["lm_head"] == sharding.widths["model.embed_tokens"]


@pytest.mark.parametrize("style", ["gather-output", "rowwise"])
def test_tied_weights_that_are_divided_otherwise_are_refused(style: str) -> None:
    model = of_config("llama", tie_word_embeddings=True, vocab_size=102)
    with pytest.raises(UnsupportedCombination, match="shares a weight that another module divides otherwise"):
        divided(model, 4, lm_head=style)


@pytest.mark.parametrize("whole", ["lm_head", "model.embed_tokens"])
def test_a_tied_weight_that_one_module_divides_and_another_keeps_whole_is_refused(whole: str) -> None:
    model = of_config("llama", tie_word_embeddings=True)
    with pytest.raises(UnsupportedCombination, match="shares a weight"):
        divide(model, plan_sharding(model, {whole: "replicate"}), 2)


def test_where_sequences_are_cut_norms_and_biases_of_blocks_have_shares_of_gradients() -> None:
    model = of_config("gpt2", hidden_size=24, num_attention_heads=6)
    blocks = [name for name, _ in find_blocks(model)]
    plain, cut = divided(model, 2).cuts, divided(model, 2, blocks).cuts
    assert not any(entry.partial for entry in plain.values())
    shares = {name for name, entry in cut.items() if entry.partial}
    assert shares == {
        f"transformer.h.{i}.{name}"
        for i in range(2)
        for name in (
            *("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"),
            *("attn.c_proj.bias", "mlp.c_proj.bias"),
        )
    }


def test_norms_of_heads_have_shares_of_gradients() -> None:
    cuts = divided(of_config("qwen3"), 2).cuts
    shares = {name.split(".", 3)[-1] for name, entry in cuts.items() if entry.partial}
    assert shares == {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}


REFUSED: dict[str, tuple[Mapping[str, str], type[MeshwrightError], str]] = {
    "colwise without rowwise": ({"*.up": "colwise"}, ConfigError, "nothing beside them is rowwise"),
    "a divided norm": (
        {"*.up": "colwise", "*.down": "rowwise", "*.norm": "colwise"},
        UnsupportedCombination,
        "LayerNorm",
    ),
    "rows of a norm": ({"*.up": "colwise", "*.norm": "rowwise"}, UnsupportedCombination, "LayerNorm"),
    "words of a norm": (
        {"*.up": "colwise", "*.down": "rowwise", "*.norm": "vocab"},
        UnsupportedCombination,
        "no vocabulary",
    ),
    "a divided block": (
        {"*.up": "colwise", "*.down": "rowwise", "*": "rowwise"},
        UnsupportedCombination,
        "a Block is not",
    ),
    "words of a block": (
        {"*.up": "colwise", "*.down": "rowwise", "*": "vocab"},
        UnsupportedCombination,
        "no vocabulary",
    ),
    "partly gathered": (
        {"*.up": "colwise", "*.norm": "gather-output", "*.down": "rowwise"},
        UnsupportedCombination,
        "annotate them alike",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_divided_is_refused(case: str) -> None:
    annotations, kind, text = REFUSED[case]
    model = blocks_of(Block(), Block())
    with pytest.raises(kind) as caught:
        divide(model, plan_sharding(model, annotations), 2)
    assert text in str(caught.value)
    assert caught.value.fix


def test_dividing_changes_nothing_of_the_model() -> None:
    model: Any = of_config("llama")
    before = {name: id(value) for name, value in model.named_parameters()}
    divided(model, 2)
    assert before == {name: id(value) for name, value in model.named_parameters()}
    assert model.model.layers[0].self_attn.config.num_attention_heads == 4
