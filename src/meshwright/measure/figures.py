"""Figures: what each block of a walk costs, every kept storage charged to one block."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.measure.recorder import Tally
from meshwright.measure.values import Storages, bytes_of, storages_of, tensor_bytes
from meshwright.measure.walk import POLICIES, Call, Walk
from meshwright.measure.work import Work

__all__ = ["Figures", "WalkFigures", "add_up"]

_COUNTS = (
    "forward_flops",
    "backward_flops",
    "causal_flops",
    "moved_bytes",
    "output_bytes",
    "gradient_bytes",
    "waiting_bytes",
    "element_bytes",
    "backward_element_bytes",
    "kernels",
    "backward_kernels",
)


@dataclass
class Figures:
    """What one block costs for a whole microbatch; `saved_bytes` and `alive_bytes` per recompute policy; `work` is its
    products and attention, one after the other."""

    forward_flops: int = 0
    backward_flops: int = 0
    causal_flops: int = 0
    moved_bytes: int = 0
    output_bytes: int = 0
    gradient_bytes: int = 0
    waiting_bytes: int = 0
    element_bytes: int = 0
    backward_element_bytes: int = 0
    kernels: int = 0
    backward_kernels: int = 0
    work: list[Work] = field(default_factory=list)
    saved_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POLICIES, 0))
    alive_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(POLICIES, 0))

    def count(self, tally: Tally) -> None:
        """Add what operations did; what they kept is charged apart."""
        self.forward_flops += tally.forward_flops
        self.backward_flops += tally.backward_flops
        self.causal_flops += tally.causal_flops
        self.moved_bytes += tally.moved_bytes
        self.waiting_bytes += bytes_of(tally.weight_inputs) + tally.weight_outputs_bytes
        self.element_bytes += tally.element_bytes
        self.backward_element_bytes += tally.backward_element_bytes
        self.kernels += tally.kernels
        self.backward_kernels += tally.backward_kernels
        self.work += tally.work

    def line(self, other: Figures, sequences: int, others: int) -> tuple[Figures, Figures]:
        """The straight line through these figures of `sequences` and the other's of `others` sequences.

        Returns:
            What each sequence adds, and what is there without any.
        """
        slope, start = Figures(), Figures()
        for name in _COUNTS:
            first, second = getattr(self, name), getattr(other, name)
            per_sequence = (second - first) // (others - sequences)
            setattr(slope, name, per_sequence)
            setattr(start, name, first - sequences * per_sequence)
        for name in ("saved_bytes", "alive_bytes"):
            for policy, first in getattr(self, name).items():
                per_sequence = (getattr(other, name)[policy] - first) // (others - sequences)
                getattr(slope, name)[policy] = per_sequence
                getattr(start, name)[policy] = first - sequences * per_sequence
        return slope, start


@dataclass
class WalkFigures:
    """The figures of a walk: before the blocks, each block by its number, after them; bytes that the loss keeps, and
    that it reads and writes, forward and backward."""

    embedding: Figures
    blocks: list[Figures]
    head: Figures
    loss_bytes: int = 0
    loss_element_bytes: int = 0
    backward_loss_element_bytes: int = 0


def add_up(walk: Walk) -> WalkFigures:
    """Charge all that a finished walk did and kept.

    What is done between two blocks counts for the second. A storage that several blocks keep is charged to the first,
    but to the embedding where it was made before all blocks (tables of positions, masks). What a block returns and
    nothing reads does not leave it.
    """
    first, *between, last = walk.segments
    done = WalkFigures(Figures(), [Figures() for _ in walk.blocks], Figures())
    done.embedding.count(first)
    for call, segment in zip(walk.calls, [Tally(), *between], strict=True):
        figures = done.blocks[call.block]
        figures.count(segment)
        figures.count(call.record.tally)
        made = call.record.made
        leaving = [form for place, form in made.items() if call.outputs[place] in walk.used] or list(made.values())
        figures.output_bytes += sum(form.nbytes for form in leaving)
        figures.gradient_bytes += sum(form.nbytes for form in leaving if form.requires_grad)
    done.head.count(last)
    done.head.output_bytes = tensor_bytes(tensor for tensor in walk.outputs if tensor.is_floating_point())
    done.head.gradient_bytes = tensor_bytes(tensor for tensor in walk.outputs if tensor.requires_grad)
    done.embedding.output_bytes = tensor_bytes(walk.entering)
    done.embedding.gradient_bytes = tensor_bytes(tensor for tensor in walk.entering if tensor.requires_grad)
    for policy in POLICIES:
        _charge(walk, policy, done)
    done.loss_element_bytes = walk.loss.element_bytes
    done.backward_loss_element_bytes = walk.loss.backward_element_bytes
    return done


def _charge(walk: Walk, policy: str, done: WalkFigures) -> None:
    charged: set[int] = set()

    def charge(storages: Storages) -> int:
        new = {key: held for key, held in storages.items() if key not in charged}
        charged.update(new)
        return bytes_of(new)

    def add(figures: Figures, amount: int, again: int = 0) -> None:
        figures.saved_bytes[policy] += amount
        figures.alive_bytes[policy] += amount + again

    first, *between, last = walk.segments
    add(done.embedding, charge({**first.kept, **_for_all(walk, policy)}))
    for call, segment in zip(walk.calls, [Tally(), *between], strict=True):
        kept = call.record.kept[policy]
        held = charge(segment.kept) + charge(_kept_storages(call, policy)) + kept.inner_bytes
        add(done.blocks[call.block], held, call.record.again_bytes[policy])
    add(done.head, charge(last.kept))
    if policy == "none":
        charged.update(storages_of(walk.outputs))
        done.loss_bytes = charge(walk.loss.kept)


def _kept_storages(call: Call, policy: str) -> Storages:
    kept = call.record.kept[policy]
    keys = [*(call.inputs[place] for place in kept.inputs), *(call.outputs[place] for place in kept.outputs)]
    return {key: call.storages[key] for key in keys}


def _for_all(walk: Walk, policy: str) -> Storages:
    """What was there before all blocks and is kept by several of them, or by one but is not what flows through them."""
    if not walk.calls:
        return {}
    early = {*(walk.segments[0].made or {}), *walk.calls[0].inputs}
    stream = storages_of(walk.entering)
    users: dict[int, int] = {}
    found: Storages = {}
    made: set[int] = set()
    for call in walk.calls:
        for key, storage in _kept_storages(call, policy).items():
            if key in early and key not in made:
                users[key] = users.get(key, 0) + 1
                found[key] = storage
        made.update(set(call.outputs) - set(call.inputs))
    at_once = walk.segments[0].made or {}
    return {key: held for key, held in found.items() if users[key] > 1 or (key in at_once and key not in stream)}
