"""Plan: a strategy with its predicted cost, what else was considered, and where the numbers came from."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.spec.cluster import Cluster
from meshwright.spec.decoder import DecoderShape
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy

__all__ = ["PLAN_FORMAT", "Cost", "Plan", "Provenance", "Rejected", "RunnerUp"]

#: Version of the file format of `plan.toml` and of job files.
PLAN_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a strategy costs one rank.

    `at_rest` and `in_step` map a category of memory (parameters, gradients, optimizer, gathered, activations, logits)
    to bytes: between steps, and at the moment of the step with the largest sum. `peak_bytes` is that sum and `phase`
    names the moment. `divided` is the part of `in_step` that the shard group divides among its ranks: a larger group
    makes it smaller, and nothing else does. `padding_bytes` is the part of `at_rest` by which equal shares exceed the
    exact ones. `collectives` counts the collectives of one step by kind, `collective_bytes` their bytes (full,
    unsharded size of each message).

    `overhead` is what the process takes besides tensors, `total_bytes` what the device must hold, `host_bytes` and
    `disk_bytes` what a node's other tiers must. `step_s` is the time of one optimizer step and `terms` its parts by
    name: they add up to it. `model_flops` are those of one step without recompute, over all ranks.
    """

    at_rest: dict[str, int]
    in_step: dict[str, int]
    divided: dict[str, int] = field(default_factory=dict)
    padding_bytes: int = 0
    peak_bytes: int
    phase: str
    collectives: dict[str, int]
    collective_bytes: dict[str, int]
    overhead: dict[str, int] = field(default_factory=dict)
    total_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    step_s: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    model_flops: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunnerUp:
    """A strategy that fits but was not chosen, in text form, with what it costs and what it loses by.

    `in_step` maps a category of memory to bytes at the largest moment of its step, `peak_bytes` is their sum.
    """

    strategy: str
    in_step: dict[str, int]
    peak_bytes: int
    collectives: int
    collective_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A group of strategies that were left out, and why."""

    strategy: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where the numbers of a plan came from."""

    meshwright: str
    rule: str
    memory: str
    cluster: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen strategy for a model, a cluster and a job, with its price and its reasons.

    `framework_bytes` is what a rank takes besides tensors: it and the peak fit into the cluster's usable bytes.
    """

    format: int = PLAN_FORMAT
    model: DecoderShape
    cluster: Cluster
    job: Job
    strategy: Strategy
    cost: Cost
    framework_bytes: int = 0
    pinned: dict[str, str] = field(default_factory=dict)
    runner_up: tuple[RunnerUp, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    provenance: Provenance

    @property
    def tensor_budget_bytes(self) -> int:
        """Bytes that tensors may take on a device."""
        return self.cluster.usable_bytes - self.framework_bytes
