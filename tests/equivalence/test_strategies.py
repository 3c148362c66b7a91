"""Every strategy gives the numbers of one process: loss, norms, each gradient and each update, over three steps.

`make test` takes a short list in which every pair of options occurs together; `make test-all` the whole lattice.
"""

import pytest

from tests.equivalence.lattice import as_case, layouts, short_list, strategies
from tests.harness.cases import Case, check, check_many
from tests.harness.pairwise import Row

MODELS = ("decoder", "decoder-10", "llama", "gpt2", "mlp")


@pytest.mark.parametrize("case", short_list(), ids=str)
def test_pairs_of_options(case: Case) -> None:
    reference = check(case)
    for step in reference.steps:
        assert (step.clipped_norm < step.grad_norm) == bool(case.clip), "the case does not clip where it should"


@pytest.mark.parametrize(
    ("world", "shard"),
    [(4, 2), pytest.param(8, 2, marks=pytest.mark.slow), pytest.param(8, 4, marks=pytest.mark.slow)],
)
def test_hybrid_groups_reduce_every_microbatch_and_all_reduce_once(world: int, shard: int) -> None:
    check_many([Case(world=world, zero=zero, shard=shard, accumulation=3, tied=True, clip=0.1) for zero in (1, 2, 3)])


def layout_name(row: Row) -> str:
    return f"{row['world']}-{row['zero']}-{row['shard']}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", layouts(), ids=layout_name)
def test_whole_lattice(layout: Row) -> None:
    check_many([as_case(layout | strategy) for strategy in strategies()], timeout_s=1500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", layouts(), ids=layout_name)
def test_lattice_in_float32(layout: Row) -> None:
    chosen = [strategy for strategy in strategies() if strategy["clip"] and strategy["tied"]]
    check_many([as_case(layout | strategy | {"dtype": "float32"}) for strategy in chosen], timeout_s=1500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", layouts(), ids=layout_name)
def test_all_models_and_optimizers(layout: Row) -> None:
    combined = [
        Case(
            **layout,
            model=model,
            optimizer=optimizer,
            source="module" if optimizer == "adamw" else "builder",
            tied=model != "decoder-10",
            accumulation=3,
            clip=0.1,
        )
        for model in MODELS
        for optimizer in ("sgd", "adamw", "adamw-default-eps")
    ]
    check_many(combined, timeout_s=1500)
