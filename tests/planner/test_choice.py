"""The choice: pins are kept, the rest is planned, and every plan says why. (`test_search*.py` proves it the best.)"""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.planner import make_plan, pins_of
from meshwright.planner.objective import find_objective
from meshwright.planner.rule import rule_of
from meshwright.spec import Job, Plan, parse_assignments
from tests.planner.machines import EVEN, SMALL, cluster

JOB = Job(global_batch=12, sequence=64)
BIG = 2**40


def plan(devices: int, tensors_bytes: int, *pins: str, job: Job = JOB, executable: bool = True) -> Plan:
    assignments = parse_assignments(pins, option="--pin", bounds=True)
    shape = SMALL if executable else EVEN
    return make_plan(shape, cluster(devices, tensors_bytes), job, assignments, executable=executable)


def test_with_room_for_everything_nothing_recomputes_and_nothing_is_gathered_twice() -> None:
    made = plan(4, BIG)
    assert made.strategy.recompute == "none"
    assert made.strategy.zero < 3
    assert made.strategy.world_size == 4


def test_as_many_ranks_as_the_batch_allows_where_only_data_is_parallel() -> None:
    assert plan(5, BIG).strategy.dp == 4
    assert plan(5, BIG, job=Job(global_batch=7, sequence=64)).strategy.dp == 1
    assert plan(1, BIG).strategy.world_size == 1


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        (["zero=3"], {"zero": 3}),
        (["zero=1", "dp<=2"], {"dp": 2, "zero": 1}),
        (["zero=3", "shard=2"], {"zero": 3, "shard": 2}),
        (["zero=2 shard=1"], {"zero": 2, "shard": 1}),
        (["zero=3 dp=1"], {"dp": 1, "zero": 3}),
        (["shard=0", "zero=1", "dp=4"], {"zero": 1, "shard": 4}),
        (["microbatch=2", "dp=3"], {"dp": 3, "microbatch": 2}),
        (["recompute=selective"], {"recompute": "selective"}),
        (["recompute=full", "recompute_blocks>=2"], {"recompute": "full", "recompute_blocks": 2}),
        (["unit_blocks=2", "prefetch=1"], {"zero": 3, "unit_blocks": 2, "prefetch": 1}),
        (["stages=[5]"], {"stages": (5,)}),
        (["gather=unit"], {"zero": 3}),
        (
            ["mesh_order=pp,dp_shard,dp_replicate,cp,tp"],
            {"mesh_order": ("pp", "dp_shard", "dp_replicate", "cp", "tp")},
        ),
    ],
)
def test_pins_are_kept_and_the_rest_is_planned(pins: list[str], expected: dict[str, object]) -> None:
    made = plan(4, BIG, *pins)
    assert {name: getattr(made.strategy, name) for name in expected} == expected
    assert set(made.pinned) == {pin.key for pin in parse_assignments(pins, option="", bounds=True)}


@pytest.mark.parametrize("pins", [["tp=2"], ["pp=2"], ["cp=2"], ["pp<=2", "tp>=2"], ["schedule=zb-h1", "pp=2"]])
def test_model_parallel_pins_are_kept_too(pins: list[str]) -> None:
    strategy = plan(4, BIG, *pins, executable=False).strategy
    assert all(pin.allows(getattr(strategy, pin.key)) for pin in parse_assignments(pins, option="", bounds=True))


@pytest.mark.parametrize(
    "text",
    [
        "dp=4 zero=0 microbatch=3",
        "dp=4 zero=3 shard=2 prefetch=1 recompute=selective",
        "dp=2 zero=2 microbatch=6 recompute=full recompute_blocks=3",
        "dp=2 zero=1 tp=2 sequence_parallel=true",
        "dp=1 zero=0 pp=2 schedule=1f1b stages=3,2 microbatch=2",
        "dp=1 zero=0 pp=2 schedule=interleaved-1f1b virtual_stages=2",
    ],
)
def test_the_pins_of_a_strategy_leave_only_that_strategy(text: str) -> None:
    made = make_plan(EVEN, cluster(4, BIG), JOB, pins_of(text))
    assert str(made.strategy) == text
    assert make_plan(EVEN, cluster(4, BIG), JOB, pins_of(made.strategy)).strategy == made.strategy


def test_the_job_says_which_recomputation_is_allowed() -> None:
    job = Job(global_batch=12, sequence=64, allow_recompute=("selective",))
    assert plan(2, BIG, job=job).strategy.recompute == "selective"


def test_a_plan_says_why() -> None:
    made = plan(4, BIG)
    assert made.provenance.rule == rule_of(find_objective("time"))
    assert "4 x core" in made.provenance.cluster
    assert made.runner_up
    steps = [made.cost.step_s, *(other.step_s for other in made.runner_up)]
    assert steps == sorted(steps)
    for other in made.runner_up:
        assert other.reason
        assert sum(other.terms.values()) == pytest.approx(other.step_s, rel=1e-6)
        assert other.total_bytes <= made.usable_bytes
    assert sum(made.cost.terms.values()) == pytest.approx(made.cost.step_s, rel=1e-6)


def test_what_does_not_fit_is_named_with_its_bytes() -> None:
    pins = ("dp=4", "microbatch=3", "recompute=none")
    tight = plan(4, plan(4, BIG, "zero=0", *pins).cost.peak_bytes - 1, *pins)
    zero_0 = next(entry for entry in tight.rejected if "zero=0" in entry.strategy)
    assert "does not fit" in zero_0.reason
    assert "over on the device" in zero_0.reason


def test_as_many_strategies_are_ranked_as_asked() -> None:
    for most in (1, 3):
        made = make_plan(SMALL, cluster(4, BIG), JOB, most=most)
        assert len(made.runner_up) == most - 1


def test_the_fewest_devices_that_fit() -> None:
    one = make_plan(SMALL, cluster(1, BIG), JOB)
    assert make_plan(SMALL, cluster(4, BIG), JOB, objective="devices").strategy.world_size == 1
    least = min(one.cost.peak_bytes, 200_000)
    few = make_plan(SMALL, cluster(4, least), JOB, objective="devices", executable=True)
    for devices in range(1, few.strategy.world_size):
        with pytest.raises(Exception, match="nothing fits"):
            make_plan(SMALL, cluster(devices, least), JOB, executable=True)


def test_the_same_question_has_the_same_answer() -> None:
    assert plan(4, 400_000) == plan(4, 400_000)


def test_a_strategy_that_is_not_executable_is_marked() -> None:
    made = plan(4, BIG, "cp=2", executable=False)
    assert not made.executable
    assert plan(4, BIG).executable
    piped = plan(4, BIG, "pp=2")
    assert piped.executable
    assert piped.strategy.schedule != "single"


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; from meshwright.planner import make_plan; from meshwright.report import plan_view;"
        "from meshwright.spec import DecoderShape, Job, this_machine;"
        "plan_view(make_plan(DecoderShape(), this_machine(), Job()));"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
