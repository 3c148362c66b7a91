"""What a strategy holds at least: the first and the last pipeline rank while most microbatches are in flight."""

from __future__ import annotations

import math
from itertools import accumulate
from operator import add

from msgspec import Struct

from meshwright.cost.overhead import least_overhead_bytes
from meshwright.cost.states import expert_group, shard_group
from meshwright.schedule import FOLDED
from meshwright.spec import DTYPE_BYTES, BlockSpec, Job, ModelSpec, Strategy

__all__ = ["Load", "Sheet", "held_bytes", "in_flight", "loads_of", "states_bytes"]

_ALL_AT_ONCE = ("gpipe", "looped-bfs")
_POLICIES = ("none", "selective", "full")


class Sheet:
    """What floors need of a model under one layout, summed up layer by layer.

    Attributes:
        kinds: layers that differ; `line` the number of the kind of each layer.
        around: the blocks that are no layers.
    """

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        self.around = [block for block in model.blocks if block.kind != "layer"]
        numbers: dict[tuple[object, ...], int] = {}
        self.kinds: list[BlockSpec] = []
        self.line: list[int] = []
        for block in model.layers:
            key = (block.parameters, block.forward_flops, block.moved_bytes, block.element_bytes, len(block.experts))
            if key not in numbers:
                numbers[key] = len(numbers)
                self.kinds.append(block)
            self.line.append(numbers[key])
        experts = [_experts(block) for block in self.kinds]
        self._plain = self._sums([b.parameters - e for b, e in zip(self.kinds, experts, strict=True)])
        self._experts = self._sums(experts)
        self._trained = self._sums([block.trained_parameters for block in self.kinds])
        self._saved = {policy: self._sums([_saved(block, policy) for block in self.kinds]) for policy in _POLICIES}
        #: Bytes that a layer keeps of one sequence on average, by policy.
        self.kept_of_a_layer = {policy: sums[-1] / len(self.line) for policy, sums in self._saved.items()}
        #: Bytes of one sequence that the backward of any layer needs besides what it keeps under a policy, at least.
        self.worked = {
            policy: min(
                min(_alive(b, policy), _saved(b, "none")) - min(_saved(b, policy), _saved(b, "none"))
                for b in self.kinds
            )
            for policy in _POLICIES
        }
        self._waiting = self._sums([block.waiting_bytes for block in self.kinds])
        self.first = [block for block in self.around if block.kind == "embedding"]
        self.last = [block for block in self.around if block.kind == "head"]
        self.first_saved = sum(_saved(block, "none") for block in self.first)
        self.last_saved = sum(_saved(block, "none") for block in self.last)
        #: Bytes of the logits of one sequence and of what the loss keeps.
        self.logits = sum(block.output_bytes for block in self.last) + model.loss_bytes
        self._ends = (
            sum(block.parameters for block in self.first),
            sum(block.parameters for block in self.last),
            sum(block.trained_parameters for block in self.first),
            sum(block.trained_parameters for block in self.last),
        )

    def _sums(self, by_kind: list[int]) -> list[int]:
        return list(accumulate((by_kind[kind] for kind in self.line), initial=0))

    def elements(self, start: int, size: int, first: bool, last: bool) -> tuple[int, int]:
        """Parameters of a stage of so many layers, and of experts in it; a tied weight's copy is not counted."""
        plain = self._plain[start + size] - self._plain[start] + first * self._ends[0] + last * self._ends[1]
        return plain, self._experts[start + size] - self._experts[start]

    def trained(self, start: int, size: int, first: bool, last: bool) -> int:
        """Those of them that get a gradient."""
        return self._trained[start + size] - self._trained[start] + first * self._ends[2] + last * self._ends[3]

    def saved(self, start: int, size: int, policy: str, recomputed: int) -> int:
        """Bytes that a stage keeps of one sequence, of its layers, the first `recomputed` of the model by a policy."""
        stop = start + size
        middle = min(max(start, recomputed), stop)
        plain, again = self._saved["none"], self._saved[policy]
        return plain[stop] - plain[middle] + again[middle] - again[start]

    def waiting(self, start: int, size: int, recomputed: int) -> int:
        """Bytes of one sequence that wait between the halves of a backward of the last stage."""
        middle = min(max(start, recomputed), start + size)
        return self._waiting[start + size] - self._waiting[middle] + sum(b.waiting_bytes for b in self.last)

    def working(self, layer: int, policy: str) -> int:
        """Bytes of one sequence that the backward of a layer adds to what it kept."""
        block = self.kinds[self.line[layer]]
        saved = _saved(block, policy)
        return max(0, _alive(block, policy) - saved) + block.backward_extra_bytes


class Load(Struct, frozen=True, gc=False):
    """What one pipeline rank holds while most microbatches are in flight: elements on its stages, those of experts and
    those with a gradient among them; bytes of activations and logits, also where activations of layers go to the host;
    and whether gradients of earlier microbatches are there, and of earlier windows of microbatches."""

    plain: int
    experts: int
    trained: int
    kept: int
    kept_here: int
    early: bool
    windows: bool = False


def loads_of(sheet: Sheet, strategy: Strategy, sizes: tuple[int, ...], microbatches: int) -> tuple[Load, ...]:
    """The first and the last pipeline rank under stages of so many layers, and the one whose layers keep most."""
    starts = (0, *accumulate(sizes))
    ranks = {0, strategy.pp - 1}
    again = 0 if strategy.recompute == "none" else strategy.recompute_blocks
    if again and strategy.schedule not in FOLDED:
        kept = [0] * strategy.pp
        for stage, size in enumerate(sizes):
            rank = stage % strategy.pp
            kept[rank] += (strategy.pp - rank) * sheet.saved(starts[stage], size, strategy.recompute, again)
        ranks.add(max(range(strategy.pp), key=kept.__getitem__))
    return tuple(_load(sheet, strategy, sizes, starts, microbatches, rank) for rank in sorted(ranks))


def _load(
    sheet: Sheet, strategy: Strategy, sizes: tuple[int, ...], starts: tuple[int, ...], microbatches: int, rank: int
) -> Load:
    layers, batch, policy = len(sheet.line), strategy.microbatch, strategy.recompute
    again = 0 if policy == "none" else strategy.recompute_blocks or layers
    flights = in_flight(strategy.schedule, strategy.pp, microbatches, strategy.virtual_stages, rank)
    plain = experts = trained = kept = here = logits = working = waiting = 0
    last = len(sizes) - 1
    for stage, flight in flights.items():
        start, size = starts[stage], sizes[stage]
        one, laid = sheet.elements(start, size, stage == 0, stage == last)
        plain, experts = plain + one, experts + laid
        trained += sheet.trained(start, size, stage == 0, stage == last)
        kept += batch * flight * sheet.saved(start, size, policy, again)
        if stage == 0:
            here += batch * flight * sheet.first_saved
        if stage == last:
            here += batch * flight * sheet.last_saved
            if strategy.schedule == "zb-h1":  # weight halves wait for as many microbatches as there are ranks before
                waiting = min(microbatches - 1, rank)
                kept += batch * waiting * sheet.waiting(start, size, again)
            logits += batch * sheet.logits
            if strategy.schedule in _ALL_AT_ONCE:
                logits += batch * sheet.model.loss_bytes * (flight - 1)
        else:
            working = batch * sheet.working(start + size - 1, policy if start + size <= again else "none")
    flying = sum(flights.values()) + waiting
    return Load(
        plain,
        experts,
        trained,
        kept + here + max(logits, working),
        here + logits,
        microbatches > flying,
        microbatches > max(flying, strategy.pp + 1),
    )


def held_bytes(job: Job, kind: str, strategy: Strategy, loads: tuple[Load, ...]) -> int:
    """Bytes that the rank that needs most does not lie below."""
    away = strategy.offload.activations == "host"
    kept = [load.kept_here if away else load.kept for load in loads]
    most: int = max(map(add, states_bytes(job, strategy, loads), kept))
    return most + least_overhead_bytes(kind, strategy, most)


def states_bytes(job: Job, strategy: Strategy, loads: tuple[Load, ...]) -> list[int]:
    """Model states of ranks while microbatches are in flight, at least."""
    zero, group, experts = strategy.zero, shard_group(strategy), expert_group(strategy)
    sharded, keeps_whole = group > 1, zero < 2 or (strategy.reduce == "window" and strategy.pp > 1)
    stored, compute, reduced = (DTYPE_BYTES[t] for t in (job.param_dtype, job.compute_dtype, job.reduce_dtype))
    here, copies_here = strategy.offload.optimizer == "device", strategy.offload.parameters == "device"
    whole = zero < 3 or not sharded or strategy.gather == "step"
    # Bytes of an element: of all on the rank, of its share of them, and of those of its share with a gradient.
    of_all = compute if whole and copies_here and (sharded or compute < stored) else 0
    of_share = stored if here and copies_here else 0
    of_trained = stored * job.optimizer.state_tensors if here else 0
    buckets = strategy.dp * strategy.cp > 1  # without, gradients are there once a backward has made them
    found = []
    for load in loads:
        share, trained = load.plain + load.experts, load.trained
        held = of_all * share
        if not sharded:
            held += stored * trained if buckets or load.early else 0
        else:
            share = load.plain // group + load.experts // experts
            trained = min(trained, share)
            if load.early and keeps_whole:
                held += reduced * load.trained
            if here and (load.early if not keeps_whole else load.early and zero > 1 and load.windows):
                held += stored * trained  # beside whole gradients lies what was reduced before
        found.append(held + of_share * share + of_trained * trained)
    return found


def in_flight(schedule: str, ranks: int, microbatches: int, virtual: int, rank: int) -> dict[int, int]:
    """Microbatches in flight on each stage of a rank, before its first backward; of folded schedules at a moment when
    they are many, on the first or the last rank."""
    p, m, v = ranks, microbatches, virtual
    if schedule in FOLDED:
        if rank == 0:
            return {0: min(m, 2 * p - (schedule == "zb-v")), 2 * p - 1: 1}
        return {rank: min(m, p), 2 * p - 1 - rank: min(m, p)}
    if schedule in _ALL_AT_ONCE:
        return dict.fromkeys(range(rank, p * v, p), m)
    if v == 1:
        return {rank: min(m, p - rank)}
    turn = m // max(1, m // p)
    ahead = (v - 1) * turn + (p - 1 - rank) * (1 if schedule == "interleaved-zb" else 2)
    steps = min(v * m, ahead + 1)
    found = {}
    for chunk in range(v):
        whole, left = divmod(steps, turn * v)
        found[chunk * p + rank] = whole * turn + min(turn, max(0, left - chunk * turn))
    return {stage: flight for stage, flight in found.items() if flight}


def _alive(block: BlockSpec, policy: str) -> int:
    return block.alive_bytes.get(policy, max(_saved(block, "none"), _saved(block, policy)))


def _experts(block: BlockSpec) -> int:
    return sum(math.prod(shape) for shape in block.experts)


def _saved(block: BlockSpec, policy: str) -> int:
    return block.saved_bytes.get(policy, block.saved_bytes.get("none", 0))
