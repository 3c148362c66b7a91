"""Why a plan is as it is: what lost, what was left out, and what is short when nothing fits."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.cost import CATEGORIES, framework_bytes
from meshwright.errors import InfeasiblePlan, MeshwrightError
from meshwright.planner.rule import Candidate, why_second
from meshwright.planner.search import Result, search
from meshwright.planner.space import Space, nearest_multiples
from meshwright.spec import Cluster, Job, ModelSpec, Rejected, RunnerUp
from meshwright.spec.units import show_bytes

__all__ = ["infeasible", "rejections", "runners_up"]

_MOST_RUNNERS_UP = 5
_STATES = ("parameters", "gradients", "optimizer")


def runners_up(fitting: list[Candidate]) -> tuple[RunnerUp, ...]:
    """The second of the ranking, then the best of each other way to shard and recompute."""
    best, *others = fitting
    kept: list[Candidate] = others[:1]
    families = {_family(candidate) for candidate in [best, *kept]}
    for candidate in others[1:]:
        if _family(candidate) not in families:
            families.add(_family(candidate))
            kept.append(candidate)
    return tuple(
        RunnerUp(
            strategy=str(candidate.strategy),
            in_step=candidate.cost.in_step,
            peak_bytes=candidate.cost.peak_bytes,
            collectives=sum(candidate.cost.collectives.values()),
            collective_bytes=sum(candidate.cost.collective_bytes.values()),
            reason=why_second(best, candidate),
        )
        for candidate in kept[:_MOST_RUNNERS_UP]
    )


def _family(candidate: Candidate) -> tuple[int, int, str]:
    strategy = candidate.strategy
    return strategy.zero, strategy.shard, strategy.recompute


def rejections(result: Result, space: Space, budget_bytes: int) -> tuple[Rejected, ...]:
    """What was left out, in groups: numbers of ranks, ZeRO stages that do not fit, what cannot be executed yet."""
    chosen = result.fitting[0].strategy
    found: list[Rejected] = []
    too_many = [dp for dp in space.undivided if dp > chosen.dp]
    if too_many:
        batch, most = space.job.global_batch, max(too_many)
        sizes = " or ".join(map(str, nearest_multiples(most, batch)))
        reason = f"global_batch={batch} does not divide by dp; {sizes} would use {most} ranks"
        found.append(Rejected(strategy=f"dp={_list(too_many)}", reason=reason))
    fits = {(c.strategy.dp, c.strategy.zero) for c in result.fitting}
    groups: dict[tuple[int, int], Candidate] = {}
    for candidate in result.short:
        way = (candidate.strategy.dp, candidate.strategy.zero)
        if way not in fits and (way not in groups or _peak(candidate) < _peak(groups[way])):
            groups[way] = candidate
    for candidate in groups.values():
        found.append(Rejected(strategy=str(candidate.strategy), reason=_too_big(candidate, budget_bytes)))
    if result.passed:
        reason = f"fewer ranks than dp={chosen.dp}, which fits"
        found.append(Rejected(strategy=f"dp={_list(result.passed)}", reason=reason))
    if space.others == 1:
        reason = "legal, but not executable by this version"
        found.append(Rejected(strategy="tp, pp, cp or ep above 1; offload to host or disk", reason=reason))
    return tuple(found)


def infeasible(
    result: Result, model: ModelSpec, cluster: Cluster, job: Job, space: Space, budget_bytes: int
) -> InfeasiblePlan:
    """Nothing fits: what is short by how much, in which categories, and what would help."""
    nearest = min(result.short, key=lambda candidate: (_peak(candidate), candidate.key))
    short, cost = _peak(nearest) - budget_bytes, nearest.cost
    shares = ", ".join(f"{name} {show_bytes(cost.in_step[name])}" for name in CATEGORIES if cost.in_step[name])
    states = sum(cost.in_step[name] for name in _STATES)
    divided = sum(cost.divided.values())
    pinned = f" within the pins {space.pins.show(*space.pins.keys)}" if space.pins.keys else ""
    usable, framework = cluster.usable_bytes, framework_bytes(cluster.device_kind)
    return InfeasiblePlan(
        f"nothing fits{pinned}: the nearest, {nearest.strategy}, is short by {show_bytes(short)} on each device",
        why=f"at its largest moment ({cost.phase}) it needs {show_bytes(_peak(nearest))}: {shares}. "
        f"Model states are {show_bytes(states)} of it ({show_bytes(divided)} divided by the shard group); ZeRO does "
        f"not divide activations and logits. A device of {cluster.name} has {show_bytes(usable)} to use: "
        f"{show_bytes(framework)} go to the process itself, {show_bytes(max(budget_bytes, 0))} are left",
        fix="; or ".join(_remedies(nearest, model, cluster, job, space, budget_bytes)),
    )


def _remedies(
    nearest: Candidate, model: ModelSpec, cluster: Cluster, job: Job, space: Space, budget_bytes: int
) -> Iterable[str]:
    for key in space.pins.keys:
        found = _best_without(key, model, cluster, job, space, budget_bytes)
        if found is not None:
            yield f"leave the pin {space.pins.show(key)} out ({found.strategy} fits)"
            break
    if nearest.cost.in_step["activations"] + nearest.cost.in_step["logits"] > _peak(nearest) // 2:
        yield f"lower job.sequence (now {job.sequence}) or the model's size"
    else:
        yield f"use more devices (now {cluster.devices}), or a smaller model"
    whole = (_peak(nearest) + framework_bytes(cluster.device_kind)) / cluster.memory_fraction
    yield f"use devices with at least {show_bytes(int(whole) + 1)} of memory"


def _best_without(
    key: str, model: ModelSpec, cluster: Cluster, job: Job, space: Space, budget_bytes: int
) -> Candidate | None:
    """The best that fits without the pins of one field."""
    try:
        fitting = search(model, job, Space(model, cluster, job, space.pins.without(key)), budget_bytes).fitting
    except MeshwrightError:
        return None
    return fitting[0] if fitting else None


def _too_big(candidate: Candidate, budget_bytes: int) -> str:
    largest = max(CATEGORIES, key=lambda name: candidate.cost.in_step[name])
    needed = (
        f"the smallest with this ZeRO stage needs {show_bytes(_peak(candidate))} of {show_bytes(max(budget_bytes, 0))}"
    )
    return f"{needed}; the most are {largest}, {show_bytes(candidate.cost.in_step[largest])}"


def _peak(candidate: Candidate) -> int:
    return candidate.cost.peak_bytes


def _list(numbers: list[int]) -> str:
    """`7,6,5`; long lists are cut."""
    shown = ",".join(map(str, numbers[:6]))
    return shown if len(numbers) <= 6 else f"{shown},..."
