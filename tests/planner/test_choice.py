"""The choice: by the stated rule, the best of all legal strategies, and never worse with more memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import price
from meshwright.errors import InfeasiblePlan
from meshwright.planner import RULE, make_plan, pins_of
from meshwright.planner.rule import Candidate, rank
from meshwright.spec import Job, Plan, Strategy, describe, parse_assignments
from meshwright.spec.job import Dtype
from tests.planner.machines import SMALL, cluster

JOB = Job(global_batch=12, sequence=64)
BIG = 2**40


def plan(devices: int, tensors_bytes: int, *pins: str, job: Job = JOB) -> Plan:
    return make_plan(SMALL, cluster(devices, tensors_bytes), job, parse_assignments(pins, option="--pin", bounds=True))


def all_legal(devices: int) -> Iterator[Strategy]:
    """Every strategy of the space, one by one."""
    layers = SMALL.num_hidden_layers
    for dp in (n for n in range(1, devices + 1) if JOB.global_batch % n == 0):
        for zero in range(4):
            for shard in (n for n in range(1, dp + 1) if dp % n == 0 and (zero or n == 1)):
                for microbatch in (n for n in range(1, 13) if (JOB.global_batch // dp) % n == 0):
                    for recompute, blocks in [("none", 0), ("selective", 0), *(("full", n) for n in range(layers))]:
                        yield Strategy(
                            dp=dp,
                            zero=zero,
                            shard=shard,
                            microbatch=microbatch,
                            recompute=recompute,  # type: ignore[arg-type]  # one of the three policies
                            recompute_blocks=blocks,
                        )


@cache
def priced(devices: int, dtype: Dtype) -> list[Candidate]:
    job = Job(global_batch=12, sequence=64, compute_dtype=dtype)
    model = describe(SMALL, sequence=64, compute_dtype=dtype)
    return [rank(model, job, strategy, price(model, job, strategy)) for strategy in all_legal(devices)]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 3, 4]), st.sampled_from(["float32", "bfloat16"]), st.floats(0, 1.05))
def test_the_choice_is_the_best_of_all_legal_strategies(devices: int, dtype: Dtype, place: float) -> None:
    candidates = priced(devices, dtype)
    low, high = (f(c.cost.peak_bytes for c in candidates) for f in (min, max))
    budget = int(low * 0.98 + place * (high - low * 0.98))
    fitting = [c for c in candidates if c.cost.peak_bytes <= budget]
    job = Job(global_batch=12, sequence=64, compute_dtype=dtype)
    if not fitting:
        with pytest.raises(InfeasiblePlan):
            plan(devices, budget, job=job)
        return
    best = min(fitting, key=lambda c: (-c.strategy.dp, c.key))
    assert plan(devices, budget, job=job).strategy == best.strategy


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1))
def test_more_memory_never_gives_a_worse_plan(first: float, second: float) -> None:
    candidates = priced(4, "float32")
    low, high = (f(c.cost.peak_bytes for c in candidates) for f in (min, max))
    small, large = (int(low + place * (high - low)) for place in sorted((first, second)))
    model = describe(SMALL, sequence=64, compute_dtype="float32")

    def order(budget: int) -> tuple[int, tuple[int, ...]]:
        made = plan(4, budget)
        return -made.strategy.dp, rank(model, JOB, made.strategy, made.cost).key

    assert order(large) <= order(small)


def test_with_room_for_everything_nothing_is_sharded_and_nothing_recomputed() -> None:
    made = plan(4, BIG)
    assert made.strategy == Strategy(dp=4, microbatch=3)
    assert made.cost.collectives == {"all_reduce": 6, "statistics": 1}


def test_as_many_ranks_as_the_batch_allows() -> None:
    assert plan(5, BIG).strategy.dp == 4
    assert plan(5, BIG, job=Job(global_batch=7, sequence=64)).strategy.dp == 1
    assert plan(1, BIG).strategy.world_size == 1


def test_only_as_many_blocks_recompute_as_must() -> None:
    def peak(text: str) -> int:
        strategy = next(s for s in all_legal(1) if str(s) == text)
        return price(describe(SMALL, sequence=64, compute_dtype="float32"), JOB, strategy).peak_bytes

    pins = ("dp=1", "microbatch=12", "recompute=full")
    for blocks in (1, 2, 3):
        text = f"dp=1 zero=0 microbatch=12 recompute=full recompute_blocks={blocks}"
        assert str(plan(1, peak(text), *pins).strategy) == text
    assert plan(1, BIG, *pins, "recompute_blocks>=2").strategy.recompute_blocks == 2
    assert plan(1, BIG, *pins, "recompute_blocks=0").strategy.recompute_blocks == 0


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        (["zero=3"], "dp=4 zero=3 microbatch=3"),
        (["zero>=1", "dp<=2"], "dp=2 zero=1 microbatch=6"),
        (["zero=3", "shard=2"], "dp=4 zero=3 shard=2 microbatch=3"),
        (["zero=2 shard=1"], "dp=4 zero=2 shard=1 microbatch=3"),
        (["zero=3 dp=1"], "dp=1 zero=3 microbatch=12"),
        (["shard=0", "zero=1"], "dp=4 zero=1 microbatch=3"),
        (["microbatch<=2"], "dp=4 zero=0"),
        (["microbatch=2", "dp=3"], "dp=3 zero=0 microbatch=2"),
        (["recompute=selective"], "dp=4 zero=0 microbatch=3 recompute=selective"),
        (["unit_blocks=2", "prefetch=1"], "dp=4 zero=3 unit_blocks=2 prefetch=1 microbatch=3"),
        (["prefetch>=1"], "dp=4 zero=3 prefetch=1 microbatch=3"),
        (["stages=[5]"], "dp=4 zero=0 stages=[5] microbatch=3"),
        (["gather=unit"], "dp=4 zero=3 microbatch=3"),
        (
            ["mesh_order=pp,dp_shard,dp_replicate,cp,tp"],
            "dp=4 zero=0 mesh_order=pp,dp_shard,dp_replicate,cp,tp microbatch=3",
        ),
    ],
)
def test_pins_are_kept_and_the_rest_is_planned(pins: list[str], expected: str) -> None:
    made = plan(4, BIG, *pins)
    assert str(made.strategy) == expected
    assert set(made.pinned) == {pin.key for pin in parse_assignments(pins, option="", bounds=True)}


@pytest.mark.parametrize("index", range(0, 300, 7))
def test_the_pins_of_a_strategy_leave_only_that_strategy(index: int) -> None:
    strategies = list(all_legal(4))
    strategy = strategies[index * len(strategies) // 300]
    for given_as in (strategy, str(strategy)):
        assert make_plan(SMALL, cluster(4, BIG), JOB, pins_of(given_as)).strategy == strategy


def test_the_job_says_which_recomputation_is_allowed() -> None:
    job = Job(global_batch=12, sequence=64, allow_recompute=("selective",))
    assert plan(2, BIG, job=job).strategy.recompute == "selective"


def test_a_plan_says_why() -> None:
    made = plan(4, BIG)
    assert made.provenance.rule == RULE
    assert "4 x core" in made.provenance.cluster
    assert made.runner_up
    families = [text.strategy.split(" microbatch")[0] for text in made.runner_up[1:]]
    assert len(families) == len(set(families))
    assert all(other.reason and sum(other.in_step.values()) == other.peak_bytes for other in made.runner_up)
    reasons = {entry.strategy: entry.reason for entry in made.rejected}
    assert reasons["dp=3,2,1"] == "fewer ranks than dp=4, which fits"
    tight = plan(4, made.cost.peak_bytes - 1, "microbatch=3", "recompute=none")
    assert tight.strategy.zero > 0
    zero_0 = next(entry for entry in tight.rejected if entry.strategy == "dp=4 zero=0 microbatch=3")
    assert "needs" in zero_0.reason
    assert "activations" in zero_0.reason


def test_the_same_question_has_the_same_answer() -> None:
    assert plan(4, 400_000) == plan(4, 400_000)


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; from meshwright.planner import make_plan; from meshwright.report import plan_view;"
        "from meshwright.spec import DecoderShape, Job, this_machine;"
        "plan_view(make_plan(DecoderShape(), this_machine(), Job()));"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
