"""Weights that rest on the host or on disk are on the device while a step computes with them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from meshwright.cost import StepMemory
from meshwright.cost.memory import RankMemory
from meshwright.spec import Job, ModelSpec, Offload, Strategy
from meshwright.spec.job import DTYPE_BYTES, Dtype
from tests.cost.flat import flat_model

UNIT = 8000
MODEL = flat_model(root=UNIT, layer=UNIT, layers=4)


def memory(compute: Dtype, dp: int, zero: int, optimizer: str, parameters: str, model: ModelSpec = MODEL) -> RankMemory:
    path = "/fast" if "disk" in (optimizer, parameters) else ""
    away = Offload(optimizer=optimizer, parameters=parameters, path=path)  # type: ignore[arg-type]  # names of tiers
    job = Job(global_batch=2 * dp, compute_dtype=compute)
    return StepMemory(model, job, Strategy(dp=dp, zero=zero, offload=away)).ranks[0]


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
@pytest.mark.parametrize(("dp", "zero"), [(1, 0), (1, 3), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_a_step_holds_the_weights_once_in_the_compute_dtype(compute: Dtype, dp: int, zero: int) -> None:
    """Whole below ZeRO-3 and without a shard group; with one, the root unit and another, and the share that rests."""
    c, whole = DTYPE_BYTES[compute], MODEL.parameters
    for optimizer, parameters in product(("device", "host", "disk"), ("device", "host", "disk")):
        rank = memory(compute, dp, zero, optimizer, parameters)
        most = rank.parameters + max(moment.gathered for moment in rank.moments())
        if (optimizer, parameters) == ("device", "device"):
            continue
        if zero == 3 and dp > 1:
            assert most == c * 2 * UNIT + (c * whole // dp if parameters == "device" else 0)
        elif parameters == "device" or optimizer != "device":
            assert most == c * whole, (optimizer, parameters)
        else:
            assert most >= c * whole


def test_frozen_weights_that_rest_on_the_host_are_counted_there() -> None:
    frozen = tuple(replace(block, frozen=block.tensors) for block in MODEL.blocks)
    model = replace(MODEL, blocks=frozen)
    rank = memory("float32", 4, 3, "host", "host", model)
    assert rank.host == 4 * model.parameters // 4
    assert max(moment.gradients for moment in rank.moments()) == 0
    assert max(moment.activations for moment in rank.moments()) == 0, "no gradient is made of a frozen weight"
