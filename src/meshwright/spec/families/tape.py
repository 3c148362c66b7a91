"""Tape: what a model family composes its blocks of. No torch.

A method stands for a part of a decoder and records the operations that execute it on one rank. Under `stack="eager"`
they are PyTorch's own, one by one, as Hugging Face's classes call them; under `compiled` and `fused` each part is one
kernel that keeps its inputs and what of a row its backward needs (the counts of Korthikanti et al., arXiv 2205.05198).

Tensor parallelism (Shoeybi et al., arXiv 1909.08053): a `column` product divides its outputs, a `row` product its
inputs. The residual stream between them is whole on every rank, or cut along the sequence under sequence parallelism;
entering and leaving it is recorded as collectives. Under `stack="eager"` they are those that the runtime executes, with
the copies that they need.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from meshwright.errors import ConfigError
from meshwright.spec.families.record import Backward, Operation, Parameter, Record, Value
from meshwright.spec.model import BlockCollective, Product

__all__ = ["ACTIVATIONS", "Tape"]

_ID_BYTES = 8  # token ids, labels and positions are int64
_STATISTIC_BYTES = 4
_BLOOM_PASSES = 44  # over x in the backward of Bloom's GELU, which computes its formula anew

#: Activation functions by Hugging Face's names, and how PyTorch executes each.
ACTIVATIONS = {
    "silu": "input",
    "swish": "input",
    "gelu": "input",
    "bloom_gelu": "bloom_gelu",
    "gelu_pytorch_tanh": "input",
    "gelu_new": "gelu_new",
    "relu": "output",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}


@dataclass
class Tape(Record):
    """The operations of one block under a layout."""

    _entered: dict[Value, Value] = field(default_factory=dict)

    def input(self, width: int) -> Value:
        """The residual stream that enters the block: rows x `width`."""
        return self.new(self.rows, width)

    # --- tokens -------------------------------------------------------------------------------------------------------

    def embed(self, vocabulary: int, width: int) -> Value:
        """Rows of a vocabulary x width matrix, looked up by token ids, which are kept.

        Under tensor parallelism the vocabulary is padded to a multiple of tp and cut; partial rows are summed.
        """
        tokens = self.layout.tokens
        table = self.parameter(-(-vocabulary // self.layout.tp), width, slices=0)
        ids = self.new(tokens, 1, _ID_BYTES, grad=False)
        out = self.new(tokens, width)
        if self.layout.tp == 1 or not self.eager:
            self._look_up(ids, out, Backward(ids.bytes + out.bytes + table.bytes))
            return self.leave(out)
        own, here = (self.new(tokens, 1, size, grad=False) for size in (_ID_BYTES, 1))
        self.apply("own rows", [ids], [own, here], saves=[ids], kernels=4)
        self._look_up(own, out, Backward(own.bytes + out.bytes + table.bytes))
        masked = self.apply("mask", [out, here], [self.new(tokens, width)], saves=[here])
        return self.leave(masked)

    def embed_positions(self, positions: int, width: int, *, each_sequence: bool = False) -> Value:
        """Learned positions of this rank's tokens; `each_sequence`: looked up anew for each of a microbatch."""
        table = self.parameter(positions, width)
        ids = self.new(self.rows, 1, _ID_BYTES, grad=False) if each_sequence else self.fixed(self.rows, 1, _ID_BYTES)
        out = self.new(self.rows, width)
        added = 0 if each_sequence else 2 * out.bytes  # the gradients of all sequences are summed first
        return self._look_up(ids, out, Backward(ids.bytes + out.bytes + table.bytes + added, 2 if added else 1))

    def _look_up(self, ids: Value, out: Value, backward: Backward) -> Value:
        """Rows of a matrix: a lookup reads the rows it writes, its backward writes a gradient of the whole matrix."""
        return self.apply("embedding", [ids, out], [out], saves=[ids], backward=backward)

    def rotary_tables(self, channels: int) -> None:
        """Cosines and sines of the positions, made in float32 and kept once per microbatch for all layers."""
        tokens, c = self.layout.tokens, self.compute_bytes
        self.buffer_bytes += channels // 2 * 4
        positions, frequencies = self.foreign(tokens, 1, 4), self.foreign(1, channels // 2, 4)
        half, whole = self.foreign(tokens, channels // 2, 4), self.foreign(tokens, channels, 4)
        self.apply("arange", [], [positions])
        self.apply("multiply", [positions, frequencies], [half])
        self.cat([half, half], whole)
        for name in ("cos", "sin"):
            self.apply(name, [whole], [whole])
            if c != 4:
                self.apply("cast", [whole], [self.foreign(tokens, channels)])
            self.fixed(tokens, channels)

    # --- products -----------------------------------------------------------------------------------------------------

    def linear(
        self,
        x: Value,
        outputs: int,
        *,
        bias: bool = False,
        parallel: Literal["column", "row"] | None = None,
        local: int = 0,
        slices: int = 0,
        tied: bool = False,
        transposed: bool = False,
        what: str = "a matrix's outputs",
    ) -> Value:
        """x times a matrix of `outputs` rows. Kept: x.

        `column` divides the outputs by tp (`local` is this rank's number where it is not an equal share, `slices` as in
        `Parameter`), `row` takes an x that is divided already and sums the partial results; without `parallel` every
        rank holds all of it. `transposed`: the weight is stored as inputs x outputs.

        Raises:
            UnsupportedCombination: tp does not divide `outputs`, named `what`.
        """
        source = x
        if parallel == "column":
            outputs = local or self.share(outputs, what)
            x = self.enter(x)
        if not self.sequence_parallel or self.layout.stack != "fused" or parallel != "column":
            source = x  # fused kernels gather the sequence again in backward instead of keeping it whole
        shape = (x.width, outputs) if transposed else (outputs, x.width)
        held = slices if parallel == "column" else 0 if parallel else None
        weight = self.borrowed(*shape) if tied else self.parameter(*shape, slices=held)
        reads: list[Value | Parameter] = [x, weight]
        if bias:
            reads.append(self.parameter(outputs, slices=held if parallel == "column" else None))
        # Selective recompute keeps what the product makes: another stack's kernels scatter it at once.
        scattered = parallel == "row" and self.sequence_parallel and not self.eager
        out = self.new(x.rows, outputs)
        summed = out.bytes + reads[-1].bytes if bias and self.layout.stack != "fused" else 0  # the bias's gradient
        added = 3 * weight.bytes if tied else 0  # to the gradient of the same matrix as embedding
        self.apply(
            "linear",
            reads,
            [out],
            saves=[source],
            product=not scattered,
            work=Product(x.rows, x.width, outputs),
            backward=Backward(summed + added, 2 + (summed > 0) + (added > 0)),
        )
        return self.leave(out) if parallel == "row" else out

    def matmul(self, x: Value, y: Value, out: Value, work: Product, *, skipped: int = 0) -> Value:
        """A product of two activations; both are kept. `skipped`: flops of masked pairs."""
        return self.apply("matmul", [x, y], [out], saves=[x, y], product=True, work=work, skipped=skipped)

    def split(self, x: Value, *widths: int) -> tuple[Value, ...]:
        """Parts of x along its channels, as views of the same memory."""
        return tuple(x.view(x.rows, width) for width in widths)

    def enter(self, x: Value) -> Value:
        """The stream as a column product needs it: all tokens. Once per value, however many products take it."""
        if self.layout.tp == 1:
            return x
        if x in self._entered:
            return self._entered[x]
        whole = x
        if self.sequence_parallel:
            again = 1 if self.layout.stack == "fused" else 0
            self.collective("all_gather", "tp", x.bytes * self.layout.tp, forward=1, backward=again)
            self.collective("reduce_scatter", "tp", x.bytes * self.layout.tp, forward=0, backward=1)
            whole = self._gathered(x)
        else:
            self.collective("all_reduce", "tp", x.bytes, forward=0, backward=1)
            if self.eager:  # the gradient is summed in a copy
                copied = Backward(2 * x.bytes)
                self.operations.append(Operation("enter", 0, reads=(x,), kernels=0, backward=copied))
        self._entered[x] = self._entered[whole] = whole
        return whole

    def another_module(self) -> None:
        """What follows is computed by another module: the runtime enters its inputs anew."""
        if self.eager:
            self._entered.clear()

    def _gathered(self, x: Value) -> Value:
        """All tokens of parts of them. (Several sequences are put in order after it: the price of a gather.)"""
        return self.apply("all_gather", [x], [self.new(x.rows * self.layout.tp, x.width)], kernels=0)

    def leave(self, out: Value) -> Value:
        """The sum of partial results over tp, back in the residual stream."""
        if self.layout.tp == 1:
            return out
        if not self.sequence_parallel:
            self.collective("all_reduce", "tp", out.bytes, forward=1, backward=0)
            return self.contiguous(out) if self.eager else out  # summed in a copy
        self.collective("reduce_scatter", "tp", out.bytes, forward=1, backward=0)
        self.collective("all_gather", "tp", out.bytes, forward=0, backward=1)
        part = self.new(out.rows // self.layout.tp, out.width)
        return self.apply("reduce_scatter", [out], [part], product=not self.eager, kernels=0)

    def split_sequence(self, x: Value) -> Value:
        """This rank's part of a stream that every rank has; its gradient is gathered."""
        self.cut_sequences(True)
        self.collective("all_gather", "tp", x.bytes, forward=0, backward=1)
        part = self.new(self.rows, x.width)
        return self.apply("split", [part], [part], backward=Backward(0, 0))

    def join_sequence(self, x: Value) -> Value:
        """The whole stream of every rank's part, for what all of them compute alike: backward takes its part."""
        self.cut_sequences(False)
        self.collective("all_gather", "tp", x.bytes * self.layout.tp, forward=1, backward=0)
        return self._gathered(x)

    def collective(
        self,
        kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"],
        dimension: Literal["tp", "cp", "ep"],
        message_bytes: int,
        *,
        forward: int,
        backward: int,
    ) -> None:
        """Note a collective of the block, `forward` and `backward` times per microbatch."""
        noted = BlockCollective(
            kind=kind, dimension=dimension, message_bytes=message_bytes, forward=forward, backward=backward
        )
        self.collectives.append((len(self.operations), noted))

    # --- norms and elementwise functions ------------------------------------------------------------------------------

    def rms_norm(self, x: Value, *, offset: bool = False, of_heads: bool = False) -> Value:
        """RMSNorm over the width (Zhang and Sennrich 2019), computed in float32 or wider.

        `offset`: Gemma's, whose weight is 1 + w and multiplies before the result is cast back. `of_heads`: of each of
        this rank's heads.
        """
        weight = self.parameter(x.width, slices=self._slices(of_heads=of_heads))
        c = x.itemsize
        if not self.eager:
            root = self.new(x.rows, 1, _STATISTIC_BYTES, grad=False)
            return self.apply("rms_norm", [x, weight], [self.new(x.rows, x.width, c), root], saves=[x, root])
        wide = self.cast(x, max(c, self.wide_bytes))
        square = self.power("pow", wide)
        mean = self.apply("mean", [square], [self.new(x.rows, 1, wide.itemsize)])
        root = self.power("rsqrt", self.scale(mean, "add"), saves="output")
        normed = self.multiply(wide, root)
        if offset:
            return self.cast(self.multiply(normed, weight), c)
        return self.multiply(self.cast(normed, c), weight)

    def layer_norm(self, x: Value, *, affine: bool = True, bias: bool = True, of_heads: bool = False) -> Value:
        """LayerNorm over the width, or (`of_heads`) of each of this rank's heads. Kept: x, and mean and reciprocal
        deviation of each row."""
        slices = self._slices(of_heads=of_heads)
        weights = [self.parameter(x.width, slices=slices) for kept in (affine, affine and bias) if kept]
        mean, deviation = (self.new(x.rows, 1, _STATISTIC_BYTES, grad=False) for _ in range(2))
        out = self.new(x.rows, x.width, x.itemsize)
        return self.apply("layer_norm", [x, *weights], [out, mean, deviation], saves=[x, mean, deviation])

    def _slices(self, *, of_heads: bool) -> int | None:
        """Of a norm's weight: where each rank has heads of its own, its gradient is a share."""
        return int(self.layout.tp > 1) if of_heads else None

    def act(self, x: Value, name: str) -> Value:
        """An activation function.

        Raises:
            ConfigError: it is not one of ACTIVATIONS.
        """
        if name not in ACTIVATIONS:
            raise ConfigError(
                f"activation function {name!r} is not known",
                why=f"known are {', '.join(ACTIVATIONS)}",
                fix="trace the model instead of reading its config.json",
            )
        how = ACTIVATIONS[name]
        if how in ("input", "output") or not self.eager:
            return self.unary(name, x, saves="output" if how == "output" else "input")
        if how == "bloom_gelu":  # nine operations, of which three take two tensors; the class keeps x alone
            out = self.new(x.rows, x.width, x.itemsize)
            return self.apply(
                name, [x] * 20, [out], saves=[x], kernels=9, backward=Backward(_BLOOM_PASSES * x.bytes, 18)
            )
        if how == "relu2":
            return self.power("square", self.unary("relu", x, saves="output"))
        if how == "quick_gelu":
            return self.multiply(x, self.unary("sigmoid", self.scale(x), saves="output"))
        cubed = self.scale(self.power("pow", x))
        tangent = self.unary("tanh", self.scale(self.add(x, cubed)), saves="output")
        return self.multiply(self.scale(x), self.scale(tangent, "add"))

    def gated(self, gate: Value, up: Value, name: str) -> Value:
        """act(gate) * up, such as SwiGLU (Shazeer 2020)."""
        if self.eager:
            return self.multiply(self.act(gate, name), up)
        out = self.new(gate.rows, gate.width, gate.itemsize)
        return self.apply("gated", [gate, up], [out], saves=[gate, up])

    def softcap(self, x: Value) -> Value:
        """cap * tanh(x / cap). Kept: the result of tanh."""
        if not self.eager:
            return self.unary("softcap", x, saves="output")
        return self.scale(self.unary("tanh", self.scale(x, "divide"), saves="output"))

    def rotate(self, x: Value, heads: int, channels: int, *, joined: bool = False, halved: bool = False) -> Value:
        """Rotary embedding (Su et al. 2021) of the first `channels` of each head, with tables that another block holds.

        `joined`: the class cuts and joins rotated and other channels even where it rotates all of them. `halved`: it
        splits channels into halves at once, where others take slices, whose gradients lie head after head and have to
        be copied to lie token after token.
        """
        tables = [self.foreign(self.layout.tokens, channels) for _ in range(2)]
        part = x.view(x.rows, heads * channels)
        if not self.eager:
            return self.apply("rotate", [x, *tables], [self.new(x.rows, x.width)], saves=tables)
        whole = part.width == x.width and not joined
        part, *rest = (part,) if whole else self.slices(x, part.width, x.width - part.width)
        straight = self.multiply(part, tables[0])
        half = part.width // 2
        first, second = self.split(part, half, half) if halved else self.slices(part, half, half)
        copied = Backward(2 * second.bytes + 2 * x.bytes, 2)
        negative = self.unary("neg", second, backward=None if halved else copied)
        turned = self.cat([negative, first], self.new(part.rows, part.width))
        out = self.add(straight, self.multiply(turned, tables[1]))
        if whole:
            return out
        return self.cat([out, *rest], self.new(x.rows, x.width))
