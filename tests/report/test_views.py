"""What the tables say."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from meshwright.planner import make_plan
from meshwright.report import measured_view, plan_view
from meshwright.spec import Job, parse_assignments
from meshwright.spec.units import show_bytes
from tests.planner.machines import SMALL, cluster


def shown(view: RenderableType, width: int = 100) -> str:
    screen = Console(file=io.StringIO(), width=width, color_system=None)
    screen.print(view)
    text = screen.file.getvalue()  # type: ignore[attr-defined]  # the file is a StringIO
    assert max(map(len, text.splitlines())) <= width
    return str(text)


@pytest.mark.parametrize("width", [80, 120])
def test_a_plan_shows_the_choice_its_price_and_its_reasons(width: int) -> None:
    pins = parse_assignments(["zero>=1"], option="--pin", bounds=True)
    plan = make_plan(SMALL, cluster(5, 2**30), Job(global_batch=12, sequence=64), pins)
    text = shown(plan_view(plan), width)
    flat = " ".join(text.split())
    assert str(plan.strategy) in flat
    assert "global batch 12 = dp 4 x microbatch 3 x accumulation 1" in flat
    assert "pinned: zero>=1" in flat
    for other in plan.runner_up:
        assert other.strategy in flat
        assert other.reason in flat
    for entry in plan.rejected:
        assert f"{entry.strategy}: {entry.reason}" in flat
    assert flat.index("At rest, between steps") < flat.index("In step, at its largest moment")
    assert "divides by the shard group" in flat
    assert show_bytes(plan.cost.peak_bytes) in flat
    assert "the process itself 300 MiB" in flat
    assert "6 all-gather" in flat
    assert plan.provenance.rule in flat


def test_a_plan_without_others_is_shown() -> None:
    pins = parse_assignments(["zero=0 dp=1 microbatch=12 recompute=none"], option="--pin")
    plan = make_plan(SMALL, cluster(1, 2**30), Job(global_batch=12, sequence=64), pins)
    text = shown(plan_view(plan))
    assert "chosen: nothing else fits" in text
    assert "collectives a step: none" in text


def test_padding_is_shown() -> None:
    plan = make_plan(
        SMALL, cluster(3, 2**30), Job(global_batch=12, sequence=64), parse_assignments(["zero=3"], option="--pin")
    )
    assert plan.cost.padding_bytes > 0
    assert "of which padding" in shown(plan_view(plan))


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
