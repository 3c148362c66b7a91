"""Plan: a strategy with its predicted cost, what else was considered, and where the numbers came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from meshwright.errors import ConfigError
from meshwright.spec.cluster import Cluster
from meshwright.spec.decoder import DecoderShape
from meshwright.spec.job import Job
from meshwright.spec.strategy import Strategy

__all__ = [
    "PLAN_FORMAT",
    "Change",
    "Constant",
    "Cost",
    "ErrorBar",
    "ModelReference",
    "Objective",
    "Plan",
    "Provenance",
    "Rejected",
    "RunnerUp",
]

#: What the best plan has least of: seconds per step, devices, or device-seconds per token.
Objective = Literal["time", "devices", "cost"]

#: Version of the file format of `plan.toml` and of job files.
PLAN_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ModelReference:
    """Which model a plan is for. `parameters` counts elements, tied weights once.

    `source` says where its figures come from. `decoder` is the shape of the built-in decoder where the model is that
    one; `meshwright train` builds no other.
    """

    name: str
    parameters: int
    source: str = ""
    decoder: DecoderShape | None = None


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

    `devices` are the ranks that it uses. `terms` add up to `step_s`; `in_step` maps a category of memory to bytes at
    the largest moment of a step; `total_bytes` is what a device must hold. `executable`: this version runs it.
    """

    strategy: str
    devices: int
    step_s: float
    terms: dict[str, float]
    in_step: dict[str, int]
    total_bytes: int
    executable: bool = True
    reason: str


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A group of strategies, or nodes, that were left out, and why."""

    strategy: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Change:
    """What the best plan would be if one thing were different: `what` says which. `strategy` is in text form."""

    what: str
    strategy: str
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """How far predictions may be off, as shares: median absolute errors against measurements. 0 where not known."""

    step_time: float = 0.0
    memory: float = 0.0
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One number that a price hangs on, with its unit and its source."""

    name: str
    value: float
    unit: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where the numbers of a plan came from: the version, the rule of choice, how memory and time were found, and
    every constant of the devices, links and kernels."""

    meshwright: str
    rule: str
    memory: str
    time: str = ""
    cluster: str
    constants: tuple[Constant, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen strategy for a model, a cluster and a job, with its price and its reasons.

    `executable`: this version runs the strategy. `price_per_hour` is that of one device, in any currency; 0 where it is
    not known. `pinned` maps a field of the strategy to what it was pinned to. `runner_up` are the next best, in order.
    `rejected` says which strategies were left out and why, `left_out` which nodes. `searched` counts what was looked
    at: `meshes`, `strategies`, and how many of these were `priced` in full. `unproven` is the share by which something
    that was not looked at may be better: 0 where nothing can be.
    """

    format: int = PLAN_FORMAT
    model: ModelReference
    cluster: Cluster
    job: Job
    strategy: Strategy
    cost: Cost
    objective: Objective = "time"
    executable: bool = True
    price_per_hour: float = 0.0
    pinned: dict[str, str] = field(default_factory=dict)
    runner_up: tuple[RunnerUp, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    left_out: tuple[Rejected, ...] = ()
    changes: tuple[Change, ...] = ()
    searched: dict[str, int] = field(default_factory=dict)
    unproven: float = 0.0
    error_bar: ErrorBar = field(default_factory=ErrorBar)
    provenance: Provenance

    @property
    def decoder(self) -> DecoderShape:
        """The shape of the built-in decoder that the plan is for.

        Raises:
            ConfigError: it is for another model.
        """
        if self.model.decoder is None:
            raise ConfigError(
                f"the plan is for {self.model.name}, which `meshwright train` does not build",
                why="it trains the built-in decoder, whose shape a job file gives",
                fix="hand your module, plan.job and plan.strategy to meshwright.Engine in a script of your own",
            )
        return self.model.decoder

    @property
    def tokens(self) -> int:
        """Tokens of one step, over all ranks."""
        return self.job.global_batch * self.job.sequence

    @property
    def tokens_per_s(self) -> float:
        """Over all ranks; 0 where the step's time is not known."""
        return self.tokens / self.cost.step_s if self.cost.step_s else 0.0

    @property
    def usable_bytes(self) -> int:
        """Bytes that a plan may take of the smallest device that is used, those with the most memory first."""
        ranks, memory = self.strategy.world_size, 0
        for group in sorted(self.cluster.nodes, key=lambda group: -group.device.memory_bytes):
            if ranks > 0:
                memory = group.device.memory_bytes
            ranks -= group.count * group.devices
        return int(memory * self.cluster.memory_fraction)

    @property
    def peak_flops_per_s(self) -> float | None:
        """Of all devices that are used together, in the compute dtype; None where one's peak is not known.

        Those with the most memory are counted first, as a plan takes them.
        """
        wanted, total = self.strategy.world_size, 0.0
        for group in sorted(self.cluster.nodes, key=lambda group: -group.device.memory_bytes):
            peak = group.device.peak_flops_per_s.get(self.job.compute_dtype)
            used = min(wanted, group.count * group.devices)
            if used and peak is None:
                return None
            total, wanted = total + used * (peak or 0.0), wanted - used
        return total

    @property
    def mfu(self) -> float | None:
        """Model flops of a step over what the used devices could compute in its time; None where not known."""
        peak = self.peak_flops_per_s
        return self.cost.model_flops / self.cost.step_s / peak if peak and self.cost.step_s else None
