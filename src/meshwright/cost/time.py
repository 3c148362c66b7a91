"""The time of a step: blocks by roofline, collectives by links, played through the schedule, term by term."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from meshwright.cost.compute import Phases, Speeds, speeds
from meshwright.cost.links import Collective, Placement, collective_s
from meshwright.cost.memory import recomputed_blocks
from meshwright.cost.offload import Streams, offload_streams
from meshwright.cost.play import HALVES, Play, StageTimes, unit_counts
from meshwright.cost.simulate import Played
from meshwright.cost.stage_work import StageWork, Workshop
from meshwright.cost.stages import Stage, cut
from meshwright.cost.states import shard_group, summed_elements
from meshwright.schedule import stage_ranks
from meshwright.spec import DTYPE_BYTES, Cluster, Job, ModelSpec, Strategy
from meshwright.spec.conventions import Convention

__all__ = ["JITTER", "TERMS", "StepTime", "step_time"]

#: The terms of a step, in the order in which they are shown.
TERMS = (
    "matrix products",
    "attention",
    "memory-bound operations",
    "logits and loss",
    "recompute",
    "tensor parallel",
    "context parallel",
    "expert parallel",
    "pipeline bubble",
    "pipeline messages",
    "parameter gathers",
    "gradient reduction",
    "optimizer",
    "offload",
    "synchronisation",
)
#: Waiting for the slowest of many nodes: a share of the compute for each doubling of their number.
JITTER = 0.01

#: Where the host's core is the device: what a gather or a reduction of a unit costs it besides the collective (copies,
#: hooks), and the update of a sharded tensor, in starts of an operation (measured with this runtime on a CPU).
_HOST_COLLECTIVE = 36
_HOST_TENSOR = 5


class StepTime:
    """The predicted time of one optimizer step.

    Args:
        model: described for the layout of the strategy.
        convention: another stack's way; without one this runtime's.

    Raises:
        ConfigError: the global batch does not divide into microbatches, or the stages do not fit the model.
        UnsupportedCombination: the schedule is not defined for these numbers of stages and microbatches.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: Cluster,
        job: Job,
        strategy: Strategy,
        *,
        convention: Convention | None = None,
    ) -> None:
        self.model, self.cluster, self.job, self.strategy = model, cluster, job, strategy
        self._convention = convention
        self.microbatches = strategy.microbatches(job.global_batch)
        self._placement = Placement(cluster, strategy)
        self._stages = cut(model, strategy)
        #: Seconds of collectives of a stage's units; stages that are alike share them.
        self._sent: dict[tuple[object, ...], float] = {}
        #: On a CPU a collective is computed by the core that it would run beside.
        self._overlap = (convention is None or convention.overlap) and cluster.device_kind != "cpu"

    @cached_property
    def step_s(self) -> float:
        """Seconds of one optimizer step."""
        return self._whole_s + self._after + self._beside

    @property
    def rest_s(self) -> float:
        """What of it comes beside the schedule that is played: the optimizer, sums that are made once, what
        collectives take from the compute beside them, waiting for the slowest node."""
        return self._after + self._beside

    @cached_property
    def _whole_s(self) -> float:
        """Seconds from the first forward to the last reduction."""
        return self._play.makespan_s()

    @cached_property
    def terms(self) -> dict[str, float]:
        """Seconds by term, in the order of `TERMS`; they add up to `step_s`. What does not occur is left out.

        Compute is that of the busiest pipeline rank; what it waits for is told apart by playing the schedule again
        without messages, gathers and reductions.
        """
        play, rank = self._play, self._busiest
        whole, times = self._whole_s, play.times
        gathered = min(whole, play.makespan_s(reduces=False)) if any(times.reduce) else whole
        sent = min(gathered, play.makespan_s(gathers=False, reduces=False)) if any(times.gather) else gathered
        quiet = sent
        if self.strategy.pp > 1:
            quiet = min(sent, play.makespan_s(gathers=False, reduces=False, messages=False))
        found = dict.fromkeys(TERMS, 0.0)
        for stage in self._held[rank]:
            for term, phases in self._work[stage].terms.items():
                found[term] += self.microbatches * (phases.forward + phases.backward)
        busy = sum(found.values())
        found["pipeline bubble"] += quiet - busy
        found["pipeline messages"] += sent - quiet
        found["parameter gathers"] += gathered - sent
        found["gradient reduction"] += whole - gathered
        gathers, reduces = self._held_up
        found["parameter gathers"] += gathers
        found["gradient reduction"] += reduces + self._replicas_s
        found["tensor parallel"] += self._shares_s
        found["optimizer"] += self._optimizer_s
        found["offload"] += self._streams.exposed_s
        found["synchronisation"] += self._jitter_s + self._statistics_s
        return {term: seconds for term, seconds in found.items() if seconds > 0}

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second."""
        return self.job.global_batch * self.job.sequence / self.step_s

    @cached_property
    def model_flops(self) -> float:
        """Flops of one step over all ranks without recompute: three times the forward's, all pairs of attention."""
        s = self.strategy
        return 3.0 * sum(b.forward_flops for b in self.model.blocks) * self.job.global_batch * s.tp * s.cp

    @property
    def mfu(self) -> float:
        """Model flops over the peak of all devices that are used, in the compute dtype."""
        return self.model_flops / (self.step_s * self.strategy.world_size * self._speeds[0].flops_per_s)

    @property
    def hfu(self) -> float:
        """As `mfu`, with what is computed again."""
        layers = self.model.layers[: recomputed_blocks(self.model, self.strategy)]
        again = sum(block.forward_flops for block in layers) if self.strategy.recompute == "full" else 0
        s = self.strategy
        more = float(again) * self.job.global_batch * s.tp * s.cp
        return self.mfu * (1 + more / self.model_flops) if self.model_flops else 0.0

    def played(self) -> Played:
        """The schedule of one data-parallel rank, played whole."""
        return self._play.played()

    # --- what is played -----------------------------------------------------------------------------------------------

    @cached_property
    def _speeds(self) -> tuple[Speeds, ...]:
        """By pipeline rank."""
        told = self._convention
        named = (told.product_dtype, told.attention_speed) if told is not None else ()
        found: dict[int, Speeds] = {}
        line = []
        for rank in range(self.strategy.pp):
            device = self._placement.devices(rank)
            if id(device) not in found:
                found[id(device)] = speeds(device, self.job.compute_dtype, *named)
            line.append(found[id(device)])
        return tuple(line)

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each pipeline rank."""
        s = self.strategy
        ranks = stage_ranks(s.schedule, s.pp, s.virtual_stages)
        return tuple(tuple(stage for stage, held in enumerate(ranks) if held == rank) for rank in range(s.pp))

    @cached_property
    def _work(self) -> tuple[StageWork, ...]:
        """By stage: the work of one microbatch. Without prefetch, compute waits for each unit that ZeRO-3 gathers."""
        s = self.strategy
        shop = Workshop(self.model, self.job, s, self._placement, self._convention)
        left, found = recomputed_blocks(self.model, s), []
        ranks = stage_ranks(s.schedule, s.pp, s.virtual_stages)
        alike: dict[tuple[object, ...], StageWork] = {}
        for stage, rank in zip(self._stages, ranks, strict=True):
            layers = sum(block.kind == "layer" for block in stage.blocks)
            here = min(left, layers)
            left -= here
            key = (stage.alike or stage.index, not stage.index, stage.loss_bytes, here, id(self._speeds[rank]))
            if key not in alike:
                work = shop.stage(stage, here, self._speeds[rank])
                if self._waits:
                    gather = self._gather_s(stage)
                    again = gather if self.strategy.schedule in HALVES and stage.index else 0.0
                    work.add("parameter gathers", Phases(gather, gather, again))
                alike[key] = work
            found.append(alike[key])
        return tuple(found)

    @property
    def _waits(self) -> bool:
        ahead = self.strategy.prefetch > 0 or self._convention is not None
        return self.strategy.zero == 3 and self._sharded and self.strategy.gather == "unit" and not ahead

    @cached_property
    def _units(self) -> tuple[int, ...]:
        """ZeRO units of each stage: one for what is outside the layers, and groups of layers."""
        step = self.strategy.unit_blocks
        return tuple(1 + -(-sum(b.kind == "layer" for b in stage.blocks) // step) for stage in self._stages)

    @cached_property
    def _play(self) -> Play:
        alike = {id(work): work.all for work in self._work}
        phases = [alike[id(work)] for work in self._work]
        if len(phases) > 1:  # the first stage does all of its backward in the weight half
            phases[0] = Phases(phases[0].forward, 0.0, phases[0].backward)
        times = StageTimes(
            phases=tuple(phases),
            gather=tuple(0.0 if self._waits else self._gather_s(stage) for stage in self._stages),
            reduce=tuple(self._reduce_s(stage) for stage in self._stages),
        )
        return Play(
            strategy=self.strategy,
            placement=self._placement,
            stages=self._stages,
            units=self._units,
            times=times,
            microbatches=self.microbatches,
            overlap=self._overlap,
            blocking=self._convention is not None and self._convention.blocking,
        )

    # --- collectives of ZeRO ------------------------------------------------------------------------------------------

    def _gather_s(self, stage: Stage, *, moved: bool = False) -> float:
        """Seconds to gather all units of a stage once."""
        if not self._sharded:
            return 0.0
        return self._sent_s("all_gather", stage, DTYPE_BYTES[self.job.compute_dtype], "zero", moved=moved)

    def _reduce_s(self, stage: Stage, *, moved: bool = False) -> float:
        if self._sharded:
            return self._sent_s("reduce_scatter", stage, self._reduce_bytes, "zero", moved=moved)
        return self._sent_s("all_reduce", stage, self._reduce_bytes, "reduced", moved=moved)

    @property
    def _sharded(self) -> bool:
        return shard_group(self.strategy) > 1

    @property
    def _reduce_bytes(self) -> float:
        told = self._convention.reduce_bytes if self._convention is not None else None
        return DTYPE_BYTES[self.job.reduce_dtype] if told is None else told

    def _sent_s(self, kind: Collective, stage: Stage, each: float, dimension: str, *, moved: bool = False) -> float:
        """Seconds of a collective of every unit of a stage; `moved`: of its bytes alone, on the link inside a node."""
        key = (stage.alike or stage.index, kind, dimension, each, moved)
        if key not in self._sent:
            self._sent[key] = self._send_s(kind, stage, each, dimension, moved)
        return self._sent[key]

    def _send_s(self, kind: Collective, stage: Stage, each: float, dimension: str, moved: bool) -> float:
        units = self._units[stage.index]
        host = 0.0
        if self._sharded and not moved and not self._speeds[0].asynchronous:
            host = _HOST_COLLECTIVE * self._speeds[0].reached.kernel_s
        experts = sum(math.prod(shape) for block in stage.blocks for shape in block.experts)
        plain = sum(block.parameters for block in stage.blocks) - experts
        found = units * host
        for count, group in ((plain, dimension), (experts, "experts")):
            if count:
                over = self._placement.group(group)
                if moved:
                    over = over._replace(inside=over.size, nodes=1, within=replace(over.within, latency_s=0), call_s=0)
                found += units * collective_s(kind, each * count / units, over)
        return found

    @cached_property
    def _held_up(self) -> tuple[float, float]:
        """Seconds by which gathers and reductions hold up the compute of the busiest pipeline rank beside them."""
        if not self._overlap or self._waits:
            return 0.0, 0.0
        found = []
        counted = unit_counts(self.strategy, self.microbatches, self._busiest)
        for counts, of in zip(counted, (self._gather_s, self._reduce_s), strict=True):
            found.append(sum(times * of(self._stages[stage], moved=True) for stage, times in counts.items()))
        contention = self._speeds[self._busiest].reached.contention
        return contention * found[0], contention * found[1]

    # --- what comes after ---------------------------------------------------------------------------------------------

    @property
    def _beside(self) -> float:
        return sum(self._held_up)

    @property
    def _after(self) -> float:
        once = self._replicas_s + self._shares_s + self._optimizer_s
        return once + self._streams.exposed_s + self._jitter_s + self._statistics_s

    @cached_property
    def _replicas_s(self) -> float:
        """Hybrid sharding: what each rank holds is summed over replicas once, behind the last backward but one unit."""
        if not self._sharded or self.strategy.replicas == 1:
            return 0.0
        stage = self._stages[self._held[self._busiest][0]]
        units = self._units[stage.index]
        group = self._placement.group("dp_replicate")
        each = sum(block.parameters for block in stage.blocks) / units / self.strategy.shard
        one = collective_s("all_reduce", self._reduce_bytes * each, group)
        behind = self._play.times.phases[stage.index].backward * (units - 1) / units if self._overlap else 0.0
        return max(one, units * one - behind)

    @cached_property
    def _shares_s(self) -> float:
        """Gradients that are shares of each tensor-parallel rank, of norms of cut sequences say, are summed once."""
        stages = [self._stages[index] for index in self._held[self._busiest]]
        elements = summed_elements(stages, self.strategy)
        size = DTYPE_BYTES[self.job.param_dtype] * elements
        return collective_s("all_reduce", size, self._placement.group("tp")) if elements else 0.0

    @cached_property
    def _trained(self) -> int:
        """Parameters that one rank updates."""
        share = shard_group(self.strategy)
        held = self._held[self._busiest]
        return sum(block.trained_parameters for index in held for block in self._stages[index].blocks) // share

    @cached_property
    def _optimizer_s(self) -> float:
        """The gradients' norm and the update: each reads and writes what it needs once (a fused kernel)."""
        if self.strategy.offload.optimizer != "device":
            return 0.0
        stored, states = DTYPE_BYTES[self.job.param_dtype], self.job.optimizer.state_tensors
        moved = stored * (2 + 3 + 2 * states)
        if DTYPE_BYTES[self.job.compute_dtype] < stored:
            moved += stored + DTYPE_BYTES[self.job.compute_dtype]
        speed = self._speeds[self._busiest]
        seconds = moved * self._trained / speed.bytes_per_s
        if self._sharded and not speed.asynchronous:
            tensors = sum(len(b.tensors) for index in self._held[self._busiest] for b in self._stages[index].blocks)
            seconds += _HOST_TENSOR * tensors * speed.reached.kernel_s
        return seconds

    @cached_property
    def _streams(self) -> Streams:
        held = self._held[self._busiest]
        parts = [self._play.times.phases[index] for index in held]
        return offload_streams(
            self.job,
            self.strategy,
            self._placement.node(self._busiest),
            stages=[self._stages[index] for index in held],
            forward_s=sum(phases.forward for phases in parts),
            backward_s=sum(phases.backward for phases in parts),
            microbatches=self.microbatches,
            trained=self._trained,
        )

    @cached_property
    def _nodes(self) -> int:
        per_node = min(group.devices for group in self.cluster.nodes)
        return -(-self.strategy.world_size // per_node)

    @cached_property
    def _jitter_s(self) -> float:
        return JITTER * math.log2(self._nodes) * self._busy_s

    @cached_property
    def _statistics_s(self) -> float:
        """One small all-reduce over all ranks."""
        if self.strategy.world_size == 1:
            return 0.0
        group = self._placement.group("reduced")
        nodes, inside = self._nodes, -(-self.strategy.world_size // self._nodes)
        return collective_s("all_reduce", 0, group._replace(size=self.strategy.world_size, inside=inside, nodes=nodes))

    @cached_property
    def _busiest(self) -> int:
        return max(range(self.strategy.pp), key=self._busy)

    @cached_property
    def _busy_s(self) -> float:
        return self.microbatches * self._busy(self._busiest)

    def _busy(self, rank: int) -> float:
        """Seconds that a pipeline rank computes for one microbatch."""
        return sum(one.forward + one.backward for one in (self._play.times.phases[i] for i in self._held[rank]))


def step_time(
    model: ModelSpec, cluster: Cluster, job: Job, strategy: Strategy, *, convention: Convention | None = None
) -> StepTime:
    """The predicted time of one optimizer step; see `StepTime`."""
    return StepTime(model, cluster, job, strategy, convention=convention)
