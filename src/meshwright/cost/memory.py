"""What a step of a strategy holds in memory, moment by moment, from the design's ZeRO table.

A step is looked at where blocks begin and end: after each unit's forward; after the loss; when the first gradient of a
block is made (the block's kept activations are still there), when its last one is (its unit's gradients are whole), and
in its reduce; and at the optimizer. What an operation needs while it runs comes on top and is not counted. All figures
are bytes of one rank, padding included.

Letters as in the design: P parameters, d ranks of a shard group, s, c and r bytes of the stored, compute and reduce
dtype, o bytes of optimizer states per parameter, m microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from meshwright.spec import DTYPE_BYTES, BlockSpec, Job, ModelSpec, Strategy

__all__ = ["CATEGORIES", "Moment", "StepMemory", "framework_bytes", "recomputed_blocks"]

CATEGORIES = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits")

_MIB = 2**20
#: Bytes that a rank takes besides tensors, by device kind. CPU: resident memory of a rank after importing torch and
#: the runtime, joining a gloo group of 2 and one backward (280 MiB with PyTorch 2.13), rounded up. Other kinds: an
#: allowance for the driver's context, libraries and communicators; not measured.
_FRAMEWORK_BYTES = {"cpu": 300 * _MIB}
_ACCELERATOR_BYTES = 1024 * _MIB


def framework_bytes(device_kind: str) -> int:
    """Bytes of a device's memory that a rank needs besides tensors."""
    return _FRAMEWORK_BYTES.get(device_kind, _ACCELERATOR_BYTES)


def recomputed_blocks(model: ModelSpec, strategy: Strategy) -> int:
    """How many of the first layers recompute."""
    layers = len(model.layers)
    return 0 if strategy.recompute == "none" else min(strategy.recompute_blocks or layers, layers)


class Moment(NamedTuple):
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


class _Sums:
    """Sums of the first entries of a list."""

    def __init__(self, entries: list[int]) -> None:
        self._sums = list(accumulate(entries, initial=0))
        self.all = self._sums[-1]

    def to(self, stop: int) -> int:
        """The sum of the entries before `stop`."""
        return self._sums[stop]


class StepMemory:
    """The memory of one rank under a strategy: at rest, and at every moment of a step.

    Raises:
        ConfigError: the global batch does not divide into microbatches.
    """

    def __init__(self, model: ModelSpec, job: Job, strategy: Strategy) -> None:
        self._s, self._c = DTYPE_BYTES[job.param_dtype], DTYPE_BYTES[job.compute_dtype]
        self._r = DTYPE_BYTES[job.reduce_dtype]
        self._model, self._strategy = model, strategy
        self._microbatches = strategy.microbatches(job.global_batch)
        self.sharded = strategy.zero > 0 and strategy.shard > 1
        group = strategy.shard if self.sharded else 1
        units = model.unit_groups(strategy.unit_blocks)
        #: Elements that this rank stores of each unit, the root unit first; and of the whole padded unit.
        self.shares = [
            sum(block.share(group) if self.sharded else block.parameters for block in unit) for unit in units
        ]
        self.wholes = [group * share for share in self.shares]
        self._exact = [
            sum(block.parameters for block in unit) for unit in units
        ]  # gradients made by backward: no padding
        self._share, self._whole, self._made = _Sums(self.shares), _Sums(self.wholes), _Sums(self._exact)
        self.parameters = self._s * self._share.all
        self.optimizer = self._s * job.optimizer.state_tensors * self._share.all
        head = [block for block in model.blocks if block.kind == "head"]
        # Gradients of the root unit that the head makes first; they wait whole until the embedding's follow.
        self._early_root = self._c * sum(block.parameters + block.tied_parameters for block in head)
        self._largest = [max((math.prod(t) for block in unit for t in block.tensors), default=0) for unit in units]
        self._recomputed = recomputed_blocks(model, strategy)
        spare = self._whole.all - model.parameters
        #: Bytes of the states at rest that are padding: what equal shares take beyond P/d.
        self.padding = self._s * (1 + job.optimizer.state_tensors) * spare // group

    def peak(self) -> Moment:
        """The moment with the most bytes; the first one of equals."""
        return max(self.moments(), key=lambda moment: moment.total)

    @property
    def floor_bytes(self) -> int:
        """What is there at the moment of the loss whatever the microbatch and the recompute policy."""
        return self.parameters + self.optimizer + self._gathered(None, forward=True, last=True)

    def moments(self) -> Iterator[Moment]:
        """Every moment of the last microbatch, and before it of one that others follow, then the optimizer."""
        if self._microbatches > 1:
            yield from self._microbatch(last=False)
        yield from self._microbatch(last=True)
        gradients = self._s * self._share.all
        gathered = 0 if self.sharded else self._copies()
        yield Moment("optimizer", gradients, gradients if self.sharded else 0, gathered, 0, 0)

    def _microbatch(self, *, last: bool) -> Iterator[Moment]:
        model, batch = self._model, self._strategy.microbatch
        layers = model.layers
        head = [block for block in model.blocks if block.kind == "head"]
        entrance = [block for block in model.blocks if block.kind == "embedding"]
        kept = batch * sum(_saved(block, "none") for block in entrance) + sum(
            block.fixed_bytes for block in model.blocks
        )
        carried = self._carried()
        before: list[int] = []
        for index, block in enumerate(layers):
            before.append(kept)
            kept += batch * _saved(block, self._policy(index))
            if (index + 1) % self._strategy.unit_blocks == 0 or index + 1 == len(layers):
                gathered = self._gathered(self._unit(index), forward=True, last=last)
                yield Moment("forward", *carried, gathered, kept + batch * block.output_bytes, 0)
        kept += batch * sum(_saved(block, "none") for block in head)
        logits = batch * (sum(block.output_bytes for block in head) + model.loss_bytes)
        yield Moment("loss", *carried, self._gathered(None, forward=True, last=last), kept, logits)
        entering = batch * sum(block.backward_extra_bytes for block in head)
        yield self._backward(None, "enter", kept, entering, last)
        for index in range(len(layers) - 1, -1, -1):
            block, unit = layers[index], self._unit(index)
            entering = before[index] + batch * block.backward_extra_bytes
            yield self._backward(unit, "enter", entering + batch * _alive(block, self._policy(index)), 0, last)
            if index % self._strategy.unit_blocks == 0:
                yield self._backward(unit, "leave", entering, 0, last)
                yield self._backward(unit, "reduce", entering, 0, last)
        entering = before[0] + batch * sum(block.backward_extra_bytes for block in entrance)
        yield self._backward(0, "leave", entering, 0, last)
        yield self._backward(0, "reduce", entering, 0, last)

    def _backward(self, unit: int | None, moment: str, activations: int, logits: int, last: bool) -> Moment:
        gradients, reduced = self._gradients(unit, moment, last=last)
        done = moment == "reduce" and (last or self._strategy.zero == 3)
        gathered = self._gathered(unit, forward=False, last=last, done=done)
        return Moment("backward", gradients, reduced, gathered, activations, logits)

    def _unit(self, layer: int) -> int:
        return 1 + layer // self._strategy.unit_blocks

    def _policy(self, layer: int) -> str:
        return self._strategy.recompute if layer < self._recomputed else "none"

    def _copies(self) -> int:
        """Compute copies of whole parameters where they are narrower than the stored."""
        return self._c * self._whole.all if self._c < self._s else 0

    def _gathered(self, unit: int | None, *, forward: bool, last: bool, done: bool = False) -> int:
        """Gathered parameters while a unit works (None: the head, of the root unit; `done`: it has been released)."""
        if not self.sharded:
            return self._copies()
        c = self._c
        stop = 0 if unit is None else unit if done else unit + 1
        if self._strategy.zero == 3:
            if unit is None or unit == 0:
                return 0 if forward or done else c * self.wholes[0]
            ahead = self._strategy.prefetch
            window = self.wholes[unit : unit + ahead + 1] if forward else self.wholes[max(1, unit - ahead) : stop]
            return c * (self.wholes[0] + sum(window))
        if unit is None or not last or (forward and self._microbatches > 1):
            return c * self._whole.all
        return c * self._whole.to(stop)

    def _carried(self) -> tuple[int, int]:
        """Gradients of earlier microbatches, as they stand while no backward runs: all of them, the part reduced."""
        if not self.sharded:
            return self._s * self._share.all, 0
        if self._microbatches == 1:
            return 0, 0
        if self._strategy.zero == 1:
            return self._r * self._made.all, 0
        reduced = self._s * self._share.all
        return reduced, reduced

    def _gradients(self, unit: int | None, moment: str, *, last: bool) -> tuple[int, int]:
        """Gradients in the backward of a unit (None: the head, of the root unit): all of them, the part reduced before.

        `moment`: "enter": the first one is made; "leave": those of the unit are whole; "reduce": they lie in the
        buffers of their reduce. Gradients that the head makes wait until the root unit is whole, at the end.
        """
        c, r, accumulates, index = self._c, self._r, self._microbatches > 1, unit or 0
        made = c * self._largest[index] if moment == "enter" else 0  # one tensor's gradient, before it is added
        if not self.sharded:
            return self._s * self._share.all + made, 0
        after = 0 if unit is None else self._share.all - self._share.to(unit + 1)
        buffers = r * (self.wholes[index] + self.shares[index])
        if self._strategy.zero == 1 and accumulates:
            if c < r and moment == "leave":
                made = c * self._exact[index]
            if not last or unit is None:
                return r * self._made.all + made, 0
            reduced = self._s * after
            if moment == "reduce":
                return r * self._made.to(unit) + buffers + reduced, reduced
            return r * self._made.to(unit + 1) + made + reduced, reduced
        reduced = self._s * (self._share.all if accumulates else after)
        if unit is None:
            return reduced + self._early_root, reduced
        waiting = self._early_root if unit else 0
        if moment == "reduce":
            return reduced + waiting + buffers, reduced
        if moment == "leave":
            made = c * self._exact[index]
        return reduced + waiting + made, reduced


def _saved(block: BlockSpec, policy: str) -> int:
    return block.saved_bytes.get(policy, block.saved_bytes.get("none", 0))


def _alive(block: BlockSpec, policy: str) -> int:
    return block.alive_bytes.get(policy, max(_saved(block, "none"), _saved(block, policy)))
