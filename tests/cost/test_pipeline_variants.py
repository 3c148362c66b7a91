"""ZeRO under pipelining by variant, counted on real ranks: whole parameters and gradients in step, gathers and reduces.

P parameters of a rank's stage, d ranks of its shard group, U units, m microbatches; g bytes of a gradient.

| variant | parameters in step | gradients in step | gathers | reduces |
|---|---|---|---|---|
| Z1 | P | gP | U | U |
| Z2, every microbatch | P | gP/d and a unit | U | mU |
| Z2, windows of w | P | gP within a window, and gP/d | U | U m/w |
| Z3 a step | P | gP/d and a unit | U | mU |
| Z3 a chunk | P while the stage runs | gP/d and a unit | U a run | mU |
| Z3 a unit | the root unit and one more | gP/d and a unit | 2mU, or 3mU where the backward is split | mU |
"""

from __future__ import annotations

from functools import cache

import pytest

from meshwright.cost import StepMemory
from meshwright.spec import Job, Layout, parse_strategy
from tests.cost.counted import SEQUENCE, Counted, count, described
from tests.harness.ranks import run_ranks

M, D = 8, 2
VARIANTS = (
    "zero=1",
    "zero=2",
    "zero=2 reduce=window",
    "zero=3 gather=step",
    "zero=3 gather=chunk",
    "zero=3",
)
#: Of P: what padding and moments between two hooks may add.
NEAR = 0.02


def job() -> Job:
    return Job(global_batch=M * D, sequence=SEQUENCE)


@cache
def counted(schedule: str) -> list[dict[str, Counted]]:
    """What each of four ranks counted under every variant."""
    return run_ranks(4, _count_all, schedule, timeout_s=300)


def _count_all(schedule: str) -> dict[str, Counted]:
    return {
        variant: count("decoder", False, job(), parse_strategy(f"dp={D} pp=2 {variant} schedule={schedule}"), 1)
        for variant in VARIANTS
    }


def hold(schedule: str, variant: str) -> None:
    strategy = parse_strategy(f"dp={D} pp=2 {variant} schedule={schedule}")
    model = described("decoder", tied=False, layout=Layout.of(job(), strategy))
    step = StepMemory(model, job(), strategy)
    for rank in range(4):
        place = strategy.place(rank)["pp"]
        found, states = counted(schedule)[rank][variant], step.moments_of[place].states
        units, whole = len(states.wholes), 4 * sum(states.wholes)
        unit, root = 4 * max(states.wholes[1:]), 4 * states.wholes[0]
        by_unit = strategy.zero == 3 and strategy.gather == "unit"
        passes = 3 if schedule == "zb-h1" and place else 2
        gathers = passes * M * units if by_unit else units
        reduces = {"end": units, "window": units * M // strategy.pp, "microbatch": M * units}[strategy.reduce]
        assert (found.collectives["all_gather"], found.collectives["reduce_scatter"]) == (gathers, reduces)
        gathered, least = found.largest["gathered"], root + unit if by_unit else whole
        # Inside a gather the buffer it is received in and the gathered parameters are both there for a moment.
        assert (1 - NEAR) * least <= gathered <= (1 + NEAR) * (least + (unit if by_unit else 0))
        least = {"end": whole, "window": whole, "microbatch": whole // D}[strategy.reduce]
        kept = whole // D if strategy.reduce == "window" else 0
        assert (1 - NEAR) * least <= found.largest["gradients"] <= (1 + NEAR) * (least + kept + root + 1.5 * unit)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_holds_and_sends_what_its_row_says(variant: str) -> None:
    hold("1f1b", variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_weight_halves_gather_once_more(variant: str) -> None:
    hold("zb-h1", variant)
