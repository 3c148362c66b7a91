"""Experts under ZeRO: where one gets no token on a rank, its gradient is zero there, and no rank waits for another."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from meshwright import ConfigError
from meshwright.measure.equality.float64 import float32_upcasts_stay_float64
from meshwright.runtime import Engine
from meshwright.spec import Job, Strategy
from tests.equivalence.test_structures import JOB, Steps, same, train
from tests.harness.every import every
from tests.harness.ranks import run_one, run_ranks

EXPERTS = 3


class Mixture(nn.Module):
    """Experts in a list; a row's first feature says which of them it goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(EXPERTS))

    def forward(self, rows: Tensor) -> Tensor:
        chosen = rows[:, 0].long().clamp(0, EXPERTS - 1)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            taken = chosen == index
            if bool(taken.any()):
                out = out.index_add(0, taken.nonzero()[:, 0], torch.tanh(expert(rows[taken])))
        return rows + out * 0.1


class Model(nn.Module):
    """One mixture, or several in a list."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Mixture() for _ in range(layers)) if layers > 1 else Mixture()
        self.head = nn.Linear(6, 7)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows + 0.1 * torch.tanh(self.enter(rows))
        hidden = torch.cat([rows[:, :1], hidden[:, 1:]], dim=1)
        for layer in self.layers if isinstance(self.layers, nn.ModuleList) else [self.layers]:
            hidden = torch.cat([rows[:, :1], layer(hidden)[:, 1:]], dim=1)
        return self.head(hidden)


def built(layers: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return Model(layers).double()


def loss(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, labels, reduction="sum"), labels.numel()


def rows() -> tuple[Tensor, Tensor]:
    """Six rows: the first two for the first expert, the last two for the second, no row for the third."""
    generator = torch.Generator().manual_seed(1)
    made = torch.randn(6, 6, generator=generator).double()
    made[:, 0] = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]).double()
    return made, torch.randint(0, 7, (6,), generator=generator)


def engine(model: nn.Module, zero: int, blocks: list[str] | None = None) -> Engine:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    job = Job(global_batch=6, **JOB)
    sgd: Any = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731 - one line reads best
    strategy = Strategy(dp=ranks, zero=zero)
    return Engine(model, loss, sgd, job, strategy, blocks=blocks, measure_memory="never")


def by_engine(zero: int) -> Steps:
    return train(engine(built(4), zero), [rows(), rows()])


@pytest.mark.parametrize(("world", "zero"), every([()], [(3, 1), (2, 2), (3, 3)]))
def test_E5_experts_without_tokens_on_some_ranks(world: int, zero: int) -> None:
    wanted = run_one(by_engine, 0)
    assert not any(".experts.2." in name for name in wanted[0][1]), "an expert that no rank used has no gradient"
    for steps in run_ranks(world, by_engine, zero):
        same(steps, wanted)


def single(zero: int, blocks: list[str] | None) -> str:
    made = engine(built(1), zero, blocks)
    try:
        return f"{made.step(rows()).loss:.12g}"
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("zero", [1, 3])
def test_E5_units_that_only_some_ranks_run_are_named_in_the_first_step(zero: int) -> None:
    for text in run_ranks(2, single, zero, None):
        assert "some ranks run unit layers.experts.0 where others are at unit layers.experts.1" in text
        assert "blocks=[...]" in text
    assert run_ranks(2, single, zero, ["layers"]) == [run_one(single, 0, None)] * 2
    assert run_ranks(2, single, 0, None) == [run_one(single, 0, None)] * 2


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        vocab_size=101,
        hidden_size=12,
        intermediate_size=10,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        num_local_experts=5,
        num_experts_per_tok=1,
        max_position_embeddings=32,
        use_cache=False,
        experts_implementation="eager",  # grouped products have no float64
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return hf.MixtralForCausalLM(config).double()


def next_token(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    labels = batch["input_ids"][:, 1:]
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def mixtral_steps(zero: int) -> Steps:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    job = Job(global_batch=6, **JOB)
    strategy, sgd = Strategy(dp=ranks, zero=zero), partial(torch.optim.SGD, lr=0.1)
    made = Engine(mixtral(), next_token, sgd, job, strategy, measure_memory="never")
    # Rows of one token each: a row's tokens all go to one expert of the first layer.
    ids = torch.tensor([[7], [7], [7], [8], [9], [9]]).expand(6, 4).contiguous()
    with float32_upcasts_stay_float64():
        return train(made, [{"input_ids": ids}, {"input_ids": ids}])


@pytest.mark.parametrize(("world", "zero"), every([()], [(2, 3), (3, 2)]))
def test_E5_mixtral_of_hugging_face(world: int, zero: int) -> None:
    wanted = run_one(mixtral_steps, 0)
    for steps in run_ranks(world, mixtral_steps, zero):
        same(steps, wanted)
