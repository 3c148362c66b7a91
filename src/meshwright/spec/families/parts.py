"""Parts that several families are composed of."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from meshwright.spec.families.record import Value
from meshwright.spec.families.tape import Tape

__all__ = ["Head", "gated_mlp", "mlp", "outputs"]


class Head(Struct, frozen=True, kw_only=True):
    """What stands on the last norm: a vocabulary's logits, `size` labels per token, or nothing.

    `bias` and `softcap` (capped logits) are those of the vocabulary's logits; `tied`: its matrix is the embedding's.
    """

    kind: Literal["vocabulary", "labels", "none"]
    size: int
    tied: bool = False
    bias: bool = False
    softcap: bool = False

    @property
    def predicts(self) -> int:
        """The vocabulary over which the loss is taken."""
        return self.size if self.kind == "vocabulary" else 0


def outputs(tape: Tape, x: Value, head: Head) -> Value:
    """The head on the normed stream. Logits of a vocabulary stay divided by tp (padded), and so does their loss."""
    if head.kind == "none":
        return x
    if head.kind == "labels":
        return tape.linear(x, head.size, bias=head.bias)
    local = -(-head.size // tape.layout.tp)
    logits = tape.linear(x, head.size, bias=head.bias, parallel="column", local=local, tied=head.tied)
    if tape.layout.tp > 1:  # a maximum, a sum and the label's logit per token (Megatron's vocabulary-parallel loss)
        tape.collective("all_reduce", "tp", logits.rows * tape.wide_bytes, forward=3, backward=0)
    return tape.softcap(logits) if head.softcap else logits


def gated_mlp(tape: Tape, x: Value, width: int, activation: str, *, bias: bool = False, fused: bool = False) -> Value:
    """down(act(gate(x)) * up(x)); `fused`: gate and up by one product."""
    share = tape.share(width, "intermediate_size")
    if fused:
        gate, up = tape.split(tape.linear(x, 2 * width, bias=bias, parallel="column"), share, share)
    else:
        gate, up = (tape.linear(x, width, bias=bias, parallel="column") for _ in range(2))
    return tape.linear(tape.gated(gate, up, activation), x.width, bias=bias, parallel="row")


def mlp(tape: Tape, x: Value, width: int, activation: str, *, bias: bool = True, transposed: bool = False) -> Value:
    """down(act(up(x))); `transposed`: the weights are stored as inputs x outputs."""
    tape.share(width, "intermediate_size")
    up = tape.linear(x, width, bias=bias, parallel="column", transposed=transposed)
    return tape.linear(tape.act(up, activation), x.width, bias=bias, parallel="row", transposed=transposed)
