"""Model states of one stage on one rank: elements of each ZeRO unit, and their bytes on every memory tier."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

from msgspec import Struct

from meshwright.cost.stages import Stage, shard_group
from meshwright.spec import DTYPE_BYTES, BlockSpec, Job, Strategy

__all__ = ["States", "Sums", "expert_group", "shard_group", "summed_elements"]


def expert_group(strategy: Strategy) -> int:
    """Ranks over which ZeRO cuts an expert's parameter: those of the shard group that hold the same experts."""
    return max(1, shard_group(strategy) * strategy.tp // strategy.ep) if strategy.zero else 1


def summed_elements(stages: Iterable[Stage], strategy: Strategy) -> int:
    """Elements of the gradients that the tensor-parallel ranks sum once a step, of a rank's stages."""
    return sum(block.summed(shard_group(strategy)) for stage in stages for block in stage.blocks)


class Sums:
    """Sums of the first entries of a list."""

    def __init__(self, entries: list[int]) -> None:
        self._sums = list(accumulate(entries, initial=0))
        self.all = self._sums[-1]

    def to(self, stop: int) -> int:
        """The sum of the entries before `stop`."""
        return self._sums[stop]


class _Sizes(Struct, frozen=True, gc=False):
    """Elements of one block, as `States` tells those of units."""

    share: int
    whole: int
    trained: int
    reduced: int
    made: int
    largest: int


class States:
    """Parameters, gradients' sizes and optimizer states of the units of one stage, on one rank.

    Unit 0 is the root unit: what is outside the layers. All figures but the byte totals are elements.

    Attributes:
        shares: elements that this rank stores of each unit, padding included.
        wholes: elements of each whole unit, padding included: what is gathered, what is reduced.
        made: elements of each unit whose gradients a backward makes: no padding, no frozen parameters.
        step: layers of a unit: one where there is nobody to share with, whatever the strategy says.
        trained: of `shares`, those with a gradient and optimizer states; `reduced` the same of `wholes`.
    """

    def __init__(self, stage: Stage, job: Job, strategy: Strategy) -> None:
        self.sharded = shard_group(strategy) > 1
        group, experts = (shard_group(strategy), expert_group(strategy)) if self.sharded else (1, 1)
        kinds = stage.alike or range(len(stage.blocks))
        root, layers, found = list[_Sizes](), list[_Sizes](), dict[int, _Sizes]()
        for kind, block in zip(kinds, stage.blocks, strict=True):
            if kind not in found:
                found[kind] = _sizes(block, group, experts, self.sharded)
            (layers if block.kind == "layer" else root).append(found[kind])
        self.step = strategy.unit_blocks if strategy.dp * strategy.cp > 1 else 1
        units = [root, *(layers[start : start + self.step] for start in range(0, len(layers), self.step))]
        self.shares = [sum(s.share for s in unit) for unit in units]
        self.wholes = [sum(s.whole for s in unit) for unit in units]
        self.trained = [sum(s.trained for s in unit) for unit in units]
        self.reduced = [sum(s.reduced for s in unit) for unit in units]
        self.made = [sum(s.made for s in unit) for unit in units]
        self.largest = [max((s.largest for s in unit), default=0) for unit in units]
        self.share, self.whole, self.make = Sums(self.shares), Sums(self.wholes), Sums(self.made)
        self.train = Sums(self.trained)
        #: Of `trained` the copy of a weight whose optimizer states another stage of this rank has.
        self._borrowed = min(-(-stage.borrowed_parameters // group), self.train.all)
        self._s, self._c = DTYPE_BYTES[job.param_dtype], DTYPE_BYTES[job.compute_dtype]
        self._states = self._s * job.optimizer.state_tensors
        self._offload, self._zero = strategy.offload, strategy.zero
        exact = sum(block.parameters for block in stage.blocks)
        #: Bytes of the states at rest that are padding: what equal shares take beyond P/d.
        self.padding = (self._s + self._states) * max(0, self.whole.all - exact) // group

    @property
    def parameters(self) -> int:
        """Bytes of parameters at rest on the device. With the optimizer elsewhere only compute copies stay."""
        if self._offload.parameters != "device":
            return 0
        if self._offload.optimizer == "device":
            return self._s * self.share.all
        return self._c * (self.share.all if self._zero == 3 else self.whole.all)

    @property
    def cut(self) -> bool:
        """Whether what is at rest on the device is this rank's share of the parameters, not all of them."""
        return self.sharded and (self._offload.optimizer == "device" or self._zero == 3)

    @property
    def optimizer(self) -> int:
        """Bytes of optimizer states at rest on the device."""
        owned = self.train.all - self._borrowed
        return self._states * owned if self._offload.optimizer == "device" else 0

    def elsewhere(self, tier: str) -> int:
        """Bytes of this rank on the tier `host` or `disk`: gradients and stored weights follow the optimizer."""
        held = 0
        if self._offload.optimizer == tier:
            held += (self._s + self._states) * self.train.all + self._s * self.train.all
        if self._offload.parameters == tier and self._offload.optimizer != tier:
            held += (self._c if self._offload.optimizer != "device" else self._s) * self.share.all
        elif self._offload.parameters == tier:
            # Stored weights lie there already, but for frozen ones.
            held += self._c * (self.share.all - (0 if self._c < self._s else self.train.all))
        return held


def _sizes(block: BlockSpec, group: int, experts: int, sharded: bool) -> _Sizes:
    def size(trained: bool, whole: bool) -> int:
        if not sharded:
            return block.trained_parameters if trained else block.parameters
        return block.share(group, expert_group=experts, trained=trained, whole=whole)

    return _Sizes(
        share=size(trained=False, whole=False),
        whole=size(trained=False, whole=True),
        trained=size(trained=True, whole=False),
        reduced=size(trained=True, whole=True),
        made=block.trained_parameters,
        largest=_largest(block),
    )


def _largest(block: BlockSpec) -> int:
    """Elements of the largest tensor that gets a gradient."""
    trained = Counter(block.tensors) - Counter(block.frozen) if block.frozen else block.tensors
    return max((math.prod(shape) for shape in trained), default=0)
