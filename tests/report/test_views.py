"""What the tables say."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from meshwright.planner import ask, make_plan, parse_why, plan_for, why_not
from meshwright.report import measured_view, plan_table, plan_view, why_view
from meshwright.report.style import bar
from meshwright.spec import Job, Plan, parse_assignments
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.units import show_bytes, show_seconds
from tests.planner.machines import SMALL, cluster

JOB = Job(global_batch=12, sequence=64)


def shown(view: RenderableType, width: int = 100) -> str:
    screen = Console(file=io.StringIO(), width=width, color_system=None)
    screen.print(view)
    text = screen.file.getvalue()  # type: ignore[attr-defined]  # the file is a StringIO
    assert max(map(len, text.splitlines())) <= width
    return str(text)


def planned(devices: int = 5, pins: str = "zero>=1", **changes: object) -> Plan:
    assignments = parse_assignments([pins], option="--pin", bounds=True) if pins else []
    made = make_plan(
        SMALL, cluster(devices, 2**30), JOB, assignments, executable=True, most=4, with_changes=bool(changes)
    )
    return replace(made, price_per_hour=2.0) if changes else made


@pytest.mark.parametrize("width", [80, 120])
def test_a_plan_shows_the_ranking_its_price_and_its_reasons(width: int) -> None:
    plan = planned(price_per_hour=2.0)
    flat = " ".join(shown(plan_view(plan), width).split())
    assert str(plan.strategy) in flat
    split = plan.strategy.microbatches(12)
    told = f"global batch 12 = dp {plan.strategy.dp} x microbatch {plan.strategy.microbatch} x accumulation {split}"
    assert told in flat
    assert "pinned: zero>=1" in flat
    for other in plan.runner_up:
        assert other.strategy in flat
        assert other.reason in flat
        assert show_seconds(other.step_s) in flat
    for entry in plan.rejected:
        assert f"{entry.strategy}: {entry.reason}" in flat
    assert f"Time of a step, {show_seconds(plan.cost.step_s)}" in flat
    for name, seconds in plan.cost.terms.items():
        if seconds > 0.001 * plan.cost.step_s:
            assert f"{name} {show_seconds(seconds)} {seconds / plan.cost.step_s:.1%}" in flat
    assert "bottleneck:" in flat
    assert f"{plan.tokens_per_s:,.0f} tokens/s" in flat
    assert "device-hours for 10^9 tokens, which cost" in flat
    assert f"Memory of a device, {show_bytes(plan.cost.total_bytes)}" in flat
    assert "the process itself - 300 MiB" in flat
    assert f"usable, 100% {show_bytes(plan.usable_bytes)}" in flat
    assert "What one change would bring" in flat
    for change in plan.changes:
        assert change.what in flat
    assert plan.provenance.rule in flat
    assert "Constants (" in flat


@pytest.mark.parametrize("width", [80, 120])
def test_long_strategies_and_large_numbers_stay_inside(width: int) -> None:
    job = Job(global_batch=64, sequence=128, compute_dtype="bfloat16")
    pins = parse_assignments(["pp=2 schedule=interleaved-1f1b zero=1 cp=2"], option="--pin")
    plan = make_plan(SMALL, parse_cluster("8xH100-80GB:16"), job, pins, most=3, with_changes=True)
    flat = " ".join(shown(plan_view(plan), width).split())
    assert "does not execute it" in flat
    assert "* priced, but not executed by this version" in flat
    assert f"±{plan.error_bar.step_time:.0%}" in flat
    assert "docs/accuracy.md" in flat
    assert "MFU" in flat


def test_a_plan_without_others_is_shown() -> None:
    text = shown(plan_view(planned(1, "zero=0 dp=1 microbatch=12 recompute=none")))
    assert "nothing else fits" in text
    assert "collectives a step: none" in text


def test_padding_is_shown() -> None:
    plan = planned(3, "zero=3 dp=3")
    assert plan.cost.padding_bytes > 0
    assert "of which padding" in shown(plan_view(plan))


@pytest.mark.parametrize("width", [80, 120])
def test_an_answer_stands_beside_the_chosen_plan(width: int) -> None:
    asked = ask(SMALL, cluster(4, 2**30), JOB)
    plan = plan_for(asked)
    answer = why_not(asked, plan, parse_why("zero=3,tp=1"))
    flat = " ".join(shown(why_view(answer, plan), width).split())
    assert "Why not zero=3 tp=1?" in flat
    assert answer.strategy in flat
    assert answer.reason in flat
    assert f"step {show_seconds(plan.cost.step_s)} {show_seconds(answer.step_s)}" in flat
    assert f"total {show_bytes(plan.cost.total_bytes)} {show_bytes(answer.total_bytes)}" in flat


def test_the_numbers_of_a_plan_for_other_programs() -> None:
    plan = planned()
    table = plan_table(plan)
    assert table["strategy_text"] == str(plan.strategy)
    assert table["devices"] == plan.strategy.world_size
    for row, other in zip(table["runner_up"], plan.runner_up, strict=True):
        assert row["step_s"] == other.step_s
        least = 0.002 * plan.cost.step_s * len(plan.cost.terms)
        assert sum(row["difference_s"].values()) == pytest.approx(other.step_s - plan.cost.step_s, abs=least)


def test_bars_are_as_long_as_their_shares() -> None:
    assert bar(1.0, 10) == "█" * 10
    assert bar(0.55, 10) == "█" * 5 + "▌"
    assert bar(1e-9, 10) == "▏"
    assert bar(0.0, 10) == ""


def test_predicted_stands_beside_measured_with_per_cent() -> None:
    predicted = {"parameters": 1000, "gradients": 0, "activations": 3000, "logits": 1000}
    text = shown(measured_view(predicted, {"parameters": 1000, "gradients": 7, "activations": 4400, "total": 5407}))
    rows = {line.split("  ")[0].strip(): line.split() for line in text.splitlines()}
    assert rows["parameters"][-1] == "+0.0%"
    assert rows["gradients"][-1] == "-"
    assert rows["activations, logits"][-1] == "+10.0%"
    assert rows["total"][-1] == "+8.1%"
    assert "optimizer" not in rows


def test_logits_and_the_allocator_are_shown_where_they_were_measured() -> None:
    text = shown(measured_view({"logits": 2048}, {"logits": 1024, "total": 1024, "allocator": 4096}))
    assert "logits" in text
    assert "-50.0%" in text
    assert "+100.0%" in text
