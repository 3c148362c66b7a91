"""Dropout draws the masks of one process, inside of blocks and between them, whichever stage they are on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf

from meshwright.measure.equality import Run, compare, join, record, show
from meshwright.runtime import Engine, ModelLoss
from meshwright.spec import Job, Strategy
from tests.harness.cases import Case, check, check_many, run_case
from tests.harness.hugging_face import ROWS, VOCABULARY, rows_of
from tests.harness.ranks import run_one, run_ranks

ONE = Case(model="gpt2-dropout", pp=2, microbatch=1)
PAIR = [
    replace(ONE, schedule="gpipe", accumulation=2, recompute="full"),
    replace(ONE, schedule="zb-h1", accumulation=3, tied=True, recompute="selective"),
    replace(ONE, schedule="interleaved-1f1b", virtual_stages=2, accumulation=4, stages=(2, 1, 1, 1)),
]
SHARDED = [
    replace(ONE, world=4, schedule="zb-v", virtual_stages=2, zero=3, accumulation=3, recompute="full"),
    replace(ONE, world=4, schedule="1f1b", zero=2, accumulation=2, stages=(4, 1), scope="local"),
]
SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "interleaved-zb", "zb-v", "dualpipev"]


@pytest.mark.parametrize("cases", [PAIR, SHARDED], ids=["whole", "sharded"])
def test_masks_do_not_depend_on_the_stages(cases: list[Case]) -> None:
    check_many(cases)
    with_dropout, without = (run_one(run_case, replace(cases[0], model=m).reference) for m in ("gpt2-dropout", "gpt2"))
    assert with_dropout.steps[0].loss != without.steps[0].loss


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("zero", "pp"), [(0, 2), (1, 2), (2, 2), (3, 2), (0, 4)])
def test_masks_of_all_schedules(schedule: str, recompute: str, zero: int, pp: int) -> None:
    virtual = 2 if schedule in ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "zb-v", "dualpipev") else 1
    place = {"world": 2 * pp if zero else pp, "pp": pp, "schedule": schedule, "virtual_stages": virtual}
    check(replace(ONE, **place, zero=zero, recompute=recompute, accumulation=2 * pp, layers=9 if pp == 4 else 5))


JOB = Job(global_batch=ROWS, param_dtype="float64", compute_dtype="float64", reduce_dtype="float64", seed=3)


def two_stacks(strategy: Strategy) -> Run:
    """T5 with dropout: beside its blocks it drops embeddings and outputs of its encoder and of its decoder."""
    config: dict[str, Any] = {"d_model": 12, "d_kv": 4, "d_ff": 23, "num_layers": 3, "num_heads": 3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=VOCABULARY,
                dropout_rate=0.3,
                decoder_start_token_id=0,
                pad_token_id=0,
                eos_token_id=1,
                use_cache=False,
                **config,
            )
        ).double()
    engine = Engine(model, ModelLoss(), lambda p: torch.optim.SGD(p, lr=0.1), JOB, strategy, measure_memory="never")
    return record(engine, [rows_of("t5", seed=s, dtype=torch.float64) for s in range(2)], float64=True)


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(pp=2, schedule="1f1b", stages=(2, 4), microbatch=2),
        Strategy(pp=3, schedule="gpipe", stages=(4, 1, 1), microbatch=2, recompute="full"),
        Strategy(pp=2, dp=2, zero=3, schedule="zb-v", stages=(1, 2, 2, 1)),
    ],
    ids=str,
)
def test_masks_between_the_blocks_of_two_stacks(strategy: Strategy) -> None:
    wanted = run_one(two_stacks, Strategy(microbatch=strategy.microbatch))
    for joined in join(run_ranks(strategy.world_size, two_stacks, strategy)):
        beyond = compare(joined, wanted, dtype="float64", optimizer="sgd", learning_rate=0.1)
        assert not beyond, show(beyond)
