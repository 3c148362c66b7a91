"""What cannot be planned: one clear error with the values, the reason and the remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost import CATEGORIES, price
from meshwright.errors import ConfigError, InfeasiblePlan, MeshwrightError, UnsupportedCombination
from meshwright.planner import make_plan
from meshwright.spec import DecoderShape, Job, Strategy, describe, parse_assignments
from meshwright.spec.units import show_bytes
from tests.planner.machines import EVEN, SMALL, cluster

JOB = Job(global_batch=12, sequence=64)
BIG = 2**40


def refused(
    *pins: str, devices: int = 2, job: Job = JOB, tensors_bytes: int = BIG, shape: DecoderShape = SMALL
) -> MeshwrightError:
    machines = cluster(devices, tensors_bytes)
    with pytest.raises(MeshwrightError) as caught:
        make_plan(shape, machines, job, parse_assignments(pins, option="--pin", bounds=True), executable=True)
    return caught.value


@pytest.mark.parametrize(
    ("pins", "what"),
    [
        (["zero=4"], "zero=4 is not a ZeRO stage"),
        (["zero=-1"], "zero=-1 is not a ZeRO stage"),
        (["dp=0"], "dp=0 is not a positive number"),
        (["tp=0"], "tp=0 is not a positive number"),
        (["microbatch=0"], "microbatch=0 is not a positive number"),
        (["dp=4"], "dp=4 pinned but test machine has 2 devices"),
        (["dp>=3"], "dp>=3 pinned but test machine has 2 devices"),
        (["tp=4"], "tp=4 pinned but test machine has 2 devices"),
        (["shard=3"], "shard=3 does not divide dp="),
        (["dp=2", "shard=3", "zero=2"], "shard=3 does not divide dp=2"),
        (["zero=0", "shard=2"], "shard=2 has no effect with zero=0"),
        (["prefetch=1", "zero=2"], "prefetch=1 has no effect with zero=2"),
        (["zero=3", "reduce=end"], "zero=3 with reduce=end is not ZeRO-3"),
        (["recompute=fully"], "recompute=fully is not known"),
        (["schedule=1f1"], "schedule=1f1 is not known"),
        (["recompute_blocks=6", "recompute=full"], "recompute_blocks=6 pinned but the model has 5 blocks"),
        (["recompute_blocks=1", "recompute=none"], "recompute_blocks=1 has no effect with recompute=none"),
        (["stages=[3]"], "stages=3 pinned but the model has 5 blocks"),
        (['stages=["a"]'], "strategy.stages=['a'] has the wrong type"),
        (["stages=3"], "strategy.stages=3 has the wrong type"),
        (["dp=x"], "strategy.dp='x' has the wrong type"),
        (["zerro=1"], "unknown key strategy.zerro"),
        (["zero=1", "zero=2"], "--pin contradicts itself: zero=1 and zero=2"),
        (["zero<=1", "zero=2"], "--pin contradicts itself: zero<=1 and zero=2"),
        (["zero>=2", "zero<=1"], "--pin contradicts itself: zero>=2 and zero<=1"),
        (["zero=x", "zero>=1"], "--pin contradicts itself: zero=x and zero>=1"),
        (["zero>=4"], "no strategy satisfies zero>=4"),
        (["microbatch>=7", "dp=2"], "microbatch>=7 pinned, which no microbatch satisfies"),
        (["offload.path=/x"], "offload.path=/x has no effect"),
    ],
)
def test_pins_that_cannot_be_right(pins: list[str], what: str) -> None:
    error = refused(*pins)
    assert type(error) is ConfigError
    assert error.what.startswith(what)
    assert error.fix


@pytest.mark.parametrize(
    ("pins", "what"),
    [
        (["cp=2"], "context parallelism (cp=2)"),
        (["ep=2"], "ep=2, but decoder has no experts"),
        (["offload.optimizer=host"], "offload to host or disk"),
        (["gather=step", "pp=1"], "gather=step"),
    ],
)
def test_legal_pins_that_are_not_executable_yet(pins: list[str], what: str) -> None:
    error = refused(*pins, shape=EVEN)
    assert type(error) is UnsupportedCombination
    assert error.what.startswith(what)


def test_a_job_that_is_not_executable_yet() -> None:
    job = Job(global_batch=12, sequence=64, param_dtype="float16", compute_dtype="float16")
    assert isinstance(refused(job=job), UnsupportedCombination)


def test_a_policy_that_the_job_does_not_allow() -> None:
    error = refused("recompute=full", job=Job(global_batch=12, sequence=64, allow_recompute=("none",)))
    assert "job.allow_recompute=none" in error.what


def test_a_sequence_that_is_too_long() -> None:
    assert "129 tokens" in refused(job=Job(global_batch=12, sequence=129)).what


def test_C2_a_global_batch_that_does_not_divide_says_which_number_came_from_where_and_the_nearest_that_do() -> None:
    """Reported: "256 != 4 * 8 * 1" on 7 GPUs; right: which of the numbers was derived, and 252 or 259."""
    job = Job(global_batch=256, sequence=64)
    pinned = refused("dp=7", devices=7, job=job)
    assert "global_batch=256" in pinned.what
    assert "dp=7 (pinned)" in pinned.why
    assert "accumulation (derived)" in pinned.why
    assert "252 or 259" in pinned.fix
    assert "1 or 2 or 4" in pinned.fix
    # Where nothing is pinned the planner takes the ranks that divide, and says what all seven would need.
    pins = parse_assignments(["tp=1", "pp=1"], option="--pin")
    made = make_plan(SMALL, cluster(7, BIG), job, pins, executable=True)
    assert made.strategy.dp == 4
    assert make_plan(SMALL, cluster(7, BIG), job, executable=True).strategy.world_size == 6  # dp=2 tp=3
    left_out = next(entry for entry in made.rejected if entry.strategy == "dp=7,6,5")
    assert "252 or 259 would use 7 ranks" in left_out.reason
    # A microbatch that divides nothing.
    error = refused("microbatch=5", devices=2, job=Job(global_batch=16, sequence=64))
    assert "dp=2 (derived from the 2 devices of test machine)" in error.why
    assert "microbatch=5 (pinned)" in error.why
    assert "10 or 20" in error.fix


def test_nothing_fits_says_what_is_short_by_how_much_and_what_would_help() -> None:
    model = describe(SMALL, sequence=64, compute_dtype="float32")
    pins = ("dp=2", "zero=0", "microbatch=6", "recompute=none")
    cost = price(model, cluster(2, BIG), JOB, Strategy(dp=2, microbatch=6))
    error = refused(*pins, tensors_bytes=cost.peak_bytes - 50_000)
    assert isinstance(error, InfeasiblePlan)
    assert f"short by {show_bytes(50_000)}" in error.what
    assert "dp=2 zero=0 microbatch=6" in error.what
    assert all(pin in error.what for pin in pins)
    for category in CATEGORIES:
        named = f"{category} {show_bytes(cost.in_step[category])}" in error.why
        assert named == (cost.in_step[category] > 0)
    assert f"needs {show_bytes(cost.total_bytes)}" in error.why
    assert "leave the pin" in error.fix
    assert "fits" in error.fix
    assert "devices with at least" in error.fix


def test_the_nearest_plan_is_shown_where_nothing_is_pinned() -> None:
    error = refused(tensors_bytes=60_000)
    assert isinstance(error, InfeasiblePlan)
    assert "tp=2 sequence_parallel=true" in error.what
    three = replace(SMALL, hidden_size=12, num_attention_heads=3, num_key_value_heads=3)  # two ranks do not share them
    error = refused(tensors_bytes=10_000, shape=three)
    assert isinstance(error, InfeasiblePlan)
    assert "zero=3" in error.what
    assert "microbatch=1" not in error.what  # it is the default
    assert "divided by the shard group" in error.why
    assert "A plan uses at most 100% of the" in error.why


def test_devices_smaller_than_the_process_itself() -> None:
    error = refused(tensors_bytes=-200 * 2**20)
    assert isinstance(error, InfeasiblePlan)
    assert "of 100 MiB" in error.why
    assert "short by 200 MiB" in error.what
