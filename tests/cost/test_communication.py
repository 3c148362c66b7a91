"""Collectives of a step by the design's table: U units, m microbatches."""

from __future__ import annotations

from itertools import product

import pytest

from meshwright.spec import DecoderShape, Job, Strategy, describe
from meshwright.spec.job import Dtype
from tests.cost.cores import price
from tests.cost.flat import flat_model

LAYERS = 5


@pytest.mark.parametrize(("unit_blocks", "microbatches"), list(product([1, 2, 7], [1, 3])))
def test_counts_are_those_of_the_table(unit_blocks: int, microbatches: int) -> None:
    model = describe(DecoderShape(num_hidden_layers=LAYERS), sequence=8, compute_dtype="float32")
    units, m = 1 + -(-LAYERS // unit_blocks), microbatches
    job = Job(global_batch=4 * m, sequence=8)

    def counts(**strategy: int) -> dict[str, int]:
        return price(model, job, Strategy(unit_blocks=unit_blocks, **strategy)).collectives  # type: ignore[arg-type]

    assert counts(dp=1) == {}
    assert counts(dp=1, zero=3) == {}
    assert counts(dp=4) == {"all_reduce": units, "statistics": 1}
    assert counts(dp=4, zero=2, shard=1) == {"all_reduce": units, "statistics": 1}
    assert counts(dp=4, zero=1) == {"all_gather": units, "reduce_scatter": units, "statistics": 1}
    assert counts(dp=4, zero=2) == {"all_gather": units, "reduce_scatter": m * units, "statistics": 1}
    assert counts(dp=4, zero=3) == {"all_gather": 2 * m * units, "reduce_scatter": m * units, "statistics": 1}
    hybrid = {"all_gather": 2 * m * units, "reduce_scatter": m * units, "all_reduce": units, "statistics": 1}
    assert counts(dp=4, zero=3, shard=2) == hybrid


@pytest.mark.parametrize(("compute", "c"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_are_those_of_whole_messages(compute: Dtype, c: int) -> None:
    model = flat_model(root=4000, layer=8000, layers=LAYERS)
    p, job = model.parameters, Job(global_batch=12, compute_dtype=compute)
    statistics = 8 * (3 + 1 + LAYERS)
    assert price(model, job, Strategy(dp=4)).collective_bytes == {"all_reduce": 4 * p, "statistics": statistics}
    sharded = price(model, job, Strategy(dp=4, zero=3, shard=2)).collective_bytes
    assert sharded == {
        "all_gather": 2 * 3 * c * p,
        "reduce_scatter": 3 * 4 * p,
        "all_reduce": 4 * p // 2,
        "statistics": statistics,
    }


def test_ranks_of_context_parallelism_sum_gradients_and_share_states() -> None:
    model = flat_model(root=4, layer=8, layers=LAYERS)
    job, units = Job(global_batch=3), 1 + LAYERS

    def counts(zero: int) -> dict[str, int]:
        return price(model, job, Strategy(cp=2, zero=zero)).collectives

    assert counts(0) == {"all_reduce": units, "statistics": 1}
    assert counts(1) == {"all_gather": units, "reduce_scatter": units, "statistics": 1}
    assert counts(3) == {"all_gather": 2 * 3 * units, "reduce_scatter": 3 * units, "statistics": 1}


def test_bytes_hold_the_padding() -> None:
    model = flat_model(root=5, layer=7, layers=2)
    cost = price(model, Job(global_batch=2), Strategy(dp=2, zero=1))
    assert cost.collective_bytes["all_gather"] == 4 * (6 + 8 + 8)


def test_a_root_unit_without_parameters_is_no_unit() -> None:
    model = flat_model(root=0, layer=8, layers=3)
    assert price(model, Job(global_batch=2), Strategy(dp=2)).collectives["all_reduce"] == 3
