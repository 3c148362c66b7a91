"""What is said beside the picture of a timeline, and all of it as a table for other programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.cost.simulated import SimulatedStep
from meshwright.schedule import Timeline
from meshwright.spec import Plan
from meshwright.spec.units import show_seconds

__all__ = ["counted", "figures", "heading", "timeline_table"]

#: Terms of the price that are waiting in the schedule.
_WAITING = ("pipeline bubble", "pipeline messages", "parameter gathers", "gradient reduction")
#: The search plays a long schedule's first rounds alone; a difference of less than this share is not worth a word.
_LEAST = 0.0005


def heading(plan: Plan) -> tuple[str, str]:
    """What is drawn, in two lines."""
    s = plan.strategy
    microbatches = counted(s.microbatches(plan.job.global_batch), "microbatch", "microbatches")
    virtual = f" of {s.virtual_stages} stages" if s.virtual_stages > 1 else ""
    first = f"{s.schedule}: {counted(s.pp, 'pipeline rank')}{virtual}, {microbatches} of "
    return first + counted(s.microbatch, "sequence"), f"{plan.model.name} on {plan.cluster.name}, {s}"


def counted(count: int, one: str, many: str = "") -> str:
    """`1 rank`, `4 ranks`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def figures(found: SimulatedStep, plan: Plan) -> Iterator[str]:
    """The step's seconds, the bubble, and how both belong to the plan's price."""
    timeline = found.timeline
    rest = timeline.end_s - timeline.makespan_s
    after = f" + {show_seconds(rest)} for what comes after it or slows it" if rest else ""
    yield f"step {show_seconds(timeline.end_s)} = schedule {show_seconds(timeline.makespan_s)}{after}"
    yield _bubble(timeline)
    terms = [f"{name} {show_seconds(plan.cost.terms[name])}" for name in _WAITING if name in plan.cost.terms]
    if terms:
        yield f"the plan's terms of the busiest rank, with what its collectives slow down: {', '.join(terms)}"
    if abs(timeline.end_s - found.priced_s) > _LEAST * found.priced_s:
        yield (
            f"the search plays only the first rounds of a schedule that repeats itself: it gives this step "
            f"{show_seconds(found.priced_s)}"
        )
    if not found.as_planned:
        yield (
            f"the plan has {show_seconds(found.planned_s)} for this step: it was made by another version "
            f"({plan.provenance.meshwright}) or changed by hand; plan anew to compare"
        )


def _bubble(timeline: Timeline) -> str:
    least, most = min(timeline.bubbles), max(timeline.bubbles)
    idle, whole = sum(timeline.idle_s), timeline.makespan_s * len(timeline.ranks)
    text = f"bubble {timeline.bubble:.1%}: {show_seconds(idle)} idle of {show_seconds(whole)}"
    if len(timeline.ranks) > 1:
        text += f", all ranks together; {least:.1%} to {most:.1%} of a rank"
    return text + ". Idle is what a rank does not compute, whatever it waits for"


def timeline_table(found: SimulatedStep, plan: Plan) -> dict[str, Any]:
    """Figures and spans as JSON has them, in seconds."""
    timeline = found.timeline
    lines = zip(timeline.busy_s, timeline.idle_s, timeline.bubbles, timeline.stages, strict=True)
    return {
        "strategy": str(plan.strategy),
        "step_s": timeline.end_s,
        "makespan_s": timeline.makespan_s,
        "priced_s": found.priced_s,
        "planned_s": found.planned_s,
        "bubble": timeline.bubble,
        "ranks": [
            {"rank": rank, "stages": stages, "busy_s": busy, "idle_s": idle, "bubble": bubble}
            for rank, (busy, idle, bubble, stages) in enumerate(lines)
        ],
        "spans": [span._asdict() for span in timeline],
    }
