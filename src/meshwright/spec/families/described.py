"""A model described before a layout is fixed: functions that compose its blocks on a tape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from meshwright.errors import ConfigError, UnsupportedCombination
from meshwright.spec.families.attention import Heads
from meshwright.spec.families.block import block_of
from meshwright.spec.families.record import Value
from meshwright.spec.families.tape import Tape
from meshwright.spec.layout import Layout
from meshwright.spec.model import BlockSpec, ModelSpec

__all__ = ["DecoderModel", "Described"]

_LABEL_BYTES = 8


class Described(Protocol):
    """A model whose figures are known for any layout."""

    @property
    def name(self) -> str:
        """The model's name."""

    def at(self, layout: Layout) -> ModelSpec:
        """The model as one rank sees it.

        Raises:
            UnsupportedCombination: tp, cp or ep cannot divide it.
            ConfigError: the sequence is too long for it.
        """


@dataclass(frozen=True, kw_only=True)
class DecoderModel:
    """A decoder: an embedding, layers, a head. Satisfies `Described`.

    `layers` names the kind of each layer; layers of one kind cost the same. `embedding`, `layer` and `head` record the
    blocks on a tape and hand back what leaves them. `divided` names the widths that tp has to divide, besides heads, in
    stacks whose kernels want equal parts. `joins`: sequences that were cut are put together before the head.
    `whole_only` and `uncut` say why this runtime, whose stack is eager, cannot divide the model by tp, or cut its
    sequences; empty where it can.
    `longest` is the number of positions the model has, 0 where it is not limited. `predicts` is the vocabulary over
    which the loss is taken, 0 where the model has none. `experts` is the number of experts, 0 for a dense model.
    """

    name: str
    hidden: int
    heads: Heads
    layers: tuple[str, ...]
    embedding: Callable[[Tape], Value]
    layer: Callable[[Tape, Value, str], Value]
    head: Callable[[Tape, Value], Value]
    predicts: int
    divided: tuple[tuple[str, int], ...] = ()
    longest: int = 0
    experts: int = 0
    joins: bool = False
    whole_only: str = ""
    uncut: str = ""
    source: str = ""

    def at(self, layout: Layout) -> ModelSpec:
        """The model as one rank sees it under a layout.

        Raises:
            UnsupportedCombination: tp, cp or ep cannot divide it.
            ConfigError: the sequence is longer than the model's positions.
        """
        self._check(layout)
        first, last = Tape(layout), Tape(layout)
        embedding = block_of("embed_tokens", "embedding", first, self._entering(first))
        kinds = {kind: self._layer(layout, kind) for kind in dict.fromkeys(self.layers)}
        head = block_of("lm_head", "head", last, self._leaving(last))
        vocabulary = -(-self.predicts // layout.tp)
        label = _LABEL_BYTES if self.predicts else 0
        forward, backward = _loss_traffic(last, vocabulary, padded=self.predicts % layout.tp > 0)
        return ModelSpec(
            name=self.name,
            layout=layout,
            blocks=(
                embedding,
                *(kinds[kind].named(f"layers.{index}") for index, kind in enumerate(self.layers)),
                head,
            ),
            loss_bytes=layout.tokens * (_loss_kept(last, vocabulary) + label),
            loss_element_bytes=forward,
            backward_loss_element_bytes=backward,
            source=self.source,
        )

    def _entering(self, tape: Tape) -> Value:
        """The embedding. The runtime cuts sequences behind it; other stacks cut them inside."""
        if not (tape.sequence_parallel and tape.eager):
            return self.embedding(tape)
        tape.cut_sequences(False)
        return tape.split_sequence(self.embedding(tape))

    def _leaving(self, tape: Tape) -> Value:
        x = tape.input(self.hidden)
        if tape.sequence_parallel and tape.eager and (self.joins or not self.predicts):
            x = tape.join_sequence(x)
        return self.head(tape, x)

    def _layer(self, layout: Layout, kind: str) -> BlockSpec:
        tape = Tape(layout)
        entrance = tape.input(self.hidden)
        return block_of(kind, "layer", tape, self.layer(tape, entrance, kind), entrance)

    def _check(self, layout: Layout) -> None:
        if self.longest and layout.sequence > self.longest:
            raise ConfigError(
                f"sequences of {layout.sequence} tokens are longer than the {self.longest} positions of {self.name}",
                why="positions beyond it do not exist in the model",
                fix=f"set job.sequence to {self.longest} or less, or give the model more positions",
            )
        if layout.ep > 1 and not self.experts:
            raise UnsupportedCombination(
                f"ep={layout.ep}, but {self.name} has no experts",
                why="expert parallelism lays experts over ranks",
                fix="set ep=1",
            )
        self._check_stack(layout)
        tp = layout.tp
        if not self._divides(layout):
            degrees = range(1, self.heads.heads + 1)
            alone = replace(layout, sequence_parallel=False)
            legal = ", ".join(str(t) for t in degrees if self._divides(replace(alone, tp=t)))
            parts = self.divided if layout.stack != "eager" else ()
            widths = "".join(f", {name} {size}" for name, size in parts)
            raise UnsupportedCombination(
                f"tp={tp} does not divide {self.name}",
                why=f"every rank takes an equal part of {self.heads.heads} heads "
                f"({self.heads.groups} key/value heads, whole or replicated){widths}",
                fix=f"set tp to one of {legal}",
            )

    def _check_stack(self, layout: Layout) -> None:
        """Refuse what this runtime cannot do with the model; other stacks may."""
        if layout.stack != "eager" or layout.tp == 1:
            return
        if self.whole_only:
            raise UnsupportedCombination(
                f"tp={layout.tp} of {self.name}", why=self.whole_only, fix="set tp=1 and shard with zero=3"
            )
        if layout.sequence_parallel and self.uncut:
            raise UnsupportedCombination(
                f"sequence parallelism of {self.name}", why=self.uncut, fix="set sequence_parallel=false"
            )

    def _divides(self, layout: Layout) -> bool:
        equal = layout.stack == "eager" or all(size % layout.tp == 0 for _, size in self.divided)
        return equal and self.heads.divides(layout)


def _loss_kept(tape: Tape, vocabulary: int) -> int:
    """Bytes of each token that cross entropy keeps besides the logits.

    Over this rank's part of a vocabulary it keeps the logits themselves, in float32 or wider, and two numbers of each
    row; else the logarithms of the softmax.
    """
    narrow, wide = vocabulary * tape.compute_bytes, vocabulary * tape.wide_bytes
    if not tape.eager or tape.layout.tp == 1:
        return wide
    return (wide if wide > narrow else 0) + 2 * tape.wide_bytes


def _loss_traffic(tape: Tape, vocabulary: int, *, padded: bool) -> tuple[int, int]:
    """Bytes that cross entropy over this rank's part of the vocabulary reads and writes, forward and backward.

    Operations one by one: a cast to float32 where the logits are narrower, the logarithm of a softmax, and of it the
    labels' values; back, a gradient that is zero but for them, that of the softmax, and the cast. Over a part of the
    vocabulary: the maximum, the difference to it, its exponential and the sum of those; back, four steps in place to
    the gradient, and it is put beside the padding, where there is any. A fused kernel reads the logits twice, for their
    maximum and sum and for the labels; back, it reads them and writes their gradient.
    """
    narrow, wide = (tape.layout.tokens * vocabulary * size for size in (tape.compute_bytes, tape.wide_bytes))
    if not tape.eager:
        return 2 * narrow, 2 * narrow
    cast = narrow + wide if wide > narrow else 0
    if tape.layout.tp > 1:
        return cast + 6 * wide, 8 * wide + cast + (3 * narrow if padded else 0)
    return cast + 2 * wide, wide + 3 * wide + cast
