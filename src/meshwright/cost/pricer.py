"""Pricer: all prices of one model on one cluster for one job."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from meshwright.cost.balance import balanced_layers, balanced_ranks
from meshwright.cost.compute import Phases, Speeds, speeds
from meshwright.cost.estimate import Estimate, estimate, estimate_of, rank_bytes
from meshwright.cost.links import Placement
from meshwright.cost.memory import StepMemory, recomputed_blocks
from meshwright.cost.price import price
from meshwright.cost.stage_work import Workshop
from meshwright.cost.time import StepTime
from meshwright.schedule import FOLDED, stage_ranks
from meshwright.spec import Cluster, Cost, Job, Layout, ModelSpec, Strategy, even_layers
from meshwright.spec.conventions import on_accelerator
from meshwright.spec.families import Described

__all__ = ["Pricer"]


class _Parts(NamedTuple):
    """Seconds of one microbatch on the first block, each layer (plain, and recomputed), and the last block and loss."""

    first: Phases
    layers: tuple[Phases, ...]
    again: tuple[Phases, ...]
    last: Phases


class Pricer:
    """Every price of one described model on one cluster for one job; what strategies share is worked out once.

    Args:
        described: the model.
        cluster: the machines.
        job: global batch, sequence, dtypes, optimizer.
    """

    def __init__(self, described: Described, cluster: Cluster, job: Job) -> None:
        self.described, self.cluster, self.job = described, cluster, job
        self._models: dict[Layout, ModelSpec] = {}
        self._parts: dict[tuple[object, ...], _Parts] = {}
        self._cuts: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._times: dict[Strategy, StepTime] = {}
        self._steps: dict[Strategy, StepMemory] = {}
        self._memories: dict[Strategy, Estimate] = {}
        most_first = sorted(cluster.nodes, key=lambda group: -group.device.memory_bytes)
        devices = accumulate(group.count * group.devices for group in most_first)
        usable = (int(group.device.memory_bytes * cluster.memory_fraction) for group in most_first)
        #: Up to how many devices there are those with at least so many bytes that a plan may use.
        self._budgets = list(zip(devices, usable, strict=True))
        self._convention = None if cluster.device_kind == "cpu" else on_accelerator(None)

    def on(self, cluster: Cluster) -> Pricer:
        """The prices of the same model and job on other machines. What these do not change is worked out once for both:
        the bytes of a step on devices of the same kind, and its seconds where only memory differs."""
        other = Pricer(self.described, cluster, self.job)
        other._models = self._models
        if cluster.device_kind == self.cluster.device_kind:
            other._steps = self._steps
        if _forgetting_memory(cluster) == _forgetting_memory(self.cluster):
            other._parts, other._cuts, other._times = self._parts, self._cuts, self._times
        return other

    # --- exact --------------------------------------------------------------------------------------------------------

    def model(self, strategy: Strategy) -> ModelSpec:
        """The model as a rank of this strategy sees it.

        Raises:
            UnsupportedCombination: tp, cp or ep cannot divide it.
            ConfigError: the sequence is too long for it, or cp does not divide the sequence.
        """
        layout = Layout.of(self.job, strategy)
        if layout not in self._models:
            self._models[layout] = self.described.at(layout)
        return self._models[layout]

    def settled(self, strategy: Strategy) -> Strategy:
        """The strategy with its stages cut so that the slowest is as fast as can be, where it does not say how.

        Raises:
            ConfigError: there are more stages than layers.
        """
        if strategy.pp == 1 or strategy.stages:
            return strategy
        sizes = self.layers_of(strategy)
        return strategy if sizes == even_layers(sum(sizes), len(sizes)) else replace(strategy, stages=sizes)

    def time(self, strategy: Strategy) -> StepTime:
        """The time of a step; `step_s` alone plays the schedule once."""
        if strategy not in self._times:
            self._times[strategy] = StepTime(self.model(strategy), self.cluster, self.job, strategy)
        return self._times[strategy]

    def step_s(self, strategy: Strategy) -> float:
        """Seconds of a step."""
        return self.time(strategy).step_s

    def memory(self, strategy: Strategy) -> Estimate:
        """The memory of every pipeline rank."""
        if strategy not in self._memories:
            step, model = self._step(strategy), self.model(strategy)
            self._memories[strategy] = estimate_of(step, model, self.cluster, self.job, strategy, self._convention)
        return self._memories[strategy]

    def short_bytes(self, strategy: Strategy, *, ends: bool = False) -> int:
        """Bytes that a device is short of: of the first pipeline rank that is short, looked at from both ends; of the
        one that needs most, 0 or less, where none is.

        Args:
            ends: look at the first and the last pipeline rank alone.
        """
        step, usable = self._step(strategy), self.budget_bytes(strategy)
        first, *others = range(len(step.ranks))
        most = -usable
        for index in [first, *others[-1:], *([] if ends else others[:-1])]:
            most = max(most, rank_bytes(step.ranks[index], self.cluster, strategy, self._convention) - usable)
            if most > 0:
                break
        return most

    def fits(self, strategy: Strategy) -> bool:
        """Whether every device, host and disk has room."""
        return self.short_bytes(strategy) <= 0 and self.memory(strategy).fits

    def _step(self, strategy: Strategy) -> StepMemory:
        if strategy.world_size > self.cluster.devices:
            estimate(self.model(strategy), self.cluster, self.job, strategy)  # says so
        if strategy not in self._steps:
            self._steps[strategy] = StepMemory(self.model(strategy), self.job, strategy, self._convention)
        return self._steps[strategy]

    def price(self, strategy: Strategy) -> Cost:
        """Memory, communication, and seconds term by term."""
        return price(
            self.model(strategy),
            self.cluster,
            self.job,
            strategy,
            time=self.time(strategy),
            memory=self._step(strategy),
            found=self.memory(strategy),
        )

    def budget_bytes(self, strategy: Strategy) -> int:
        """What a plan may use of the smallest device that it needs; those with the most memory are taken first."""
        ranks = strategy.world_size
        for devices, usable in self._budgets:
            if ranks <= devices:
                return usable
        return self._budgets[-1][1]

    # --- parts --------------------------------------------------------------------------------------------------------

    def _works(self, strategy: Strategy) -> _Parts:
        s = strategy
        key = (s.tp, s.cp, s.ep, s.sequence_parallel, s.microbatch, s.mesh_order, s.recompute, self._near(strategy))
        if key not in self._parts:
            model = self.model(strategy)
            placement = Placement(self.cluster, strategy)
            shop = Workshop(model, self.job, strategy, placement, None)
            speed = self._fastest()
            others = [block for block in model.blocks if block.kind != "layer"]
            first = last = Phases()
            for block in others:
                work = shop.block(block, "none", speed).all
                if block.kind == "head":
                    last = last.plus(work).plus(shop.loss(speed))
                else:
                    first = first.plus(work)
            layers = tuple(shop.block(block, "none", speed).all for block in model.layers)
            again = layers
            if s.recompute != "none":
                again = tuple(shop.block(block, s.recompute, speed).all for block in model.layers)
            self._parts[key] = _Parts(first, layers, again, last)
        return self._parts[key]

    def _near(self, strategy: Strategy) -> bool:
        """Whether all ranks lie on one node: then every group has the link inside it."""
        return strategy.world_size <= min(group.devices for group in self.cluster.nodes)

    def _fastest(self) -> Speeds:
        if not hasattr(self, "_speed"):
            found = [speeds(group.device, self.job.compute_dtype) for group in self.cluster.nodes]
            self._speed = max(found, key=lambda speed: speed.product_flops_per_s)
        return self._speed

    def layers_of(self, strategy: Strategy) -> tuple[int, ...]:
        """Layers per stage."""
        s = strategy
        if s.stages:
            return s.stages
        count = s.pp * s.virtual_stages
        layers = len(self.model(strategy).layers)
        if count == 1:
            return (layers,)
        even = even_layers(layers, count)
        if min(even) < 1:
            return even
        world = s.world_size if len(self.cluster.nodes) > 1 else 0
        mesh = (s.tp, s.cp, s.ep, s.sequence_parallel, s.microbatch, self._near(strategy), world)
        key = (*mesh, s.pp, s.virtual_stages, s.schedule in FOLDED, s.recompute, s.recompute_blocks)
        if key not in self._cuts:
            parts = self._works(strategy)
            recomputed = recomputed_blocks(self.model(strategy), strategy)
            costs = [_both(one) for one in (*parts.again[:recomputed], *parts.layers[recomputed:])]
            beside = [0.0] * count
            beside[0] += _both(parts.first)
            beside[-1] += _both(parts.last)
            paces = self._paces(strategy)
            ranks = stage_ranks(s.schedule, s.pp, s.virtual_stages)
            found = balanced_layers(costs, beside, paces) if s.virtual_stages == 1 else ()
            self._cuts[key] = found or balanced_ranks(costs, beside, ranks, paces)
        return self._cuts[key]

    def _paces(self, strategy: Strategy) -> tuple[float, ...]:
        """How fast the device of each stage is beside the fastest; empty where all are equal."""
        if len(self.cluster.nodes) == 1:
            return ()
        placement, fastest = Placement(self.cluster, strategy), self._fastest()
        devices = (
            placement.devices(rank) for rank in stage_ranks(strategy.schedule, strategy.pp, strategy.virtual_stages)
        )
        paces = (speeds(device, self.job.compute_dtype).product_flops_per_s for device in devices)
        return tuple(pace / fastest.product_flops_per_s for pace in paces)


def _forgetting_memory(cluster: Cluster) -> Cluster:
    nodes = (replace(group, device=replace(group.device, memory_bytes=1)) for group in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


def _both(phases: Phases) -> float:
    return phases.forward + phases.input + phases.weight
