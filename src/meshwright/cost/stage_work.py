"""What one stage computes and communicates for one microbatch, by term and phase."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from msgspec import Struct

from meshwright.cost.compute import BlockWork, Phases, Speeds, block_work
from meshwright.cost.links import Placement, collective_s
from meshwright.cost.stages import Stage
from meshwright.cost.states import shard_group
from meshwright.spec import DTYPE_BYTES, BlockCollective, BlockSpec, Job, ModelSpec, Strategy
from meshwright.spec.conventions import Convention

__all__ = ["StageWork", "Workshop"]

_NOTHING = Phases()
_OF_DIMENSION = {"tp": "tensor parallel", "cp": "context parallel", "ep": "expert parallel"}
#: Terms of one microbatch, in the order in which they are shown.
_LAYER_TERMS = ("matrix products", "attention", "memory-bound operations")


_FUSED_LOGIT_BYTES = 4
#: Where the host's core is the device, what recompute costs it: hooks around what is saved, and looking at every
#: operation twice to decide what selective recompute keeps. In starts of an operation, for each of the forward's
#: (measured with this runtime on a CPU).
_HOST_AGAIN = {"full": 2, "selective": 5}


class StageWork(Struct, dict=True):
    """Seconds of one microbatch on a stage: `terms` by name, and their sum once all are added."""

    terms: dict[str, Phases] = {}

    def add(self, term: str, phases: Phases, count: int = 1) -> None:
        """Add a part to a term."""
        self.terms[term] = self.terms.get(term, _NOTHING).plus(phases.times(count) if count != 1 else phases)

    @cached_property
    def all(self) -> Phases:
        """All terms together."""
        total = _NOTHING
        for phases in self.terms.values():
            total = total.plus(phases)
        return total


class Workshop:
    """The work of the blocks of a model under one placement, each distinct block worked out once."""

    def __init__(
        self, model: ModelSpec, job: Job, strategy: Strategy, placement: Placement, convention: Convention | None
    ) -> None:
        self._model, self._job, self._strategy = model, job, strategy
        self._groups = {name: placement.group(name) for name in ("tp", "cp", "ep")}
        self._exposed = 1 / strategy.tp if convention is not None and convention.tp_overlap else 1.0
        self._orders = model.layout.stack == "eager" and strategy.tp > 1 and strategy.microbatch > 1
        self._fused = convention is not None and convention.fused_accumulation
        self._factor = convention.element_factor if convention is not None else (1.0, 1.0)
        told = convention.reduce_bytes if convention is not None else None
        self._reduce_bytes = DTYPE_BYTES[job.reduce_dtype] if told is None else told
        logits = convention.logit_bytes if convention is not None and model.layout.stack == "fused" else None
        #: A fused loss is counted with logits and gradient in 16 bits: wider ones move more.
        self._loss_factor = max(1.0, (logits or 0) / _FUSED_LOGIT_BYTES)
        self._balanced = convention is None or convention.cp_balanced
        self._found: dict[tuple[int, str, int], StageWork] = {}
        self._same: dict[tuple[object, ...], int] = {}
        self._number: dict[int, tuple[BlockSpec, int]] = {}  # by identity; the block is kept so that it stays its own

    def stage(self, stage: Stage, recomputed: int, speed: Speeds) -> StageWork:
        """The work of a stage of which the first `recomputed` layers recompute."""
        counts: dict[tuple[int, str], tuple[BlockSpec, int]] = {}
        for policy, blocks in self._by_policy(stage.blocks, recomputed):
            for block in blocks:
                key = self._kind(block), policy
                counts[key] = block, counts.get(key, (block, 0))[1] + 1
        total = StageWork()
        for (_, policy), (block, count) in counts.items():
            for term, phases in self.block(block, policy, speed).terms.items():
                total.add(term, phases, count)
        if stage.loss_bytes or any(block.kind == "head" for block in stage.blocks):
            total.add("logits and loss", self.loss(speed))
        total.add("memory-bound operations", self.accumulated(stage, speed))
        return total

    def accumulated(self, stage: Stage, speed: Speeds) -> Phases:
        """Adding a microbatch's gradients to those before it: one is read, the sum is read and written. Where gradients
        are reduced every microbatch, the sum is this rank's share."""
        if self._fused or self._job.global_batch == self._strategy.dp * self._strategy.microbatch:
            return _NOTHING
        made, kept = DTYPE_BYTES[self._job.compute_dtype], self._reduce_bytes
        trained = sum(block.trained_parameters for block in stage.blocks)
        share = shard_group(self._strategy) if self._strategy.zero > 1 else 1
        return Phases(0.0, 0.0, (made + 2 * kept / share) * trained / speed.bytes_per_s)

    def loss(self, speed: Speeds) -> Phases:
        """The loss after the head: bound by memory."""
        scale = self._loss_factor * self._strategy.microbatch / speed.bytes_per_s
        model = self._model
        return Phases(model.loss_element_bytes * scale, model.backward_loss_element_bytes * scale)

    def block(self, block: BlockSpec, policy: str, speed: Speeds) -> StageWork:
        """The work of one block under a recompute policy."""
        key = (self._kind(block), policy, id(speed))
        if key not in self._found:
            self._found[key] = self._work(block, policy, speed)
        return self._found[key]

    def _work(self, block: BlockSpec, policy: str, speed: Speeds) -> StageWork:
        batch = self._strategy.microbatch
        work = block_work(block, batch, speed, imbalance=self._job.expert_imbalance, element_factors=self._factor)
        if not self._balanced and self._strategy.cp > 1:
            # The rank with the last part of the sequence sees all pairs but its own masked ones, not half of them.
            work = work._replace(attention=work.attention.times(2 - 1 / self._strategy.cp))
        found = StageWork()
        if block.kind == "head":
            found.add("logits and loss", work.all)
        elif block.kind == "embedding":
            found.add("memory-bound operations", work.all)
        else:
            for term, phases in zip(_LAYER_TERMS, work, strict=True):
                found.add(term, phases)
        for term, phases in self._communication(block, work, speed).items():
            found.add(term, phases)
        again = self._again(block, work, speed, policy)
        if not speed.asynchronous:
            again += _HOST_AGAIN.get(policy, 0) * block.kernels * speed.reached.kernel_s
        if again:
            # A block that recomputes runs both halves of its backward at once.
            found.terms = {term: Phases(p.forward, p.backward, 0.0) for term, p in found.terms.items()}
            found.add("recompute", Phases(0.0, again, 0.0))
        return found

    def _again(self, block: BlockSpec, work: BlockWork, speed: Speeds, policy: str) -> float:
        """Seconds of what a backward computes and sends again."""
        computed = {"full": work.all.forward, "selective": work.memory.forward}.get(policy, 0.0)
        repeated = ((entry, entry.again(policy)) for entry in block.collectives)
        return computed + sum(self._sent(entry, work, speed, times, 0).forward for entry, times in repeated if times)

    def _communication(self, block: BlockSpec, work: BlockWork, speed: Speeds) -> dict[str, Phases]:
        """Exposed communication of a block."""
        found: dict[str, Phases] = {}
        for entry in block.collectives:
            term = _OF_DIMENSION[entry.dimension]
            sent = self._sent(entry, work, speed, entry.forward, entry.backward)
            found[term] = found.get(term, _NOTHING).plus(sent)
        return found

    def _sent(self, entry: BlockCollective, work: BlockWork, speed: Speeds, forward: int, backward: int) -> Phases:
        """A collective, so many times. A ring of cp hides behind the attention that it feeds.

        Of several sequences that are cut, each rank's parts lie side by side: one operation puts them in order.
        """
        group = self._groups[entry.dimension]
        size = self._strategy.microbatch * entry.message_bytes
        if entry.kind == "all_to_all" and self._job.expert_imbalance > 1:
            size = int(size * self._job.expert_imbalance)
        one = collective_s(entry.kind, size, group)
        if self._orders and entry.kind in ("all_gather", "reduce_scatter"):
            one += 2 * size / speed.bytes_per_s + speed.reached.kernel_s
        phases = Phases(one * forward, one * backward, 0.0)
        if entry.dimension == "cp" and entry.kind == "send" and group.size > 1:
            hides = (group.size - 1) / group.size
            return Phases(
                max(one, phases.forward - work.attention.forward * hides),
                max(one, phases.input - work.attention.backward * hides),
            )
        return phases.times(self._exposed) if entry.dimension == "tp" else phases

    def _by_policy(self, blocks: Sequence[BlockSpec], recomputed: int) -> list[tuple[str, list[BlockSpec]]]:
        layers = [block for block in blocks if block.kind == "layer"]
        others = [block for block in blocks if block.kind != "layer"]
        return [
            ("none", others + layers[recomputed:]),
            (self._strategy.recompute, layers[:recomputed]),
        ]

    def _kind(self, block: BlockSpec) -> int:
        """A number that equal blocks share, whatever their names."""
        if id(block) not in self._number:
            key = (
                block.kind,
                block.parameters,
                block.forward_flops,
                block.moved_bytes,
                block.element_bytes,
                block.products,
                block.attention,
                block.collectives,
            )
            self._number[id(block)] = block, self._same.setdefault(key, len(self._same))
        return self._number[id(block)][1]
