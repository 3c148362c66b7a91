"""Floors: what no price of a strategy lies below, cheap enough to be asked many thousand times.

They follow `StepTime` and `StepMemory` term by term. Of the time everything is there but what compute waits for while
the schedule is played, besides filling and emptying the pipeline. Of the memory everything is there that lies on the
first or the last pipeline rank while most microbatches are in flight, but what one operation needs for itself.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from meshwright.cost.compute import speeds
from meshwright.cost.held_floor import Load, Sheet, held_bytes, states_bytes
from meshwright.cost.lines import SLACK, Flow, Line, Lines, Pace, both, sent_s
from meshwright.cost.links import Collective, collective_s
from meshwright.cost.overhead import least_overhead_bytes
from meshwright.cost.pricer import Pricer
from meshwright.cost.states import shard_group
from meshwright.cost.time import JITTER
from meshwright.schedule import FOLDED
from meshwright.spec import DTYPE_BYTES, Strategy

__all__ = ["Floors"]


class Floors(Lines):
    """Lower bounds of the prices of one Pricer."""

    def __init__(self, pricer: Pricer) -> None:
        super().__init__(pricer)
        found = [speeds(group.device, self._job.compute_dtype) for group in self._cluster.nodes]
        #: Where the core that computes also sends, nothing runs beside compute that could hold it up.
        beside = self._cluster.device_kind != "cpu"
        self._contention = min(speed.reached.contention for speed in found) if beside else 0.0
        #: Whether it is known here which rank is the busiest.
        self._equal = len({speed.product_flops_per_s for speed in found}) == 1
        #: By number of ranks: seconds to sum up a few numbers of all of them.
        self._statistics: dict[int, float] = {1: 0.0}
        #: Of the strategy that was asked for last: it is asked for again with every way to recompute.
        self._last_room: tuple[Strategy | None, tuple[int, int]] = None, (0, 0)

    def bytes(self, strategy: Strategy) -> int:
        """Bytes that the rank that needs most does not lie below."""
        return held_bytes(self._job, self._cluster.device_kind, strategy, self._loads(strategy))

    def work_s(self, strategy: Strategy) -> float:
        """Seconds times ranks that no strategy with the layout and the microbatch of this one lies below, as long as
        all ranks lie on one node, or not, as its own do."""
        s, sequences = strategy, self._job.global_batch
        return SLACK * self._pace(s, "none").whole * s.tp * s.cp * sequences / s.microbatch

    def mesh_s(self, strategy: Strategy) -> float:
        """Seconds that no strategy on the mesh of this one lies below, whatever its schedule, ZeRO stage, recompute and
        offload: the compute of its microbatches, shared evenly by the pipeline ranks. It falls with `dp`."""
        pace = self._pace(strategy, "none")
        return self._mesh_s(strategy, pace, 0)

    def zero_mesh_s(self, strategy: Strategy, policy: str, blocks: Sequence[int]) -> tuple[float, int]:
        """Seconds that no strategy with the mesh, ZeRO stage, shard group and offload of this one lies below, with as
        much recomputation by a policy as memory makes necessary, and the place of that number in `blocks`; infinite
        where all is too little. A rank r of p holds as many microbatches in flight as under 1F1B, p - r: no schedule
        holds fewer.

        Args:
            blocks: numbers of first layers that may recompute, ascending; 0 stands for all of them.
        """
        sheet = self._sheet(strategy)
        layers, needed = len(sheet.line), self._recomputed(strategy, sheet, policy)
        place = next((place for place, n in enumerate(blocks) if (n or layers) >= needed), None)
        if place is None or (policy == "none" and needed):
            return math.inf, 0
        return self._zero_s(strategy, sheet, policy, 0 if policy == "none" else blocks[place] or layers), place

    def lean_mesh_s(self, strategy: Strategy, policy: str, blocks: Sequence[int]) -> float:
        """As `zero_mesh_s`, without the communication of ZeRO: where the strategy is the one of its mesh that keeps
        least, no other with this policy lies below."""
        sheet = self._sheet(strategy)
        layers, needed = len(sheet.line), self._recomputed(strategy, sheet, policy)
        found = next((n for n in blocks if (n or layers) >= needed), None)
        if found is None or (policy == "none" and needed):
            return math.inf
        return self._mesh_s(strategy, self._pace(strategy, policy), 0 if policy == "none" else found or layers)

    def recomputed_mesh_s(self, strategy: Strategy) -> float:
        """As `zero_mesh_s`, where at least so many layers recompute as in this strategy."""
        policy, sheet = strategy.recompute, self._sheet(strategy)
        recomputed = 0 if policy == "none" else strategy.recompute_blocks or len(sheet.line)
        return self._zero_s(strategy, sheet, policy, recomputed)

    def _zero_s(self, strategy: Strategy, sheet: Sheet, policy: str, recomputed: int) -> float:
        pace = self._pace(strategy, policy)
        if not self._equal:
            return self._mesh_s(strategy, pace, recomputed)
        layers, pp, count = len(sheet.line), strategy.pp, self._microbatches(strategy)
        first, last = both(pace.first), both(pace.last)
        load = (pace.whole + pace.again[recomputed] - pace.backward[recomputed]) / pp
        held = layers  # layers of the busiest rank, at least
        if pp > 1:
            layer = pace.again_layer if recomputed == layers else pace.layer
            load = max(load, _least_load(layers, layer, first, last, pp))
            held = max(0, int((load - first - last) / (pace.longest if recomputed else pace.longest_plain)))
        part, ends = held / layers, pp == 1
        plain, experts = sheet.elements(0, layers, ends, ends)
        trained = int(sheet.trained(0, layers, ends, ends) * part)
        rank = (int(plain * part), int(experts * part), 1, 0.0)
        busy = count * load + count * self._added_s(strategy, count, trained)
        gathers, reduces = self._gathers(strategy, count), self._reduces(strategy, count)
        wires, sharded = self._groups(strategy), shard_group(strategy) > 1
        c, r = DTYPE_BYTES[self._job.compute_dtype], DTYPE_BYTES[self._job.reduce_dtype]
        over, near = (wires.zero, wires.near_zero) if sharded else (wires.reduced, wires.near_reduced)
        kind: Collective = "reduce_scatter" if sharded else "all_reduce"
        streams = reduces * sent_s(kind, r, rank, over, wires.experts)
        beside = reduces * sent_s(kind, r, rank, near, wires.near_experts)
        if sharded and strategy.zero == 3 and strategy.gather == "unit" and not strategy.prefetch:
            busy += 2 * count * sent_s("all_gather", c, rank, wires.zero, wires.experts)
            beside = 0.0
        elif sharded:
            streams += gathers * sent_s("all_gather", c, rank, wires.zero, wires.experts)
            beside += gathers * sent_s("all_gather", c, rank, near, wires.near_experts)
        played = max(busy, pace.chain, streams if pp == 1 else 0.0)
        after = self._jitter(strategy) * busy + self._contention * beside
        return SLACK * (played + after + self._updated_s(strategy, trained))

    def _mesh_s(self, strategy: Strategy, pace: Pace, recomputed: int) -> float:
        whole, layers = pace.whole + pace.again[recomputed] - pace.backward[recomputed], len(pace.forward) - 1
        load = whole / strategy.pp
        if strategy.pp > 1 and self._equal:
            layer = pace.again_layer if recomputed == layers else pace.layer
            load = max(load, _least_load(layers, layer, both(pace.first), both(pace.last), strategy.pp))
        busy = self._microbatches(strategy) * (load + self._least_added_s(strategy))
        return SLACK * (max(busy, pace.chain) + busy * self._jitter(strategy))

    def _least_added_s(self, strategy: Strategy) -> float:
        """Seconds a microbatch that adding gradients takes the mean pipeline rank, whatever the ZeRO stage."""
        if self._microbatches(strategy) == 1:
            return 0.0
        sheet, pp = self._sheet(strategy), strategy.pp
        trained = sheet.trained(0, len(sheet.line), True, True) / pp
        made, kept = DTYPE_BYTES[self._job.compute_dtype], DTYPE_BYTES[self._job.reduce_dtype]
        return (made + 2 * kept / (strategy.dp * strategy.cp)) * trained / self._speed.bytes_per_s

    def microbatch_bytes(self, strategy: Strategy, policy: str) -> int:
        """Bytes that no strategy with the layout and the microbatch of this one lies below, whatever its pipeline, ZeRO
        stage and offload: what a layer's backward needs under the policy that keeps least, and the logits."""
        sheet = self._sheet(strategy)
        return strategy.microbatch * max(sheet.worked[policy], sheet.last_saved + sheet.logits)

    def least_bytes(self, strategy: Strategy) -> int:
        """Bytes that no strategy with this mesh, ZeRO stage, shard group and offload lies below, whatever its schedule,
        where all layers recompute by its policy."""
        policy, batch, sheet = strategy.recompute, strategy.microbatch, self._sheet(strategy)
        size, room = self._room(strategy, sheet)
        held = self._pricer.budget_bytes(strategy) - room
        if strategy.offload.activations == "host":
            return held
        kept = batch * size * sheet.kept_of_a_layer[policy]
        # While a layer's backward runs, all is there that it keeps without recomputation, or that it makes once more;
        # the last stage has the logits at the end of a forward. A single stage's are held already.
        flight = min(self._microbatches(strategy), strategy.pp)
        worked, ends = batch * sheet.worked[policy], batch * (sheet.last_saved + sheet.logits)
        if strategy.pp == 1:
            worked, ends = max(0, worked - ends), 0
        return held + int(max(flight * kept + worked, kept + ends))

    def _recomputed(self, strategy: Strategy, sheet: Sheet, policy: str) -> float:
        """How many of the first layers recompute at least: infinite where all of them are too few."""
        pp, batch = strategy.pp, strategy.microbatch
        size, room = self._room(strategy, sheet)
        if strategy.offload.activations == "host":
            return 0.0 if room >= 0 else math.inf
        whole, again = sheet.kept_of_a_layer["none"], sheet.kept_of_a_layer[policy]
        less, count, needed = whole - again, self._microbatches(strategy), 0.0
        most = batch * min(count, pp) * size  # in flight on the first rank, which holds most
        if most * whole > room and (less <= 0 or most * again > room):
            return math.inf
        for rank in range(pp):
            flight = batch * min(count, pp - rank)
            short = flight * whole * size - room
            if short <= 0:
                break
            needed = max(needed, rank * size + short / (flight * less))
        return math.ceil(needed)

    def _room(self, strategy: Strategy, sheet: Sheet) -> tuple[int, int]:
        """Layers of a pipeline rank, at least, and the bytes that its states leave for what they keep, at most."""
        if self._last_room[0] is strategy:
            return self._last_room[1]
        pp, batch = strategy.pp, strategy.microbatch
        layers = len(sheet.line)
        size = layers if pp == 1 else max(1, layers // pp * 3 // 4 - 1)
        plain, experts = sheet.elements(0, layers, pp == 1, pp == 1)
        part = size / layers
        trained = int(sheet.trained(0, layers, pp == 1, pp == 1) * part)
        early = self._microbatches(strategy) > pp
        load = Load(int(plain * part), int(experts * part), trained, 0, 0, early)
        [held] = states_bytes(self._job, strategy, (load,))
        held += least_overhead_bytes(self._cluster.device_kind, strategy, held)
        if pp == 1:
            held += batch * (sheet.first_saved + sheet.last_saved + sheet.logits)
        found = size, self._pricer.budget_bytes(strategy) - held
        self._last_room = strategy, found
        return found

    def schedule_s(self, strategy: Strategy) -> float:
        """Seconds that no strategy with this mesh, schedule and recomputation lies below, whatever its ZeRO stage."""
        line = self._line(strategy)
        return SLACK * (line.least_s + self._jitter(strategy) * line.busy_s + self._statistics_s(strategy))

    def strategy_s(self, strategy: Strategy) -> float:
        """Seconds that the price of this strategy does not lie below."""
        if not self._equal:
            return self.schedule_s(strategy)
        line, count = self._line(strategy), self._line(strategy).microbatches
        flow, sharded = self._flow(line, strategy), shard_group(strategy) > 1
        waits = strategy.zero == 3 and sharded and strategy.gather == "unit" and not strategy.prefetch
        gathers = 0.0 if waits else self._gathers(strategy, count)
        reduces = self._reduces(strategy, count)
        busy = line.busy_s + count * self._added_s(strategy, count, line.trained)
        busy += 2 * count * flow.gather if waits else 0.0
        played = max(line.least_s, busy + line.entry_s)
        if not self._extrapolated(strategy, count):
            played += self._around(strategy, line, flow, waits)
        if strategy.pp == 1:
            played = max(played, gathers * flow.gather + reduces * flow.reduce)  # one stream carries them
        after = self._jitter(strategy) * busy + self._statistics_s(strategy)
        if strategy.pp == 1 or not waits:  # otherwise another rank may be the busiest
            after += self._replicas_s(strategy, line, waits) + self._updated_s(strategy, line.trained)
        if not waits:
            after += self._contention * (gathers * flow.gather_moved + reduces * flow.reduce_moved)
        return SLACK * (played + after)

    # --- compute ------------------------------------------------------------------------------------------------------

    def _gathers(self, strategy: Strategy, count: int) -> float:
        """How often each stage is gathered, at least."""
        return 2 * count if strategy.zero == 3 and strategy.gather == "unit" else 1

    def _reduces(self, strategy: Strategy, count: int) -> float:
        """How often each stage is reduced, at least."""
        if strategy.dp * strategy.cp == 1:
            return 0
        if strategy.zero < 2 or shard_group(strategy) == 1:
            return 1
        return count if strategy.reduce == "microbatch" else max(1, count // strategy.pp)

    def _around(self, strategy: Strategy, line: Line, flow: Flow, waits: bool) -> float:
        """What the first forward waits for, and what is still reduced after the last backward of the first stage."""
        plain, experts, units, backward = line.stages[0]
        backward += self._added_s(strategy, line.microbatches, plain + experts)
        found = 0.0
        if flow.gather_first and not waits:
            gather = flow.gather_first
            found += max(gather / units, gather + line.forward_s / units - line.forward_s)
        if strategy.dp * strategy.cp > 1 and (strategy.pp == 1 or strategy.schedule not in FOLDED):
            reduce, back = flow.reduce_first, backward + (flow.gather_first if waits else 0.0)
            found += max(reduce / units, reduce + back / units - back)
        return found

    def _added_s(self, strategy: Strategy, microbatches: int, elements: int) -> float:
        """What adding a microbatch's gradients of so many elements to those before takes."""
        if microbatches == 1:
            return 0.0
        share = shard_group(strategy) if strategy.zero > 1 else 1
        made, kept = DTYPE_BYTES[self._job.compute_dtype], DTYPE_BYTES[self._job.reduce_dtype]
        return (made + 2 * kept / share) * elements / self._speed.bytes_per_s

    def _jitter(self, strategy: Strategy) -> float:
        return JITTER * math.log2(-(-strategy.world_size // self._per_node))

    def _statistics_s(self, strategy: Strategy) -> float:
        world = strategy.world_size
        if world not in self._statistics:
            group, nodes = self._groups(strategy).reduced, -(-world // self._per_node)
            all_ranks = group._replace(size=world, inside=-(-world // nodes), nodes=nodes)
            self._statistics[world] = collective_s("all_reduce", 0, all_ranks)
        return self._statistics[world]

    def _replicas_s(self, strategy: Strategy, line: Line, waits: bool) -> float:
        if shard_group(strategy) == 1 or strategy.replicas == 1:
            return 0.0
        plain, experts, units, backward = line.stages[1]
        backward += self._added_s(strategy, line.microbatches, plain + experts)
        each = DTYPE_BYTES[self._job.reduce_dtype] * (plain + experts) / units / strategy.shard
        one = collective_s("all_reduce", each, self._groups(strategy).replicas)
        # Where compute waits for gathers, the backward that hides the others is longer than is known here.
        return one if waits else max(one, units * one - backward * (units - 1) / units)

    def _updated_s(self, strategy: Strategy, trained: int) -> float:
        """Seconds of the optimizer's step for a rank with so many parameters before they are sharded."""
        if strategy.offload.optimizer != "device":
            return 0.0
        stored, compute = DTYPE_BYTES[self._job.param_dtype], DTYPE_BYTES[self._job.compute_dtype]
        moved = stored * (5 + 2 * self._job.optimizer.state_tensors) + (stored + compute if compute < stored else 0)
        return moved * (trained // shard_group(strategy)) / self._speed.bytes_per_s


@lru_cache(maxsize=4096)
def _least_load(layers: int, layer: float, first: float, last: float, ranks: int) -> float:
    """Seconds of the busiest of some ranks at least, that share out whole layers, and what comes before and after them.

    Before and after lie on the first and the last rank, or both on the first.
    """
    low = max(1, layers // ranks - math.ceil((first + last) / layer) - 1)
    steps = sorted(
        more + count * layer for more in (0.0, first, last, first + last) for count in range(low, layers // ranks + 4)
    )

    def enough(limit: float) -> bool:
        room = limit / layer * (1 + 1e-9)
        apart = (ranks - 2) * int(room) + max(0, int(room - first / layer)) + max(0, int(room - last / layer))
        together = (ranks - 1) * int(room) + max(0, int(room - (first + last) / layer))
        return max(apart, together) >= layers

    return steps[min(bisect_left(steps, True, key=enough), len(steps) - 1)]
