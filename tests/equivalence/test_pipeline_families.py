"""Hugging Face families cut into stages: unmodified, padded, with their own losses, as in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import ConfigError
from meshwright.measure.equality import Run, compare, join, record, show
from meshwright.runtime import Engine, ModelLoss
from meshwright.spec import Job, Strategy
from tests.harness.divided import DIVIDED, divided_model
from tests.harness.hugging_face import FAMILIES, ROWS, TIED, make_model, rows_of
from tests.harness.ranks import run_one, run_ranks

JOB = Job(global_batch=ROWS, param_dtype="float64", compute_dtype="float64", reduce_dtype="float64", clip_norm=0.5)
RATE = 0.1
#: Blocks of those that have other than five: an encoder's and a decoder's together.
BLOCKS = {"t5": 6, "whisper": 6, "bert": 3, "vit": 3}
OTHERS = tuple(name for name in DIVIDED if name not in FAMILIES)  # three blocks each
#: Those whose batches cannot be guessed.
NOT_TOKENS = ("vit", "whisper")
#: Run by `make test`; the others by `make test-all`.
FAST = (*FAMILIES, "gemma3", "mixtral", "qwen3_moe", "cohere")


@dataclass(frozen=True)
class Trained:
    """A family under a strategy."""

    name: str
    tied: bool
    strategy: Strategy

    def __str__(self) -> str:
        return f"{self.name}{' tied' if self.tied else ''} {self.strategy}"

    @property
    def reference(self) -> Trained:
        return Trained(self.name, self.tied, Strategy(microbatch=self.strategy.microbatch))


def listed() -> list[Any]:
    """Every family cut late and cut early, whole on one rank of a stage and sharded over two."""
    found = []
    for index, name in enumerate((*FAMILIES, *OTHERS)):
        blocks = BLOCKS.get(name, 5 if name in FAMILIES else 3)
        tied = name in TIED or name in OTHERS
        late, early = (blocks - 1, 1), (1, blocks - 1)
        schedule = ("1f1b", "zb-h1", "gpipe")[index % 3]
        strategies = [
            Strategy(pp=2, schedule=schedule, stages=late, microbatch=2),
            Strategy(pp=2, dp=2, zero=3, schedule="1f1b", stages=early, recompute=("none", "full")[index % 2]),
        ]
        if blocks > 3:
            folded = (("zb-v", 2), ("interleaved-1f1b", 2))[index % 2]
            strategies.append(
                Strategy(pp=2, dp=2, zero=3, schedule=folded[0], virtual_stages=folded[1], gather="chunk")
            )
        for number, strategy in enumerate(strategies):
            case = Trained(name, tied and (number + index) % 2 == 0, strategy)
            slow = name not in FAST or number == 2
            found.append(pytest.param(case, id=str(case), marks=pytest.mark.slow if slow else ()))
    return found


def model_of(case: Trained) -> nn.Module:
    make = make_model if case.name in FAMILIES else divided_model
    return make(case.name, tied=case.tied, dtype=torch.float64)


def run(case: Trained) -> Run:
    """Two steps."""
    engine = Engine(
        model_of(case),
        ModelLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9),
        JOB,
        case.strategy,
        example=rows_of(case.name, seed=9, dtype=torch.float64) if case.name in NOT_TOKENS else None,
        measure_memory="never",
    )
    return record(engine, [rows_of(case.name, seed=s, dtype=torch.float64) for s in range(2)], float64=True)


def without_example(name: str) -> str:
    """What an engine says that has to guess what pictures or sounds look like."""
    case = Trained(name, False, Strategy(pp=2, schedule="1f1b"))
    model, optimizer = model_of(case), torch.optim.SGD
    with pytest.raises(ConfigError) as refused:
        Engine(model, ModelLoss(), lambda parameters: optimizer(parameters, lr=RATE), JOB, case.strategy)
    return str(refused.value)


@pytest.mark.parametrize("name", ["vit", "whisper"])
def test_a_batch_that_cannot_be_guessed_is_asked_for(name: str) -> None:
    for text in run_ranks(2, without_example, name):
        assert "give an example of the batches that steps take: Engine(..., example=batch)" in text


@pytest.mark.parametrize("case", listed())
def test_families_train_as_in_one_process(case: Trained) -> None:
    wanted = run_one(run, case.reference)
    found = run_ranks(case.strategy.world_size, run, case, timeout_s=120)
    for joined in join(found):
        assert [step.report for step in joined.steps] == [step.report for step in found[0].steps]
        beyond = compare(joined, wanted, dtype="float64", optimizer="sgd", learning_rate=RATE)
        assert not beyond, show(beyond)
