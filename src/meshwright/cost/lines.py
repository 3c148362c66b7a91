"""Lines: what floors know of a strategy's stages, shared by all that differ in ZeRO and offload alone."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from msgspec import Struct

from meshwright.cost.balance import balanced_layers, balanced_ranks
from meshwright.cost.compute import Phases, speeds
from meshwright.cost.held_floor import Load, Sheet, loads_of
from meshwright.cost.links import Collective, Group, Placement, collective_s
from meshwright.cost.play import SPLIT, rounds_left_out
from meshwright.cost.pricer import Pricer
from meshwright.cost.stage_work import Workshop
from meshwright.cost.states import shard_group
from meshwright.schedule import FOLDED, stage_ranks
from meshwright.spec import DTYPE_BYTES, Strategy

__all__ = ["SLACK", "Flow", "Line", "Lines", "Pace", "Wires", "both", "sent_s"]

#: Of a step the part that is left out, so that rounding never lifts a floor above a price.
SLACK = 1 - 1e-9


class Pace(NamedTuple):
    """Seconds of one microbatch.

    Attributes:
        forward, backward, again: of all layers up to each; `again` is the backward with recomputation.
        weights: the half of the backward towards weights, which blocks that recompute do not split off.
        first, last: of the embedding, and of the head and the loss.
        chain: through the whole model and back, without what nobody waits for, the gradients of weights.
        layer, again_layer: of the quickest layer, without and with recomputation.
        longest, longest_plain: of the slowest layer, with and without recomputation.
        costs, costs_again: of each layer.
        whole: all of it, without recomputation.
    """

    forward: list[float]
    backward: list[float]
    again: list[float]
    weights: list[float]
    first: Phases
    last: Phases
    chain: float
    layer: float
    again_layer: float
    longest: float
    longest_plain: float
    costs: list[float]
    costs_again: list[float]
    whole: float


class Wires(NamedTuple):
    """The groups of ranks that ZeRO's collectives run over; `near` ones as if they lay on one node and a start took no
    time."""

    zero: Group
    reduced: Group
    experts: Group
    replicas: Group
    near_zero: Group
    near_reduced: Group
    near_experts: Group


class Flow(Struct, frozen=True, gc=False):
    """Seconds to gather and to reduce all units once: of the first stage, and of those of the busiest rank; and what of
    the latter moving the bytes inside a node would take."""

    gather_first: float
    reduce_first: float
    gather: float
    reduce: float
    gather_moved: float
    reduce_moved: float


class Line(Struct):
    """What strategies that differ in ZeRO and offload alone share.

    Attributes:
        least_s: seconds that playing the schedule takes at least.
        busy_s: seconds that the busiest rank computes; `entry_s` those that pass before and after.
        stages: elements, those of experts, units and seconds of a backward: of the first stage, then of those of the
            busiest rank.
        trained: parameters of the busiest rank that get a gradient.
        forward_s: of the first stage.
    """

    microbatches: int
    least_s: float
    busy_s: float
    entry_s: float
    stages: list[tuple[int, int, int, float]]
    trained: int
    forward_s: float
    flows: dict[tuple[int, bool], Flow] = {}


class Lines:
    """Stages, ranks and groups of ranks of strategies, each worked out once."""

    def __init__(self, pricer: Pricer) -> None:
        self._pricer, self._cluster, self._job = pricer, pricer.cluster, pricer.job
        self._sheets: dict[tuple[object, ...], Sheet] = {}
        self._shops: dict[tuple[object, ...], Workshop] = {}
        self._paces: dict[tuple[object, ...], Pace] = {}
        self._cuts: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._lines: dict[tuple[object, ...], Line] = {}
        self._held: dict[tuple[object, ...], tuple[Load, ...]] = {}
        self._wires: dict[tuple[object, ...], Wires] = {}
        found = [speeds(group.device, self._job.compute_dtype) for group in self._cluster.nodes]
        self._speed = max(found, key=lambda speed: speed.product_flops_per_s)
        self._per_node = min(group.devices for group in self._cluster.nodes)

    def _microbatches(self, strategy: Strategy) -> int:
        return self._job.global_batch // (strategy.dp * strategy.microbatch)

    def _near(self, strategy: Strategy) -> bool:
        """Whether all ranks lie on one node."""
        return strategy.world_size <= self._per_node

    def _pace(self, strategy: Strategy, policy: str) -> Pace:
        s = strategy
        key = (s.tp, s.cp, s.ep, s.sequence_parallel, s.microbatch, self._near(s), policy)
        if key not in self._paces:
            sheet = self._sheet(s)
            if key[:-1] not in self._shops:
                self._shops[key[:-1]] = Workshop(sheet.model, self._job, s, Placement(self._cluster, s), None)
            shop = self._shops[key[:-1]]
            first = last = Phases()
            for block in sheet.around:
                work = shop.block(block, "none", self._speed).all
                if block.kind == "head":
                    last = last.plus(work).plus(shop.loss(self._speed))
                else:
                    first = first.plus(work)
            plain = [shop.block(block, "none", self._speed).all for block in sheet.kinds]
            again = [shop.block(block, policy, self._speed).all for block in sheet.kinds]
            self._paces[key] = Pace(
                list(accumulate((plain[kind].forward for kind in sheet.line), initial=0.0)),
                list(accumulate((plain[kind].backward for kind in sheet.line), initial=0.0)),
                list(accumulate((again[kind].backward for kind in sheet.line), initial=0.0)),
                list(accumulate((plain[kind].weight for kind in sheet.line), initial=0.0)),
                first,
                last,
                sum(plain[kind].forward + plain[kind].input for kind in sheet.line)
                + sum(one.forward + one.input for one in (first, last)),
                min(both(one) for one in plain),
                min(both(one) for one in again),
                max(both(one) for one in again),
                max(both(one) for one in plain),
                [_in_all(plain[kind]) for kind in sheet.line],
                [_in_all(again[kind]) for kind in sheet.line],
                sum(plain[kind].forward + plain[kind].backward for kind in sheet.line) + both(first) + both(last),
            )
        return self._paces[key]

    def _sheet(self, strategy: Strategy) -> Sheet:
        """The model under the layout of a strategy."""
        s = strategy
        key = (s.tp, s.cp, s.ep, s.sequence_parallel)
        if key not in self._sheets:
            self._sheets[key] = Sheet(self._pricer.model(strategy))
        return self._sheets[key]

    def _line(self, strategy: Strategy) -> Line:
        key = _but_zero(strategy)
        if key not in self._lines:
            self._lines[key] = self._cut(strategy)
        return self._lines[key]

    def _loads(self, strategy: Strategy) -> tuple[Load, ...]:
        """What the ranks hold that may hold most."""
        key = _but_zero(strategy)
        if key not in self._held:
            sheet, sizes = self._sheet(strategy), self._sizes(strategy)
            self._held[key] = loads_of(sheet, strategy, sizes, self._microbatches(strategy))
        return self._held[key]

    def _cut(self, strategy: Strategy) -> Line:
        """A strategy's stages, and what is known of their ranks."""
        sheet, sizes = self._sheet(strategy), self._sizes(strategy)
        count, starts, last = self._microbatches(strategy), (0, *accumulate(sizes)), len(sizes) - 1
        forward, backward, weights = self._stage_seconds(strategy, sizes)
        ranks = stage_ranks(strategy.schedule, strategy.pp, strategy.virtual_stages)
        loads, entries, passed = [0.0] * strategy.pp, [math.inf] * strategy.pp, 0.0
        split = strategy.schedule in SPLIT
        for rank, there, back in zip(ranks, forward, backward, strict=True):
            loads[rank] += there + back
            entries[rank] = min(entries[rank], passed)
            passed += there if split else there + back
        least = max(count * load + entry for load, entry in zip(loads, entries, strict=True))
        most, by_rank = max(loads), [0] * strategy.pp
        for stage, rank in enumerate(ranks):
            by_rank[rank] += sum(sheet.elements(starts[stage], sizes[stage], stage == 0, stage == last))
        # What ranks do besides decides which is the busiest in the end: of all that may be, the one that sends least.
        made, kept = DTYPE_BYTES[self._job.compute_dtype], DTYPE_BYTES[self._job.reduce_dtype]
        added = [(made + 2 * kept) * elements / self._speed.bytes_per_s for elements in by_rank]
        may = [rank for rank in range(strategy.pp) if loads[rank] + added[rank] >= most * SLACK]
        busiest = min(may, key=lambda rank: (by_rank[rank], -loads[rank]))
        held = [0, *(stage for stage, rank in enumerate(ranks) if rank == busiest)]
        stages, trained = [], 0
        for stage in held:
            plain, experts = sheet.elements(starts[stage], sizes[stage], stage == 0, stage == last)
            stages.append((plain, experts, 1 + -(-sizes[stage] // strategy.unit_blocks), backward[stage]))
            trained += sheet.trained(starts[stage], sizes[stage], stage == 0, stage == last)
        trained -= sheet.trained(0, sizes[0], True, last == 0)  # the first was added besides
        return Line(
            microbatches=count,
            least_s=max(least, self._split_s(strategy, forward, backward, weights) if split else 0.0),
            busy_s=count * loads[busiest],
            entry_s=entries[busiest],
            stages=stages,
            trained=trained,
            forward_s=forward[0],
        )

    def _stage_seconds(self, strategy: Strategy, sizes: tuple[int, ...]) -> tuple[list[float], ...]:
        """Seconds of each stage for one microbatch: forward, backward, and the half of it towards weights."""
        pace = self._pace(strategy, strategy.recompute)
        again = 0 if strategy.recompute == "none" else strategy.recompute_blocks or len(pace.forward) - 1
        forward, backward, weights, stop = [], [], [], 0
        for size in sizes:
            start, stop = stop, stop + size
            middle = min(max(start, again), stop)
            forward.append(pace.forward[stop] - pace.forward[start])
            backward.append(pace.backward[stop] - pace.backward[middle] + pace.again[middle] - pace.again[start])
            weights.append(pace.weights[stop] - pace.weights[middle])
        weights[0] += pace.first.weight
        weights[-1] += pace.last.weight
        forward[0] += pace.first.forward
        backward[0] += pace.first.backward
        forward[-1] += pace.last.forward
        backward[-1] += pace.last.backward
        return forward, backward, weights

    def _sizes(self, strategy: Strategy) -> tuple[int, ...]:
        """Layers of each stage, as `Pricer.settled` cuts them."""
        s = strategy
        count, layers = s.pp * s.virtual_stages, len(self._sheet(strategy).line)
        if s.stages or count == 1 or count > layers or len(self._cluster.nodes) > 1:
            return self._pricer.layers_of(strategy)
        again = 0 if s.recompute == "none" else s.recompute_blocks or layers
        mesh = (s.tp, s.cp, s.ep, s.sequence_parallel, s.microbatch, self._near(s), s.pp, s.virtual_stages)
        key = (*mesh, s.schedule in FOLDED, s.recompute, again)
        if key not in self._cuts:
            pace = self._pace(strategy, s.recompute)
            costs = pace.costs_again[:again] + pace.costs[again:]
            beside = [0.0] * count
            beside[0] += _in_all(pace.first)
            beside[-1] += _in_all(pace.last)
            if s.virtual_stages == 1:
                self._cuts[key] = balanced_layers(costs, beside)
            else:
                self._cuts[key] = balanced_ranks(costs, beside, stage_ranks(s.schedule, s.pp, s.virtual_stages))
        return self._cuts[key]

    def _split_s(self, strategy: Strategy, forward: list[float], backward: list[float], weights: list[float]) -> float:
        """Seconds of a schedule with split backwards at least: the way to each rank, what that computes before the last
        microbatch leaves it but for weight halves that may wait, and the way back to the first rank."""
        count, pp, virtual = self._microbatches(strategy), strategy.pp, strategy.virtual_stages
        if self._extrapolated(strategy, count):
            return 0.0
        folded, least, there, back = strategy.schedule in FOLDED, 0.0, 0.0, 0.0
        for rank in range(pp):
            held = (rank, 2 * pp - 1 - rank) if folded else tuple(range(rank, pp * virtual, pp))
            load = count * sum(forward[stage] + backward[stage] for stage in held)
            if folded:
                waiting = count * sum(weights[stage] for stage in held)
            else:  # a weight half comes after the input half of as many actions later as there are ranks before
                waiting = min(count * virtual, rank + 1) * max(weights[stage] for stage in held) - weights[0]
            least = max(least, there + load - waiting + back)
            there, back = there + forward[rank], back + backward[rank] - weights[rank]
        return least

    # --- collectives --------------------------------------------------------------------------------------------------

    def _groups(self, strategy: Strategy) -> Wires:
        s = strategy
        key = (s.dp, s.tp, s.pp, s.cp, s.ep, s.shard, s.mesh_order)
        if key not in self._wires:
            placement = Placement(self._cluster, s)
            groups = [placement.group(name) for name in ("zero", "reduced", "experts", "dp_replicate")]
            self._wires[key] = Wires(*groups, *(_near(group) for group in groups[:3]))
        return self._wires[key]

    def _flow(self, line: Line, strategy: Strategy) -> Flow:
        sharded = shard_group(strategy) > 1
        key = (strategy.shard, sharded)
        if key not in line.flows:
            wires = self._groups(strategy)
            kind: Collective = "reduce_scatter" if sharded else "all_reduce"
            c, r = DTYPE_BYTES[self._job.compute_dtype], DTYPE_BYTES[self._job.reduce_dtype]
            zero = wires.zero, wires.near_zero
            over = zero if sharded else (wires.reduced, wires.near_reduced)
            times = []
            gather: Collective = "all_gather"
            for what, each, (ranks, near) in ((gather, c, zero), (kind, r, over)):
                here = sharded or what != "all_gather"
                times.append([sent_s(what, each, one, ranks, wires.experts) if here else 0.0 for one in line.stages])
                pair = near, wires.near_experts
                times.append([sent_s(what, each, one, *pair) if here else 0.0 for one in line.stages[1:]])
            gathers, gathers_moved, reduces, reduces_moved = times
            line.flows[key] = Flow(
                gathers[0], reduces[0], sum(gathers[1:]), sum(reduces[1:]), sum(gathers_moved), sum(reduces_moved)
            )
        return line.flows[key]

    def _extrapolated(self, strategy: Strategy, count: int) -> bool:
        """Whether only some rounds of a schedule with several stages a rank are played: that is not exact."""
        return strategy.virtual_stages > 1 and rounds_left_out(strategy, count) > 0


def _but_zero(strategy: Strategy) -> tuple[object, ...]:
    """What stages depend on: all of a strategy but ZeRO and offload."""
    s = strategy
    return (
        *(s.dp, s.tp, s.pp, s.cp, s.ep, s.sequence_parallel, s.microbatch, s.unit_blocks),
        *(s.schedule, s.virtual_stages, s.recompute, s.recompute_blocks, s.stages),
    )


def sent_s(kind: Collective, each: int, stage: tuple[int, int, int, float], over: Group, experts: Group) -> float:
    """Seconds to gather or reduce all units of a stage once."""
    plain, laid, units, _ = stage
    found = units * collective_s(kind, each * plain / units, over)
    return found + units * collective_s(kind, each * laid / units, experts) if laid else found


def _near(group: Group) -> Group:
    return group._replace(inside=group.size, nodes=1, within=replace(group.within, latency_s=0.0), call_s=0.0)


def _in_all(phases: Phases) -> float:
    """All seconds, added up as `Pricer` does: cuts of layers must not differ by a rounding."""
    return phases.forward + phases.input + phases.weight


def both(phases: Phases) -> float:
    return phases.forward + phases.backward
