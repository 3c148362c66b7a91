"""The step of a plan, played whole: what its price is made of, as a timeline."""

from __future__ import annotations

from msgspec import Struct

from meshwright.cost.time import StepTime
from meshwright.errors import ConfigError
from meshwright.schedule import Span, Timeline
from meshwright.spec import Layout, Plan
from meshwright.spec.families import Described

__all__ = ["SimulatedStep", "simulated_step", "simulated_timeline"]

#: Prices that differ by less than this share are the same.
_SAME = 1e-6


class SimulatedStep(Struct, frozen=True, kw_only=True):
    """The timeline of a plan's strategy, with the step time that this version gives it.

    Attributes:
        priced_s: the step as the search prices it, which plays only the first rounds of a steady schedule;
            `timeline.end_s` is the same with every microbatch played.
        planned_s: the step as the plan has it. It is `priced_s` unless the plan was made by another version.
    """

    timeline: Timeline
    priced_s: float
    planned_s: float

    @property
    def as_planned(self) -> bool:
        """Whether this version still prices the plan as it was priced when it was made."""
        return abs(self.priced_s - self.planned_s) <= _SAME * self.priced_s


def simulated_step(plan: Plan, model: Described) -> SimulatedStep:
    """The step of a plan's strategy with the durations of its price.

    Args:
        plan: holds the machines, the job and the strategy.
        model: the one that the plan is for.

    Raises:
        ConfigError: the model has not the parameters of the plan's, or is otherwise not the one that it is for.
        UnsupportedCombination: the strategy cannot be laid over it.
    """
    job, strategy = plan.job, plan.strategy
    whole = model.at(Layout(sequence=job.sequence, compute_dtype=job.compute_dtype, stack=job.stack))
    if whole.parameters != plan.model.parameters:
        raise ConfigError(
            f"{model.name} has {whole.parameters:,} parameters, but the plan is for {plan.model.name} with "
            f"{plan.model.parameters:,}",
            why="a schedule is drawn with the times of the plan's own model",
            fix="name that model with --model, or plan anew",
        )
    time = StepTime(model.at(Layout.of(job, strategy)), plan.cluster, job, strategy)
    return SimulatedStep(timeline=simulated_timeline(time), priced_s=time.step_s, planned_s=plan.cost.step_s)


def simulated_timeline(time: StepTime) -> Timeline:
    """Every action of a step with its start and end, and a span `after` on each rank for the rest of the step."""
    played, rest = time.played(), time.rest_s
    ranks = []
    for rank in range(len(played.schedule.ranks)):
        spans = list(played.spans(rank))
        if rest > 0:
            spans.append(Span(rank, "after", played.makespan_s, played.makespan_s + rest))
        ranks.append(tuple(spans))
    return Timeline("simulated", tuple(ranks))
