"""The step of a plan as a timeline: what its price was made of, action by action."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright.cost.simulated import simulated_step, simulated_timeline
from meshwright.cost.time import StepTime
from meshwright.errors import ConfigError
from meshwright.schedule import COMPUTE, Span, Timeline
from meshwright.spec import Job, Layout, Strategy
from meshwright.spec.catalogue import find_model
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.decoder import described
from tests.planner.machines import EVEN, SMALL
from tests.report.timelines import STRATEGIES, planned, step

BOTH = pytest.mark.parametrize("machines", ["8xH100-80GB:2@100Gb", "cores"])
EVERY = pytest.mark.parametrize("strategy", STRATEGIES)


@BOTH
@EVERY
def test_the_timeline_is_what_the_simulation_played(strategy: str, machines: str) -> None:
    plan, found = planned(strategy, machines), step(strategy, machines)
    model = described(SMALL).at(Layout.of(plan.job, plan.strategy))
    time = StepTime(model, plan.cluster, plan.job, plan.strategy)
    played, timeline = time.played(), found.timeline
    assert timeline.makespan_s == played.makespan_s
    assert timeline.busy_s == pytest.approx(played.busy_s, rel=1e-12)
    assert timeline.idle_s == pytest.approx(played.idle_s, rel=1e-9, abs=1e-12 * played.makespan_s)
    assert timeline.bubble == pytest.approx(played.bubble_fraction, rel=1e-9, abs=1e-12)
    for rank, spans in enumerate(timeline.ranks):
        actions = [span for span in spans if span.kind != "after"]
        assert [span.start_s for span in actions] == played.starts_s[rank]
        assert [span.end_s for span in actions] == played.ends_s[rank]
        assert {span.rank for span in spans} == {rank}


@BOTH
@EVERY
def test_the_step_is_the_plan_s(strategy: str, machines: str) -> None:
    """Every microbatch played; the search leaves out rounds that repeat themselves, which is within 2%."""
    plan, found = planned(strategy, machines), step(strategy, machines)
    assert found.as_planned
    assert found.priced_s == pytest.approx(plan.cost.step_s, rel=1e-12)
    exact = "1f1b" in strategy.split("schedule=")[-1].split()[0:1] or "pp" not in strategy
    assert found.timeline.end_s == pytest.approx(plan.cost.step_s, rel=1e-9 if exact else 0.02)


@BOTH
@EVERY
def test_a_rank_computes_one_thing_at_a_time(strategy: str, machines: str) -> None:
    for spans in step(strategy, machines).timeline.ranks:
        computes = [span for span in spans if span.row == "compute"]
        assert computes
        assert all(before.end_s <= after.start_s for before, after in pairwise(computes))
        assert all(0 <= span.waits_s <= span.length_s for span in computes)


def test_what_waits_for_parameters_is_idle() -> None:
    assert not any(span.waits_s for span in step("pp=4 schedule=gpipe").timeline)
    cluster, job = parse_cluster("1xH100-80GB:4@1Gb"), Job(global_batch=4, sequence=512, compute_dtype="bfloat16")
    strategy = Strategy(dp=4, zero=3, prefetch=1)
    time = StepTime(find_model("llama-3-8b").at(Layout.of(job, strategy)), cluster, job, strategy)
    timeline = simulated_timeline(time)
    waits = sum(span.waits_s for span in timeline.ranks[0])
    assert waits > 0.4 * timeline.makespan_s
    assert timeline.bubble == pytest.approx(time.played().bubble_fraction)
    assert timeline.bubble * timeline.makespan_s > waits


def test_the_rest_of_the_step_comes_after_the_schedule_on_every_rank() -> None:
    timeline = step("pp=3 schedule=1f1b dp=2 zero=1").timeline
    for spans in timeline.ranks:
        (last,) = [span for span in spans if span.kind == "after"]
        assert (last.start_s, last.end_s) == (timeline.makespan_s, timeline.end_s)
        assert last.stage is last.microbatch is None


def test_every_microbatch_of_every_stage_is_there() -> None:
    timeline = step("pp=2 dp=2 schedule=interleaved-1f1b virtual_stages=2 zero=3 prefetch=1").timeline
    assert timeline.microbatches == 24
    assert timeline.stages == ((0, 2), (1, 3))
    for kind in ("forward", "backward"):
        there = sorted((span.stage, span.microbatch) for span in timeline if span.kind == kind)
        assert there == [(stage, microbatch) for stage in range(4) for microbatch in range(24)]


def test_a_plan_is_drawn_with_its_own_model_alone() -> None:
    plan = planned("dp=1")
    for other in (described(EVEN), find_model("gpt2")):
        with pytest.raises(ConfigError, match=f"but the plan is for decoder with {plan.model.parameters:,}"):
            simulated_step(plan, other)


def test_a_plan_of_another_price_is_told_apart() -> None:
    plan = planned("dp=1")
    older = replace(plan, cost=replace(plan.cost, step_s=plan.cost.step_s * 1.001))
    assert not simulated_step(older, described(SMALL)).as_planned


def test_a_timeline_of_one_s_own() -> None:
    """As a run would record it: two ranks, a message between them, a pause for parameters."""
    spans = (
        (Span(0, "forward", 0.0, 2.0, 0, 0), Span(0, "send", 2.0, 3.0, 0, 0, None, 1, 1), Span(0, "after", 8.0, 9.0)),
        (
            Span(1, "receive", 2.0, 3.0, 1, 0, None, 0, 0),
            Span(1, "gather", 0.0, 1.0, 1, 0),
            Span(1, "forward", 3.0, 8.0, 1, 0, waits_s=1.0),
        ),
    )
    timeline = Timeline("executed", spans)
    assert (timeline.makespan_s, timeline.end_s, timeline.microbatches) == (8.0, 9.0, 1)
    assert timeline.busy_s == (2.0, 4.0)
    assert timeline.idle_s == (6.0, 4.0)
    assert timeline.bubbles == (0.75, 0.5)
    assert timeline.bubble == 0.625
    assert timeline.stages == ((0,), (1,))
    assert [span.row for span in timeline] == ["compute", "messages", "after", "messages", "collectives", "compute"]
    assert {span.kind for span in timeline if span.row == "compute"} <= set(COMPUTE)
    empty = Timeline("executed", ((),))
    assert (empty.makespan_s, empty.end_s, empty.bubble, empty.microbatches) == (0.0, 0.0, 0.0, 0)
