"""make_plan: from a model, a cluster, a job and pins to a plan."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright._version import __version__
from meshwright.cost import framework_bytes
from meshwright.planner.explain import infeasible, rejections, runners_up
from meshwright.planner.pins import Pins
from meshwright.planner.rule import RULE
from meshwright.planner.search import search
from meshwright.planner.space import Space
from meshwright.spec import Assignment, Cluster, DecoderShape, Job, Plan, Provenance, describe

__all__ = ["make_plan"]

_MEMORY_SOURCE = (
    "closed forms of the model's operations and the ZeRO table, at the boundaries of blocks; what an operation needs "
    "while it runs is not counted"
)


def make_plan(shape: DecoderShape, cluster: Cluster, job: Job, pins: Iterable[Assignment] = ()) -> Plan:
    """The best strategy by the rule (`planner.rule.RULE`), with its price and its reasons.

    Args:
        shape: the model.
        cluster: the machines; one rank for each device.
        job: what a step computes.
        pins: fields of the strategy that are decided already, with `=`, `<=` or `>=`.

    Raises:
        ConfigError: the pins are illegal, contradict each other, or do not fit the devices or the global batch.
        UnsupportedCombination: what is pinned, or the job, is not executable by this version.
        InfeasiblePlan: no strategy within the pins fits into a device's memory.
    """
    model = describe(shape, sequence=job.sequence, compute_dtype=job.compute_dtype)
    space = Space(model, cluster, job, Pins(pins))
    framework = framework_bytes(cluster.device_kind)
    budget = cluster.usable_bytes - framework
    result = search(model, job, space, budget)
    if not result.fitting:
        raise infeasible(result, model, cluster, job, space, budget)
    best = result.fitting[0]
    return Plan(
        model=shape,
        cluster=cluster,
        job=job,
        strategy=best.strategy,
        cost=best.cost,
        framework_bytes=framework,
        pinned=space.pins.table(),
        runner_up=runners_up(result.fitting),
        rejected=rejections(result, space, budget),
        provenance=Provenance(
            meshwright=__version__,
            rule=RULE,
            memory=_MEMORY_SOURCE,
            cluster=f"{cluster.name}: {cluster.devices} x {cluster.nodes[0].device.name}",
        ),
    )
