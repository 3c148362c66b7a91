"""Another stack's memory: a model and its stages' moments under a `Convention`."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from meshwright.cost.moments import Moment, StageMoments
from meshwright.cost.stages import Stage
from meshwright.cost.states import States
from meshwright.spec import BlockSpec, Job, ModelSpec, Strategy
from meshwright.spec.conventions import Convention, StateBytes

__all__ = ["HeldMoments", "HeldStates", "adapted", "stage_moments", "with_outputs"]


def adapted(model: ModelSpec, convention: Convention) -> ModelSpec:
    """The model as a stack's loss and selective recompute hold it."""
    blocks = [_recomputed(block, convention.kept_products) for block in model.blocks]
    loss_bytes = model.loss_bytes
    if convention.logit_bytes is not None:
        for index, block in enumerate(blocks):
            if block.kind == "head":
                most = int(block.output_bytes // model.layout.compute_bytes * convention.logit_bytes)
                kept = min(block.output_bytes, most)
                loss_bytes = max(0, min(loss_bytes, most - kept))
                blocks[index] = replace(block, output_bytes=kept, backward_extra_bytes=most)
    return replace(model, blocks=tuple(blocks), loss_bytes=loss_bytes)


def _recomputed(block: BlockSpec, kept: float) -> BlockSpec:
    """A layer of whose products' outputs selective recompute keeps a share. Attention's output, as wide as the block's
    input, is always kept."""
    saved = block.saved_bytes
    if block.kind != "layer" or kept == 1 or "selective" not in saved:
        return block
    entrance = saved.get("full", 0)
    always = min(2 * entrance, saved["selective"])
    selective = always + int(kept * (saved["selective"] - always))
    return replace(block, saved_bytes=saved | {"selective": selective})


def with_outputs(stage: Stage) -> Stage:
    """The stage where what it sends stays until its backward. The last stage's logits are counted already."""
    *before, last = stage.blocks
    if last.kind == "head":
        return stage
    saved = {policy: size + last.output_bytes for policy, size in last.saved_bytes.items()}
    alive = {policy: size + last.output_bytes for policy, size in last.alive_bytes.items()}
    return structs.replace(stage, blocks=(*before, replace(last, saved_bytes=saved, alive_bytes=alive)))


def stage_moments(
    stage: Stage, job: Job, strategy: Strategy, convention: Convention | None, *, recomputed: int
) -> StageMoments:
    """The moments of a stage: this runtime's, or those of a stack with states of its own."""
    if convention is not None and convention.keeps_outputs and strategy.pp > 1:
        stage = with_outputs(stage)
    if convention is None or convention.states is None:
        return StageMoments(stage, job, strategy, recomputed=recomputed)
    return HeldMoments(stage, job, strategy, convention.states, recomputed=recomputed)


class HeldStates(States):
    """Model states of one stage in a stack that holds `StateBytes` per parameter."""

    def __init__(self, stage: Stage, job: Job, strategy: Strategy, held: StateBytes) -> None:
        super().__init__(stage, job, strategy)
        self._held = held

    @property
    def parameters(self) -> int:
        """Bytes of the weights that compute reads, at rest on the device."""
        if self._offload.parameters != "device":
            return 0
        return int(self._held.weights * (self.share.all if self._zero == 3 else self.whole.all))

    @property
    def optimizer(self) -> int:
        """Bytes of what the optimizer keeps, at rest on the device."""
        return int(self._held.optimizer * self.train.all) if self._offload.optimizer == "device" else 0


class HeldMoments(StageMoments):
    """The moments of one stage where weights and gradients are held as a `StateBytes` says."""

    def __init__(self, stage: Stage, job: Job, strategy: Strategy, held: StateBytes, *, recomputed: int) -> None:
        self._held = held
        super().__init__(stage, job, strategy, recomputed=recomputed)
        self.telling = list(range(len(self.layers)))  # shares of a byte are cut off: bytes do not rise quite evenly
        #: Whether every rank of the shard group keeps only its part of the gradients between microbatches.
        self._divided = strategy.zero >= 2

    def _states_of(self, stage: Stage, job: Job, strategy: Strategy) -> States:
        return HeldStates(stage, job, strategy, self._held)

    def optimizer(self) -> Moment:
        """The optimizer's step."""
        return Moment("optimizer", self._all, self._all if self._divided else 0, 0, 0, 0)

    def idle(self, *, begun: bool, ended: bool, earlier: bool) -> Moment:
        """What this stage holds while another action runs."""
        kept = self._all if earlier or self._held.life == "buffers" else 0
        return Moment("idle", kept, kept if self._divided else 0, 0, 0, 0)

    @property
    def _all(self) -> int:
        """Bytes of the gradients of this stage that a rank keeps for the optimizer."""
        if self._held.life == "used":
            return 0
        states = self.states
        return int(self._held.gradients * (states.train.all if self._divided else states.make.all))

    def _gathered(self, unit: int | None, *, forward: bool, edge: bool, done: bool = False) -> int:
        if self._strategy.zero < 3 or not self.states.sharded:
            return 0
        return super()._gathered(unit, forward=forward, edge=edge, done=done)

    def _gradients(self, unit: int | None, moment: str, *, earlier: bool, last: bool) -> tuple[int, int]:
        states, index, life = self.states, unit or 0, self._held.life
        each = 0.0 if moment == "wait" else self._held.gradients
        whole = 0 if unit is None else states.made[index]
        here = whole if moment in ("leave", "reduce") else states.largest[index]
        if self._divided:
            return self._all + int(each * whole), self._all
        if life == "used":
            return int(each * here), 0
        if life == "buffers" or earlier:
            return self._all, 0
        after = 0 if unit is None else states.make.all - states.make.to(index + 1)
        return int(each * (after + here)) + (0 if unit == 0 else self._early_root), 0
