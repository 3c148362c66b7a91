"""The reference itself: the engine in one process is plain PyTorch, and does not depend on how it is launched."""

from dataclasses import replace

import pytest

from meshwright.measure.equality.tolerance import show
from tests.harness.cases import Case, assert_equal, check, differences, run_case
from tests.harness.plain import run_plain
from tests.harness.ranks import run_one

PLAIN = [
    *(
        Case(world=1, model=model, accumulation=4, clip=0.1)
        for model in ("decoder", "decoder-10", "llama", "gpt2", "mlp")
    ),
    *(Case(world=1, model=model, accumulation=3, tied=True) for model in ("decoder", "llama", "gpt2", "mlp")),
    *(
        Case(world=1, source="module", optimizer=optimizer, accumulation=2)
        for optimizer in ("adamw", "adamw-default-eps")
    ),
    Case(world=1, model="gpt2", tied=True, source="module", valid="all", clip=0.1),
    Case(world=1, halving=True, optimizer="adamw"),
    Case(world=1, model="mlp-unused", optimizer="adamw", accumulation=2, source="module"),
    Case(world=1, model="mlp-branches", optimizer="adamw", accumulation=4),
    Case(world=1, dtype="float32", accumulation=4, clip=0.1),
    Case(world=1, dtype="float32", model="llama", tied=True, accumulation=3, source="module"),
]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_engine_in_one_process_is_plain_pytorch(case: Case) -> None:
    reference = run_one(run_case, case)
    plain = run_one(run_plain, case, reference.initial)
    found = differences(case, reference, plain)
    assert not found, show(found)


def test_microbatches_in_one_process_are_one_batch() -> None:
    case = Case(world=1, accumulation=4, clip=0.1)
    reference = run_one(run_case, case)
    found = differences(case, reference, run_one(run_plain, case, reference.initial, True))
    assert not found, show(found)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_group_of_one_rank_is_one_process(zero: int) -> None:
    check(Case(world=1, zero=zero, accumulation=3, recompute="full"))


def test_a_stage_without_a_group_is_one_process() -> None:
    case = Case(world=1, zero=3, prefetch=1, unit_blocks=2, recompute="selective", recompute_blocks=2, accumulation=2)
    assert_equal(case, [run_one(run_case, case)], run_one(run_case, case.reference))


def test_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (
        run_one(run_case, Case(world=1, seed=seed, rate=rate)) for seed, rate in ((1, 0.1), (1, 0.0), (2, 0.1))
    )
    assert all((first.initial[name] == again.initial[name]).all() for name in first.initial)
    assert any((first.initial[name] != other.initial[name]).any() for name in first.initial)


def test_a_rate_of_zero_moves_nothing() -> None:
    run = run_one(run_case, replace(Case(world=1), rate=0.0))
    assert all(not update.any() for step in run.steps for update in step.updates.values())
