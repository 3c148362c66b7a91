"""What tensor parallelism cannot divide is refused with the remedy, and heads that ranks can share are shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from meshwright.errors import UnsupportedCombination
from meshwright.measure.equality import Run, compare, join, record, show
from meshwright.runtime import Engine, ModelLoss
from meshwright.spec import Job, Strategy
from tests.harness.hugging_face import ROWS, VOCABULARY, random_model, rows_of
from tests.harness.ranks import run_one, run_ranks

JOB = Job(global_batch=ROWS, param_dtype="float64", compute_dtype="float64", reduce_dtype="float64")
RATE = 0.1


class Sloped(nn.Module):
    """Attention with a slope for each head, kept as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 6, 2
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.out = nn.Linear(12, 12)
        self.register_buffer("slopes", torch.arange(6.0)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores: Tensor = (q @ k.mT + self.slopes).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).flatten(2))


class Slopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sloped() for _ in range(2))


_KEYS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_KEYS |= {"use_cache": False, "tie_word_embeddings": False}
_LLAMA = _KEYS | {"hidden_size": 16, "intermediate_size": 23, "num_hidden_layers": 3}


def made(name: str) -> nn.Module:
    """A model by its family."""
    if name == "slopes":
        return Slopes().double()
    kind, config = {
        "bloom": (hf.BloomForCausalLM, hf.BloomConfig(**_KEYS, hidden_size=12, n_layer=3, n_head=6)),
        "mpt": (hf.MptForCausalLM, hf.MptConfig(**_KEYS, d_model=12, n_layers=3, n_heads=6, max_seq_len=32)),
        "falcon": (
            hf.FalconForCausalLM,
            hf.FalconConfig(**_KEYS, hidden_size=12, num_hidden_layers=3, num_attention_heads=6, alibi=True),
        ),
        "eight": (hf.LlamaForCausalLM, hf.LlamaConfig(**_LLAMA, num_attention_heads=8, num_key_value_heads=2)),
    }[name]
    return random_model(kind, config, torch.float64)


def engine_of(name: str, strategy: Strategy, sharding: dict[str, str] | None = None) -> Engine:
    return Engine(
        made(name),
        ModelLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9),
        JOB,
        strategy,
        sharding=sharding,
        measure_memory="never",
    )


def refusals(asked: list[tuple[str, int, dict[str, str]]]) -> list[str]:
    """What the engine says to each."""
    texts = []
    for name, tp, sharding in asked:
        with pytest.raises(UnsupportedCombination) as caught:
            engine_of(name, Strategy(tp=tp), sharding)
        texts.append(str(caught.value))
    return texts


#: Attention by the user's own annotations, and why each cannot be.
ATTENTION = {
    "bloom": (
        {
            "transformer.h.*.self_attention.query_key_value": "colwise",
            "transformer.h.*.self_attention.dense": "rowwise",
        },
        "transformer.h.0.self_attention",
        "handed alibi",
    ),
    "mpt": (
        {"transformer.blocks.*.attn.Wqkv": "colwise", "transformer.blocks.*.attn.out_proj": "rowwise"},
        "transformer.blocks.0.attn",
        "handed position_bias",
    ),
    "falcon": (
        {
            "transformer.h.*.self_attention.query_key_value": "colwise",
            "transformer.h.*.self_attention.dense": "rowwise",
        },
        "transformer.h.0.self_attention",
        "FalconLinear",
    ),
    "slopes": (
        {**{f"layers.*.{name}": "colwise" for name in "qkv"}, "layers.*.out": "rowwise"},
        "layers.0.slopes",
        "an entry for each of 6 heads",
    ),
}


def test_L2_biases_of_heads_are_refused() -> None:
    """ALiBi's slopes stand beside the heads and would be those of other heads on every rank but the first."""
    bare = [name for name in ATTENTION if name != "slopes"]
    asked = [(name, 2, sharding) for name, (sharding, *_) in ATTENTION.items()] + [(name, 2, {}) for name in bare]
    for texts in run_ranks(2, refusals, asked):
        for text, (name, (_, where, why)) in zip(texts, ATTENTION.items(), strict=False):
            assert f"tensor parallelism of {where}" in text, name
            assert why in text
            assert "zero=3" in text
        for text, name in zip(texts[len(ATTENTION) :], bare, strict=True):
            assert "it publishes no plan" in text, name
            assert "sharding=" in text


def trained(name: str, strategy: Strategy, sharding: dict[str, str] | None) -> tuple[Run, dict[str, int]]:
    """Three steps, and the sizes of this rank's parameters."""
    engine = engine_of(name, strategy, sharding)
    sizes = {key: parameter.numel() for key, parameter in engine.model.named_parameters()}
    return record(engine, [rows_of(name, seed=seed, dtype=torch.float64) for seed in range(3)], float64=True), sizes


def check(name: str, strategy: Strategy, sharding: dict[str, str] | None = None) -> list[dict[str, int]]:
    """Asserts that all ranks train as one process does; the sizes of their parameters, those of one process last."""
    wanted, whole = run_one(trained, name, Strategy(microbatch=strategy.microbatch), None)
    found = run_ranks(strategy.world_size, trained, name, strategy, sharding, timeout_s=120)
    for joined in join([run for run, _ in found]):
        beyond = compare(joined, wanted, dtype="float64", optimizer="sgd", learning_rate=RATE)
        assert not beyond, show(beyond)
    return [*(sizes for _, sizes in found), whole]


def test_L2_the_mlps_beside_them_are_divided_where_the_user_says_so() -> None:
    mlp = "transformer.h.*.mlp"
    *ranks, whole = check(
        "bloom",
        Strategy(tp=2, microbatch=3),
        {f"{mlp}.dense_h_to_4h": "colwise", f"{mlp}.dense_4h_to_h": "rowwise"},
    )
    for sizes in ranks:
        assert (
            2 * sizes["transformer.h.1.mlp.dense_h_to_4h.weight"] == whole["transformer.h.1.mlp.dense_h_to_4h.weight"]
        )
        attention = "transformer.h.1.self_attention.dense.weight"
        assert sizes[attention] == whole[attention]


@pytest.mark.parametrize("cut", [False, True])
def test_C9_fewer_key_value_heads_than_ranks_are_copied_to_those_that_need_them(cut: bool) -> None:
    """2 key/value heads on 4 ranks: each is held twice, by the ranks whose queries need it."""
    *ranks, whole = check("eight", Strategy(tp=4, sequence_parallel=cut, microbatch=3))
    for sizes in ranks:
        for leaf, held in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2), ("o_proj", 4)):
            name = f"model.layers.1.self_attn.{leaf}.weight"
            assert held * sizes[name] == whole[name], name
