"""make_plan: from a model, a cluster, a job and pins to a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import asdict

from meshwright._version import __version__
from meshwright.collector import collector_paused
from meshwright.planner.changes import changes
from meshwright.planner.explain import why_second
from meshwright.planner.meshes import nearest_multiples
from meshwright.planner.objective import find_objective
from meshwright.planner.pins import Pins
from meshwright.planner.question import Question, Remembered, shortage, usable_bytes
from meshwright.planner.rule import Candidate, rule_of
from meshwright.planner.search import Result
from meshwright.planner.short import infeasible
from meshwright.planner.sources import constants, error_bar
from meshwright.spec import (
    Assignment,
    Cluster,
    DecoderShape,
    Job,
    Layout,
    ModelReference,
    Objective,
    Plan,
    Provenance,
    Rejected,
    RunnerUp,
)
from meshwright.spec.decoder import describe, described
from meshwright.spec.families import Described
from meshwright.spec.units import show_bytes

__all__ = ["Model", "ask", "make_plan", "plan_for"]

#: What can be planned for: the built-in decoder, or any model that is described for any layout.
Model = DecoderShape | Described

_MOST_REJECTED = 4
_MEMORY_SOURCE = (
    "closed forms or a trace of the model's operations, the ZeRO table, and the schedule played with bytes; on "
    "accelerators with what the process and the allocator take besides (cost/overhead.py)"
)
_TIME_SOURCE = (
    "a roofline for each operation, latency and bandwidth for each collective, and the schedule played with seconds; "
    "the constants are listed below"
)


def ask(
    model: Model,
    cluster: Cluster,
    job: Job,
    pins: Iterable[Assignment] = (),
    *,
    objective: Objective = "time",
    executable: bool = False,
) -> Question:
    """All that a plan is asked for, as one noun.

    Raises:
        ConfigError: a pin names no field, has a wrong type, or contradicts another.
    """
    known = described(model) if isinstance(model, DecoderShape) else model
    return Question(
        model=Remembered(known), cluster=cluster, job=job, pins=Pins(pins), objective=objective, executable=executable
    )


def make_plan(
    model: Model,
    cluster: Cluster,
    job: Job,
    pins: Iterable[Assignment] = (),
    *,
    objective: Objective = "time",
    executable: bool = False,
    most: int = 10,
    price_per_hour: float = 0.0,
    with_changes: bool = False,
) -> Plan:
    """The best strategy by an objective, with its price and its reasons.

    Args:
        model: the built-in decoder's shape, or a model from `config.json`, the catalogue or a trace.
        cluster: the machines; a rank has one device.
        job: what a step computes.
        pins: fields of the strategy that are decided already, with `=`, `<=` or `>=`.
        objective: what the best has least of: `time` of a step, `devices`, or `cost` (device time per token).
        executable: only what this version runs.
        most: strategies that are ranked, the best included.
        price_per_hour: of one device.
        with_changes: say also what one change (memory, link, batch, sequence) would bring.

    Raises:
        ConfigError: the pins are illegal, contradict each other, or do not fit the devices or the global batch; the
            sequence is too long for the model.
        UnsupportedCombination: what is pinned cannot be laid over this model, or with `executable` is not run by this
            version.
        InfeasiblePlan: no strategy within the pins fits into a device's memory.
    """
    question = ask(model, cluster, job, pins, objective=objective, executable=executable)
    shape = model if isinstance(model, DecoderShape) else None
    return plan_for(question, shape=shape, most=most, price_per_hour=price_per_hour, with_changes=with_changes)


@collector_paused()  # no cycles worth looking for come up, and looking takes a tenth of the time
def plan_for(
    question: Question,
    *,
    shape: DecoderShape | None = None,
    most: int = 10,
    price_per_hour: float = 0.0,
    with_changes: bool = False,
) -> Plan:
    """The same for a question; `shape` is that of the built-in decoder, where the model is that one."""
    job, objective = question.job, question.objective
    layout = Layout(sequence=job.sequence, compute_dtype=job.compute_dtype, stack=job.stack)
    if shape is None:
        whole = question.model.at(layout)
    else:
        whole = describe(shape, sequence=job.sequence, compute_dtype=job.compute_dtype, layout=layout)
    result = question.answer(most)
    if not result.fitting:
        raise infeasible(question, result)
    best, *others = result.fitting
    cluster = best.pricer.cluster
    return Plan(
        model=ModelReference(name=whole.name, parameters=whole.parameters, source=whole.source, decoder=shape),
        cluster=cluster,
        job=job,
        strategy=best.strategy,
        cost=best.cost,
        objective=objective,
        executable=best.executable,
        price_per_hour=price_per_hour,
        pinned=question.pins.table(),
        runner_up=tuple(_runner_up(best, other, objective) for other in others[: most - 1]),
        rejected=rejections(question, result),
        left_out=tuple(_left_out(question.cluster, cluster)),
        changes=changes(question, result.fitting) if with_changes else (),
        searched={name: int(count) for name, count in asdict(result.counts).items() if name != "unproven"},
        unproven=result.counts.unproven,
        error_bar=error_bar(cluster, whole, best.strategy),
        provenance=Provenance(
            meshwright=__version__,
            rule=rule_of(find_objective(objective)),
            memory=_MEMORY_SOURCE,
            time=_TIME_SOURCE,
            cluster=f"{cluster.name}: {cluster.inventory}",
            constants=constants(cluster, job, best.strategy),
        ),
    )


def _runner_up(best: Candidate, other: Candidate, objective: Objective) -> RunnerUp:
    devices = (best.strategy.world_size, other.strategy.world_size)
    return RunnerUp(
        strategy=str(other.strategy),
        devices=devices[1],
        step_s=other.cost.step_s,
        terms=other.cost.terms,
        in_step=other.cost.in_step,
        total_bytes=other.cost.total_bytes,
        executable=other.executable,
        reason=why_second(best.cost, other.cost, objective, devices),
    )


def rejections(question: Question, result: Result) -> tuple[Rejected, ...]:
    """What was left out, in groups: numbers of ranks that do not divide the batch, and what is nearest to fitting."""
    best, found = result.fitting[0].strategy, list[Rejected]()
    batch, devices = question.job.global_batch, question.cluster.devices
    most = devices // (best.tp * best.pp * best.cp)
    too_many = [dp for dp in range(most, best.dp, -1) if batch % dp and question.pins.allows("dp", dp)]
    if too_many and question.objective == "time":
        sizes = " or ".join(map(str, nearest_multiples(most, batch)))
        reason = (
            f"global_batch={batch} does not divide by dp; {sizes} would use {most * (best.world_size // best.dp)} ranks"
        )
        found.append(Rejected(strategy=f"dp={_list(too_many)}", reason=reason))
    seen = {candidate.strategy.zero for candidate in result.fitting}
    for candidate in result.short:
        zero = candidate.strategy.zero
        if zero not in seen and len(found) < _MOST_REJECTED:
            seen.add(zero)
            found.append(Rejected(strategy=str(candidate.strategy), reason=_too_big(candidate)))
    return tuple(found)


def _left_out(whole: Cluster, used: Cluster) -> Iterator[Rejected]:
    """Nodes of the cluster that are not among those of the plan."""
    for group in whole.nodes:
        kept = sum(g.count for g in used.nodes if (g.device, g.devices) == (group.device, group.devices))
        if kept < group.count:
            nodes = f"{group.count - kept} of {group.count} nodes of {group.devices} x {group.device.name}"
            yield Rejected(strategy=nodes, reason="the best strategy that uses them too is slower")


def _too_big(candidate: Candidate) -> str:
    over = " and ".join(f"{show_bytes(size)} over on the {tier}" for tier, size in shortage(candidate).items())
    worst = candidate.pricer.memory(candidate.strategy).worst
    largest = max(worst.in_step, key=lambda name: worst.in_step[name])
    return (
        f"does not fit, {over}: {show_bytes(worst.total_bytes)} of {show_bytes(usable_bytes(candidate))}, "
        f"most of it {largest}, {show_bytes(worst.in_step[largest])}"
    )


def _list(numbers: list[int]) -> str:
    """`7,6,5`; long lists are cut."""
    shown = ",".join(map(str, numbers[:6]))
    return shown if len(numbers) <= 6 else f"{shown},..."
