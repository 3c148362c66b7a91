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
    """The head on the normed stream. Logits of a vocabulary stay divided by tp (padded), and so does their loss: of
    each token it needs the largest logit, a sum and the label's (Shoeybi et al., arXiv 1909.08053, section 3)."""
    if head.kind == "none":
        return x
    if head.kind == "labels":
        return tape.linear(x, head.size, bias=head.bias)
    local = -(-head.size // tape.layout.tp)
    logits = tape.linear(x, head.size, bias=head.bias, parallel="column", local=local, tied=head.tied)
    if tape.layout.tp > 1:
        number = logits.rows * tape.wide_bytes
        # The runtime sends the last two together.
        messages = {number: 1, 2 * number: 1} if tape.eager else {number: 3}
        for size, times in messages.items():
            tape.collective("all_reduce", "tp", size, forward=times, backward=0)
    return tape.softcap(logits) if head.softcap else logits


def gated_mlp(
    tape: Tape, x: Value, width: int, activation: str, *, bias: bool = False, fused: bool = False, whole: bool = False
) -> Value:
    """down(act(gate(x)) * up(x)); `fused`: gate and up by one product; `whole`: not divided by tp."""
    if whole:
        gate, up = (tape.linear(x, width, bias=bias) for _ in range(2))
        return tape.linear(tape.gated(gate, up, activation), x.width, bias=bias)
    tape.another_module()
    share = tape.share(width, "intermediate_size")
    if fused:
        both = tape.linear(x, 2 * width, bias=bias, parallel="column", local=2 * share)
        gate, up = tape.split(both, share, share)
    else:
        gate, up = (tape.linear(x, width, bias=bias, parallel="column") for _ in range(2))
    return tape.linear(tape.gated(gate, up, activation), x.width, bias=bias, parallel="row")


def mlp(tape: Tape, x: Value, width: int, activation: str, *, bias: bool = True, transposed: bool = False) -> Value:
    """down(act(up(x))); `transposed`: the weights are stored as inputs x outputs."""
    tape.another_module()
    tape.share(width, "intermediate_size")
    up = tape.linear(x, width, bias=bias, parallel="column", transposed=transposed)
    return tape.linear(tape.act(up, activation), x.width, bias=bias, parallel="row", transposed=transposed)
