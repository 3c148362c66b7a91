"""Plans of every kind of schedule, and the steps that they take."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from meshwright.cost.simulated import SimulatedStep, simulated_step
from meshwright.planner import make_plan, pins_of
from meshwright.spec import Job, Plan
from meshwright.spec.clusters import parse_cluster
from meshwright.spec.decoder import described
from tests.planner.machines import SMALL, cluster

__all__ = ["STRATEGIES", "planned", "step"]

#: A single stage, messages alone, both with collectives beside and between compute, split backwards, several stages.
STRATEGIES = (
    "dp=1",
    "dp=2 zero=3 prefetch=1",
    "pp=4 schedule=gpipe",
    "pp=3 schedule=1f1b dp=2 zero=1",
    "pp=2 dp=2 schedule=interleaved-1f1b virtual_stages=2 zero=3 prefetch=1",
    "pp=2 schedule=looped-bfs virtual_stages=2 dp=2 zero=2",
    "pp=4 schedule=zb-h1 dp=2",
    "pp=2 schedule=zb-v",
    "pp=2 schedule=dualpipev dp=2 zero=3 gather=unit prefetch=1",
)


@cache
def planned(strategy: str, machines: str = "8xH100-80GB:2@100Gb", batch: int = 48, layers: int = 5) -> Plan:
    """The plan of a strategy by hand; machines are of the catalogue, or `cores`."""
    where = cluster(8, 2**30) if machines == "cores" else parse_cluster(machines)
    shape = replace(SMALL, num_hidden_layers=layers)
    return make_plan(shape, where, Job(global_batch=batch, sequence=64), pins_of(strategy), most=1)


@cache
def step(strategy: str, machines: str = "8xH100-80GB:2@100Gb", batch: int = 48, layers: int = 5) -> SimulatedStep:
    """Its step."""
    plan = planned(strategy, machines, batch, layers)
    return simulated_step(plan, described(plan.decoder))
