"""What one stage holds, moment by moment, inside each action of a schedule, from the design's ZeRO table.

An action is looked at where blocks begin and end: after each unit's forward; after the loss; when the first gradient of
a block is made (the block's kept activations are still there), when its last one is (its unit's gradients are whole),
and in its reduce. What an operation needs while it runs comes on top and is not counted. All figures are bytes of one
rank, padding included.

Letters as in the design: P parameters, d ranks of a shard group, s, c and r bytes of the stored, compute and reduce
dtype, o bytes of optimizer states per parameter, m microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from msgspec import Struct

from meshwright.cost.occasions import Progress
from meshwright.cost.stages import Stage
from meshwright.cost.states import States, Sums
from meshwright.spec import DTYPE_BYTES, BlockSpec, Job, Strategy

__all__ = ["Moment", "StageMoments"]


class Moment(Struct, frozen=True, gc=False):
    """Bytes at one moment of a step, besides the stored parameters and the optimizer's states.

    `reduced` is the part of `gradients` that is already divided among the shard group.
    """

    phase: str
    gradients: int
    reduced: int
    gathered: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of the categories."""
        return self.gradients + self.gathered + self.activations + self.logits

    def plus(self, other: Moment) -> Moment:
        """Both at once; the phase is this one's."""
        return Moment(
            self.phase,
            self.gradients + other.gradients,
            self.reduced + other.reduced,
            self.gathered + other.gathered,
            self.activations + other.activations,
            self.logits + other.logits,
        )


class StageMoments:
    """The moments of one stage's actions.

    Args:
        stage: its blocks, and what the loss keeps on the last stage.
        recomputed: how many of this stage's first layers recompute.
    """

    def __init__(self, stage: Stage, job: Job, strategy: Strategy, *, recomputed: int) -> None:
        self.states = self._states_of(stage, job, strategy)
        #: The largest moment of an action, once it is known.
        self.largest: dict[tuple[object, ...], Moment] = {}
        self._while: dict[Progress, Moment] = {}
        self._strategy, self.recomputed = strategy, recomputed
        self._s, self._c = DTYPE_BYTES[job.param_dtype], DTYPE_BYTES[job.compute_dtype]
        self._r = DTYPE_BYTES[job.reduce_dtype]
        #: Bytes of a gradient's copy: whole ones are summed as they are stored, and sent narrower unit by unit.
        self._wire = self._r if self._r < self._s and strategy.dp > 1 else 0
        #: Whether whole gradients lie in buckets from the start of a step: not where there is nobody to reduce with.
        self._buckets = strategy.dp * strategy.cp > 1
        self._batch, self._step = strategy.microbatch, self.states.step
        self.layers = [block for block in stage.blocks if block.kind == "layer"]
        self._entrance = [block for block in stage.blocks if block.kind == "embedding"]
        self._head = [block for block in stage.blocks if block.kind == "head"]
        # Gradients of the root unit that the head makes first; they wait whole until the embedding's follow. That of a
        # tied weight waits inside autograd for its second part.
        self._early_root = self._c * sum(block.trained_parameters for block in self._head)
        self._early_tied = self._c * sum(block.tied_parameters for block in self._head) if self._entrance else 0
        #: The first stage has nobody to hand a gradient to: all of its backward is in the weight half.
        self._first = stage.index == 0 and strategy.pp > 1
        self._away = strategy.offload.activations == "host"
        kept = [self._batch * _saved(block, self._policy(index)) for index, block in enumerate(self.layers)]
        self._saved = Sums(kept)
        self._before, self._kept = self._activations(stage)
        logits = self._batch * (sum(block.output_bytes for block in self._head) + stage.loss_bytes)
        #: Activations that a forward sends to the host, for each microbatch in flight.
        self.sent = self._layers_saved(range(len(self.layers))) if self._away else 0
        #: Activations and logits at the end of a forward, and what of them is left behind until the backward: of the
        #: logits what the loss keeps.
        self._full = self._kept[-1], logits
        away = self._layers_saved(self._near(len(self.layers))) if self._away else 0
        self.kept = self._kept[-1] - away, self._batch * stage.loss_bytes
        self._defers = bool(self._head) or any(self._policy(index) == "none" for index in range(len(self.layers)))
        weights = [self._waiting(block, index) for index, block in enumerate(self.layers)]
        self._weights = Sums(weights)
        #: Whether an input half makes gradients of weights: a block that recomputes runs both halves at once.
        self.fused = not self._first and any(self._policy(index) != "none" for index in range(len(self.layers)))
        #: Activations that wait from the input half of a backward to its weight half.
        self.waiting = self._weights.all + sum(self._waiting(block, None) for block in self._head)
        if self._first:
            self.waiting = self.kept[0]
        #: The layers among which an action's largest moment is.
        self.telling = self._ends_of_runs(stage)
        self.largest_unit = self._c * max(self.states.wholes[1:], default=0)
        units = len(self.states.wholes) - 1
        self.gathers_in_flight = min(1 + strategy.prefetch, units) if strategy.zero == 3 else 0
        whole, offload = strategy.zero < 3 or not self.states.sharded, strategy.offload
        #: Whether whole compute copies are what rests on the device.
        self._copies_rest = whole and offload.parameters == "device" and offload.optimizer != "device"
        self._step_gather = strategy.zero < 3 or strategy.gather == "step"
        window = strategy.reduce == "window" and strategy.pp > 1
        self._end_reduce = strategy.zero < 2 or window
        #: Whether shards of an earlier window lie beside this window's whole gradients (a window is pp microbatches).
        self._windows = window and strategy.microbatches(job.global_batch) > strategy.pp + 1

    def _states_of(self, stage: Stage, job: Job, strategy: Strategy) -> States:
        """The model states of the stage."""
        return States(stage, job, strategy)

    def _activations(self, stage: Stage) -> tuple[list[int], list[int]]:
        """Bytes kept before each layer, and after each (the last entry: after the head too).

        Where activations go to the host, those of two layers are here: one is worked on, one is on its way.
        """
        around = self._batch * sum(_saved(block, "none") for block in self._entrance)
        around += sum(block.fixed_bytes for block in stage.blocks) + stage.around_bytes
        before, after = [], []
        for index in range(len(self.layers)):
            before.append(around + self._layers_saved(self._near(index)[-1:] if self._away else range(index)))
            after.append(around + self._layers_saved(self._near(index + 1)))
        head = self._batch * sum(_saved(block, "none") for block in self._head)
        after[-1:] = [after[-1], after[-1] + head]
        return before, after

    def _ends_of_runs(self, stage: Stage) -> list[int]:
        """The first and the last layers of every run of layers that are alike: within it, bytes rise or fall evenly, or
        fall and then rise, as one layer's unit after the other is gathered or reduced."""
        count, margin = len(self.layers), 2 + self._strategy.prefetch
        if self._step > 1 or not stage.alike:
            return list(range(count))
        kinds = [kind for kind, block in zip(stage.alike, stage.blocks, strict=True) if block.kind == "layer"]
        found, start = list[int](), 0
        for _, run in groupby((kind, self._policy(index)) for index, kind in enumerate(kinds)):
            stop = start + len(list(run))
            found += [index for index in range(start, stop) if index < start + margin or index >= stop - margin]
            start = stop
        return found

    def _near(self, stop: int) -> range:
        """The layers before `stop` whose kept activations are on the device."""
        return range(max(0, stop - 2), stop) if self._away else range(stop)

    def _layers_saved(self, layers: range) -> int:
        return self._saved.to(layers.stop) - self._saved.to(layers.start) if layers else 0

    def _waiting(self, block: BlockSpec, index: int | None) -> int:
        if index is not None and self._policy(index) != "none":  # kept as long as the graph is
            return self._batch * _saved(block, "full") if self._defers else 0
        if block.waiting_bytes:
            return self._batch * block.waiting_bytes
        return self._batch * _saved(block, "none" if index is None else self._policy(index))

    def forward(self, layers: Sequence[int], *, first: bool) -> Iterator[Moment]:
        """A microbatch's forward.

        Args:
            layers: those to look at, ascending.
            first: nothing of this stage has been gathered in this step yet.
        """
        for index in layers:
            block = self.layers[index]
            if (index + 1) % self._step == 0 or index + 1 == len(self.layers):
                gathered = self._gathered(self._unit(index), forward=True, edge=first)
                yield Moment("forward", 0, 0, gathered, self._kept[index] + self._batch * block.output_bytes, 0)
        yield Moment(
            "loss" if self._head else "forward", 0, 0, self._gathered(None, forward=True, edge=first), *self._full
        )

    def backward(self, layers: Sequence[int], *, earlier: bool, last: bool, half: str = "") -> Iterator[Moment]:
        """A microbatch's backward, or one `half` of it: "input" or "weight".

        Args:
            layers: those to look at, ascending.
            earlier: gradients of earlier microbatches are there.
            last: no backward of this stage follows in this step.
        """
        if self._first and half == "input":
            held = self.idle(begun=True, ended=False, earlier=earlier)
            yield Moment("backward", 0, 0, 0, *self._full).plus(held)
            return
        if self._first:
            half = ""
        if half == "weight":
            yield from self._weight_half(layers, earlier=earlier, last=last)
            return
        kept, split = self._full[0], half == "input"
        entering = self._batch * sum(block.backward_extra_bytes for block in self._head)
        yield self._at(None, "enter", kept, entering, (earlier, last, split))
        for index in reversed(layers):
            block, unit = self.layers[index], self._unit(index)
            waits = split and self._policy(index) == "none"
            state = (earlier, last, waits)
            base = self._before[index] + self._batch * block.backward_extra_bytes
            base += self.waiting - self._weights.to(index + 1) if split else 0
            whole = Moment("", self._early(unit) if split else 0, 0, 0, 0, 0)
            alive = base + self._batch * _alive(block, self._policy(index))
            yield self._at(unit, "enter", alive, 0, state).plus(whole)
            if index % self._step == 0:
                yield self._at(unit, "leave", base, 0, state).plus(whole)
                if not waits and not split:
                    yield self._at(unit, "reduce", base, 0, state)
        entering = self._before[0] + self._batch * sum(block.backward_extra_bytes for block in self._entrance)
        yield self._at(0, "leave", entering + (self.waiting if split else 0), 0, (earlier, last, split))
        if not split:
            yield self._at(0, "reduce", entering, 0, (earlier, last, split))

    def _weight_half(self, layers: Sequence[int], *, earlier: bool, last: bool) -> Iterator[Moment]:
        # Unit by unit, the root unit last: it is neither gathered before, nor has gradients.
        alone = self.states.sharded and not self._step_gather and self._strategy.gather == "unit"
        none = self._early_root if self.states.sharded and not (self._end_reduce and earlier) else 0
        root = self._c * self.states.wholes[0] if alone else 0
        head, whole = self.waiting - self._weights.all, Moment("", self._early(0) - none, 0, -root, 0, 0)
        for index in reversed(layers):
            if self._policy(index) != "none":
                continue
            unit = self._unit(index)
            yield self._at(unit, "enter", head + self._weights.to(index + 1), 0, (earlier, last, False)).plus(whole)
            waiting = head + self._weights.to(index)
            if index % self._step == 0:
                yield self._at(unit, "leave", waiting, 0, (earlier, last, False)).plus(whole)
                yield self._at(unit, "reduce", waiting, 0, (earlier, last, False)).plus(whole)
        for moment in ("leave", "reduce"):
            yield self._at(0, moment, head, 0, (earlier, last, False))

    def _early(self, unit: int) -> int:
        """Gradients that an input half has made down to a unit, and that the next weight half reduces: of units that
        recompute, whole."""
        if not self.fused or not self.states.sharded or self._end_reduce:
            return 0
        stop = self._unit(self.recomputed - 1) + 1
        return self._r * max(0, self.states.make.to(stop) - self.states.make.to(unit + 1))

    def optimizer(self) -> Moment:
        """The optimizer's step: reduced gradients are there, whole copies only where nothing is sharded."""
        if self._strategy.offload.optimizer != "device":
            return Moment("optimizer", 0, 0, 0, 0, 0)
        gradients = self._s * self.states.train.all
        sharded = self.states.sharded
        return Moment("optimizer", gradients, gradients if sharded else 0, 0 if sharded else self._copies(), 0, 0)

    def after(self, progress: Progress) -> Moment:
        """What this stage holds while another action runs, so far in the step."""
        if progress not in self._while:
            earlier = progress.backwards or (self.fused and progress.halves)
            self._while[progress] = self.idle(begun=progress.begun, ended=progress.ended, earlier=earlier)
        return self._while[progress]

    def idle(self, *, begun: bool, ended: bool, earlier: bool) -> Moment:
        """What this stage holds while another action runs: gathered parameters and gradients.

        Args:
            begun: its first forward has run; `ended`: its last backward has; `earlier`: any backward has.
        """
        gathered = self._gathered(None, forward=False, edge=False) if begun and not ended else 0
        if not self.states.sharded:
            gradients = self._s * self.states.train.all if self._buckets or earlier else 0
            return Moment("idle", gradients, 0, self._copies(), 0, 0)
        if not self._step_gather:
            gathered = 0
        reduced = self._shards() if earlier and (ended or not self._end_reduce or self._windows) else 0
        whole = self._r * self.states.make.all if self._end_reduce and earlier and not ended else 0
        return Moment("idle", whole + reduced, reduced, gathered, 0, 0)

    def _at(
        self, unit: int | None, moment: str, activations: int, logits: int, state: tuple[bool, bool, bool]
    ) -> Moment:
        earlier, last, waits = state
        gradients, reduced = self._gradients(unit, "wait" if waits else moment, earlier=earlier, last=last)
        done = moment == "reduce" and (last or not self._step_gather)
        gathered = self._gathered(unit, forward=False, edge=last and not waits, done=done)
        if not waits and (unit != 0 or moment == "leave"):
            activations += self._early_tied
        if moment == "enter" and not waits and unit is not None and self.states.sharded:
            # The first gradient is made, and not yet handed to its parameter.
            activations += self._c * self.states.largest[unit]
        return Moment("backward", gradients, reduced, gathered, activations, logits)

    def _unit(self, layer: int) -> int:
        return 1 + layer // self._step

    def _policy(self, layer: int) -> str:
        return self._strategy.recompute if layer < self.recomputed else "none"

    def _copies(self) -> int:
        """Compute copies of whole parameters, where the stored are wider or rest elsewhere."""
        needed = self._c < self._s or self._strategy.offload.parameters != "device"
        return self._c * self.states.whole.all if needed and not self._copies_rest else 0

    def _shards(self) -> int:
        """Reduced gradients that stay on the device; they leave it with the optimizer."""
        return self._s * self.states.train.all if self._strategy.offload.optimizer == "device" else 0

    def _gathered(self, unit: int | None, *, forward: bool, edge: bool, done: bool = False) -> int:
        """Gathered parameters while a unit works (None: the head, of the root unit; `done`: it has been released).

        `edge`: the first forward, or the last backward, of this stage in a step.
        """
        states, c = self.states, self._c
        if not states.sharded:
            return self._copies()
        if self._copies_rest:
            return 0
        stop = 0 if unit is None else unit if done else unit + 1
        if not self._step_gather and self._strategy.gather == "unit":
            if unit is None or unit == 0:
                return 0 if forward or done else c * states.wholes[0]
            ahead = self._strategy.prefetch
            window = states.wholes[unit : unit + ahead + 1] if forward else states.wholes[max(1, unit - ahead) : stop]
            return c * (states.wholes[0] + sum(window))
        if unit is None or not edge:
            return c * states.whole.all
        return c * states.whole.to(stop)

    def _gradients(self, unit: int | None, moment: str, *, earlier: bool, last: bool) -> tuple[int, int]:
        """Gradients in the backward of a unit (None: the head, of the root unit): all of them, the part reduced before.

        `moment`: "enter": the first one is made; "leave": those of the unit are whole; "reduce": they lie in the
        buffers of their reduce; "wait": none is made. Gradients of the head wait until the root unit is whole.
        """
        states, c, r, index = self.states, self._c, self._r, unit or 0
        made = c * states.made[index] if moment == "leave" else 0
        if not states.sharded and not self._buckets and not earlier:
            return self._unbucketed(unit, moment), 0
        if not states.sharded:
            sent = last and moment in ("leave", "reduce")
            return self._s * states.train.all + (self._wire * states.trained[index] if sent else 0), 0
        if moment == "wait":
            carried = self.idle(begun=True, ended=False, earlier=earlier)
            return carried.gradients, carried.reduced
        early = self._early_root if unit != 0 else 0
        on_device = self._strategy.offload.optimizer == "device"
        after = states.train.all - states.train.to(index + 1) if unit is not None and on_device else 0
        buffers = r * (states.reduced[index] + states.trained[index])
        if not self._end_reduce or (last and not earlier):
            reduced = self._shards() if earlier else self._s * after
            here = 0 if unit is None else buffers if moment == "reduce" else made
            return reduced + early + here, reduced
        if not earlier:
            before = r * (states.make.all - states.make.to(index + 1)) if unit is not None else 0
            here = 0 if unit is None else r * states.made[index] if moment == "reduce" else made
            return before + early + here, 0
        if moment == "leave" and c == r:
            made = 0  # added in place to what is there
        shards = self._shards() if self._windows else 0
        if not last or unit is None:
            return r * states.make.all + made + shards, shards
        shards = max(shards, self._s * after)
        if moment == "reduce":
            return r * states.make.to(unit) + buffers + shards, shards
        return r * states.make.to(unit + 1) + made + shards, shards

    def _unbucketed(self, unit: int | None, moment: str) -> int:
        """Gradients that stay as backward makes them, in the first one of a step."""
        if moment == "wait":
            return 0
        states, early = self.states, self._early_root * self._s // self._c
        if unit is None:
            return early
        here = states.largest[unit] if moment == "enter" else states.made[unit]
        after = states.train.all - states.train.to(unit + 1)
        return self._s * (after + here) + (early if unit else 0)


def _saved(block: BlockSpec, policy: str) -> int:
    return block.saved_bytes.get(policy, block.saved_bytes.get("none", 0))


def _alive(block: BlockSpec, policy: str) -> int:
    return block.alive_bytes.get(policy, max(_saved(block, "none"), _saved(block, policy)))
