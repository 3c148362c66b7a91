"""Dropout draws the same masks in every layout and replays them in recompute."""

from dataclasses import replace

import pytest

from tests.harness.cases import Case, build_engine, check, run_case
from tests.harness.ranks import run_one

LAYOUTS = [
    Case(model="gpt2-dropout", world=2, zero=0, accumulation=3),
    Case(model="gpt2-dropout", world=2, zero=1, accumulation=3, recompute="selective"),
    Case(model="gpt2-dropout", world=3, zero=2, accumulation=2, recompute="full"),
    Case(model="gpt2-dropout", world=4, zero=3, shard=2, accumulation=1, recompute="full", recompute_blocks=2),
    Case(model="gpt2-dropout", world=2, zero=3, accumulation=2, prefetch=2, tied=True, recompute="full", scope="local"),
    Case(model="gpt2-dropout", world=1, accumulation=2, recompute="full", unit_blocks=2),
    Case(model="gpt2-dropout", world=5, zero=3, unit_blocks=2, dtype="float32", recompute="selective"),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_masks_do_not_depend_on_the_layout(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_masks_of_all_layouts(world: int, zero: int, recompute: str) -> None:
    check(Case(model="gpt2-dropout", world=world, zero=zero, accumulation=2, recompute=recompute))


def test_masks_depend_on_seed_step_and_microbatch() -> None:
    """The check above has power: dropout is on, and it changes with everything that its stream is named after."""
    with_dropout = run_one(run_case, Case(model="gpt2-dropout", world=1, rate=0.0, accumulation=2))
    without = run_one(run_case, Case(model="gpt2", world=1, rate=0.0, accumulation=2))
    assert [step.loss for step in with_dropout.steps] != [step.loss for step in without.steps]
    repeated = run_one(run_same_batch, Case(model="gpt2-dropout", world=1, rate=0.0))
    assert len(set(repeated)) == len(repeated), "two microbatches or steps had the same masks"


def run_same_batch(case: Case) -> list[float]:
    """Losses of steps whose two microbatches are one and the same, one counted in each step."""
    losses = []
    for counted in (0, 1):
        engine = build_engine(replace(case, accumulation=2))
        batch = case.batch(0)
        ids = batch["input_ids"].repeat(2, 1)
        labels = batch["labels"].repeat(2, 1)
        rows = batch["labels"].shape[0]
        labels[(1 - counted) * rows : (2 - counted) * rows] = -100
        losses += [engine.step({"input_ids": ids, "labels": labels}).loss for _ in range(2)]
    return losses
