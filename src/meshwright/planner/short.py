"""Nothing fits: what is short by how much, through which bytes, and the smallest machines that would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.cost import CATEGORIES
from meshwright.errors import InfeasiblePlan
from meshwright.planner.larger import closest, larger_device, roomy, smallest_cluster
from meshwright.planner.question import Question, shortage, usable_bytes
from meshwright.planner.rule import Candidate
from meshwright.planner.search import Result
from meshwright.spec import Cluster, Cost
from meshwright.spec.units import show_bytes

__all__ = ["infeasible", "nearest", "show_shares"]

_STATES = ("parameters", "gradients", "optimizer")


def nearest(question: Question, result: Result) -> Candidate:
    """Of what does not fit, that which is short of least."""
    found = [*result.short, *closest(question)]
    runnable = [candidate for candidate in found if candidate.executable or not question.executable]
    return min(
        runnable or found,
        key=lambda candidate: (sum(shortage(candidate).values()), str(candidate.strategy)),
    )


def infeasible(question: Question, result: Result) -> InfeasiblePlan:
    """The error for a search in which nothing fits."""
    pins, cluster = question.pins, question.cluster
    within = f" within the pins {pins.show(*pins.keys)}" if pins.keys else ""
    if question.executable:
        within += " among the strategies that this version runs" if not within else ", of what this version runs"
    if not result.short:
        return InfeasiblePlan(
            f"nothing fits{within}: even the model states alone are larger than the devices of {cluster.name}",
            fix="; or ".join(_remedies(question, None)),
        )
    close = nearest(question, result)
    short = shortage(close)
    told = " and ".join(
        f"{show_bytes(size)} on each device" if tier == "device" else f"{show_bytes(size)} of the {tier} of a node"
        for tier, size in short.items()
    )
    usable = usable_bytes(close)
    device = min(group.device.memory_bytes for group in cluster.nodes)
    return InfeasiblePlan(
        f"nothing fits{within}: the nearest, {close.strategy}, is short by {told}",
        why=f"at its largest moment ({close.cost.phase}) it needs {show_bytes(close.cost.total_bytes)} of "
        f"{show_bytes(usable)}: {show_shares(close.cost)}. {_divisible(close.cost)}. A plan uses at most "
        f"{cluster.memory_fraction:.0%} of the {show_bytes(device)} of a device",
        fix="; or ".join(_remedies(question, close)),
    )


def show_shares(cost: Cost) -> str:
    """`parameters 24.2 GiB, optimizer 48.4 GiB, ...`: what a device holds at the largest moment."""
    shares = {name: cost.in_step.get(name, 0) for name in CATEGORIES}
    shares["the process and its gaps"] = sum(cost.overhead.values())
    return ", ".join(f"{name} {show_bytes(size)}" for name, size in shares.items() if size)


def _divisible(cost: Cost) -> str:
    states = sum(cost.in_step.get(name, 0) for name in _STATES)
    divided = sum(cost.divided.values())
    return (
        f"Model states are {show_bytes(states)} of it ({show_bytes(divided)} divided by the shard group); "
        "ZeRO does not divide activations and logits"
    )


def _remedies(question: Question, close: Candidate | None) -> Iterator[str]:
    """What would help, each tried by a search."""
    for key in question.pins.keys:
        freed = roomy(replace(question, pins=question.pins.without(key)))
        if freed is not None:
            yield f"leave the pin {question.pins.show(key)} out ({freed} fits)"
            break
    if question.executable:
        free = roomy(replace(question, executable=False))
        if free is not None:
            yield f"plan without --executable ({free} fits)"
    grown = smallest_cluster(question)
    if grown is not None:
        cluster, strategy = grown
        yield f"use {_name(cluster)}, the smallest such machines on which anything fits ({strategy})"
    if close is not None and set(shortage(close)) == {"device"}:
        larger = larger_device(question, close) if question.cluster.device_kind != "cpu" else None
        if larger is not None:
            yield f"use as many {larger.name} ({larger.memory_gib:.0f} GiB)"
        whole = close.cost.total_bytes / question.cluster.memory_fraction
        yield f"use devices with at least {show_bytes(int(whole) + 1)} of memory"
    if close is not None and close.cost.in_step.get("activations", 0) > close.cost.total_bytes // 2:
        yield f"lower job.sequence (now {question.job.sequence})"


def _name(cluster: Cluster) -> str:
    return f"{cluster.devices} devices ({cluster.name})"
